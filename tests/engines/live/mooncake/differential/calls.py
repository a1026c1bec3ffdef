"""All groups of generated calls. A group begins with regions of known bytes and has keys of its own."""

from collections.abc import Callable, Iterator

from tests.engines.live.mooncake.differential.address_calls import AddressCalls
from tests.engines.live.mooncake.differential.differences import DIFFERENCES
from tests.engines.live.mooncake.differential.engine_calls import EngineCalls
from tests.engines.live.mooncake.differential.listed_calls import ListedCalls
from tests.engines.live.mooncake.differential.material import Call
from tests.engines.live.mooncake.differential.session_calls import SessionCalls
from tests.engines.live.mooncake.differential.setup_calls import SetupCalls
from tests.engines.live.mooncake.differential.tensor_calls import TensorCalls


class Generator(ListedCalls, AddressCalls, TensorCalls, SessionCalls, SetupCalls, EngineCalls):
    """Of one seed."""

    def groups(self) -> list[tuple[str, list[Call]]]:
        """Return the name and the calls of each group."""
        subjects: list[Callable[[], Iterator[Call]]] = [
            *(self.values, self.keys, self.addresses, self.batches, self.parts, self.ranges, self.registrations, self.removals),
            *(self.patterns, self.leases, self.tensors, self.tensor_memory, self.shards, self.shard_memory, self.get_sessions),
            *(self.put_sessions, self.configurations, self.upserts, self.replicas, self.unset, self.engines),
            *(getattr(self, name) for name in DIFFERENCES),
            *(self.lease_ends, self.names, self.setups),
        ]
        found = []
        for subject in subjects:
            self.prefix = f"{subject.__name__}/"
            found.append((subject.__name__, [self.registered(), *subject()]))
        return found
