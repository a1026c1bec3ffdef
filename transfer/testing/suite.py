"""What the parts of the conformance suite of agents share: how an agent is made, and the fixtures."""

from collections.abc import Iterator
from typing import Final

import pytest

from kvstore.transfer.agent import Direction, TransferAgent
from kvstore.transfer.testing.peer import PeerProcess, RegionAllocator
from kvstore.transfer.testing.scene import Pair

MIB: Final = 1 << 20

both_directions = pytest.mark.parametrize("direction", Direction)


class AgentSuite:
    """The base of each part. A transport's own class says how its agents are made."""

    checks_keys = True
    """The owner's side checks keys, bounds and whether the region is still open. False only where hardware serves peers unasked."""
    fences_closed_regions = True
    """After a region's `close` at its owner no byte of a peer's lands in it. False only where peers copy into it by themselves."""

    def make_agent(self, name: str) -> TransferAgent:
        """An agent called so. Also called on a new instance of the test class in another process, where there are no fixtures."""
        raise NotImplementedError

    @pytest.fixture
    def memory(self) -> Iterator[RegionAllocator]:
        with RegionAllocator() as memory:
            yield memory

    @pytest.fixture
    def pair(self, memory: RegionAllocator) -> Iterator[Pair]:
        owner, user = self.make_agent("owner"), self.make_agent("user")
        yield Pair(owner, user, memory)
        user.close()
        owner.close()

    @pytest.fixture
    def peer(self) -> Iterator[PeerProcess]:
        """An agent of another process, with one region of 32 MiB."""
        with PeerProcess(type(self), region_bytes=32 * MIB) as peer:
            yield peer
