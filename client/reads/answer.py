"""What a node answered to one Read, beside what it was asked for."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.client.effects import AnyLoan
from kvstore.client.reads.finding import Wanted
from kvstore.client.routes import KnownNode
from kvstore.protocol.node_messages import Blocks
from kvstore.rpc.deadline import Deadline


@dataclass(slots=True)
class Answer:
    """A place is an index into `wanted` and into each column of `blocks`. The values that come inline are still to be read from the loan's
    channel; the others are there for the length of the lease."""

    node: KnownNode
    loan: AnyLoan
    wanted: list[Wanted]
    blocks: Blocks
    deadline: Deadline
    """Of this request."""

    def places(self, status: int) -> list[int]:
        return [place for place, found in enumerate(self.blocks.statuses) if found == status]

    def items(self, places: Iterable[int]) -> list[Wanted]:
        return [self.wanted[place] for place in places]
