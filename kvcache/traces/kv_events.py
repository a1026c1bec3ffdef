"""The prompts behind a recording of a cluster's blocks. A node sees batches of blocks read and stored; which of them belong together is
told by their chains.

A prompt is the chain from its first block to its deepest one. Batches of one chain without a block in common make one prompt: what was
read of it, at about the same time, then what was stored of it, each batch within `join_s` of the one before, on however many nodes. A
block that comes again begins another prompt. The order of batches decides nothing else, so clients may be interleaved as they like.

What cannot be told apart: two clients that store parts of the same new chain at the same time; and one long prompt from two turns of a
conversation within `join_s`, the second of which did not read its prefix because the engine still had it. Nodes' clocks must not differ
by more than a prefill takes.

Blocks stored without parents: a batch none of whose blocks names one is a chain in its order, if it is the first to show them. Where a
parent has never been seen itself, the block before it in the batch stands for what lies between, until it is.
A block's tokens are unknown here, and so is what was generated: lengths are whole blocks, output is 0 tokens.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Final

from kvstore.kvcache.traces.event_file import READ, REMOVED, BlockEvent, LostEvents, is_recording, read_events
from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from kvstore.protocol.errors import InvalidArgument

JOIN_S: Final = 60.0
"""From reading a prompt's prefix to storing its rest lies a prefill: seconds, and a queue under load. The next turn of a conversation
comes later than the 30 s and more that were measured in the published trace, and reads what it shares."""
READ_SPREAD_MS: Final = 100.0
"""A client reads all that it wants of a prompt at once, from several nodes or in several messages: they come within this of one another."""
BLOCK_TOKENS: Final = 512
_ROOT: Final = -1


@dataclass(frozen=True, slots=True)
class _ChainPart:
    """What a batch says of one chain: the chain from its first block on, and which of its blocks were in the batch."""

    chain: Sequence[int]
    blocks: frozenset[int]
    is_read: bool


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that may still grow. `blocks` are those of its chain that were read or stored."""

    start_ms: float
    last_ms: float
    chain: Sequence[int]
    blocks: set[int]
    is_only_read: bool
    is_open: bool = True
    members: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.members = frozenset(self.chain)

    def takes(self, part: _ChainPart, now_ms: float) -> bool:
        """Whether the part may be of this prompt: one chain, no block twice, and no read but together with its other reads."""
        if not self.blocks.isdisjoint(part.blocks):
            return False
        if part.is_read and not (self.is_only_read and now_ms - self.last_ms <= READ_SPREAD_MS):
            return False
        return part.chain[-1] in self.members or self.chain[-1] in part.chain


class PromptAssembler:
    """Events in, in the order of their time; prompts out, in the order of their first events. Ids of blocks are given by first sight."""

    def __init__(self, *, join_s: float = JOIN_S, block_tokens: int = BLOCK_TOKENS) -> None:
        """Raises InvalidArgument for a negative time, or blocks of no tokens."""
        if not join_s >= 0 or block_tokens < 1:
            raise InvalidArgument(f"join_s is {join_s} and block_tokens {block_tokens}: a time from 0 s on, and at least one token")
        self._join_ms = join_s * 1000
        self._block_tokens = block_tokens
        self._ids: dict[tuple[str, bytes], int] = {}
        self._parents: dict[int, int] = {}
        self._first_ms: float | None = None
        self._started: deque[_Prompt] = deque()
        self._open: dict[_Prompt, None] = {}
        """By the time of their last part."""
        self._by_end: dict[int, dict[_Prompt, None]] = {}
        """Open prompts by their deepest block: another batch may extend them."""
        self._by_hole: dict[int, dict[_Prompt, None]] = {}
        """Open prompts by each block of their chain that has been neither read nor stored."""

    def add(self, event: BlockEvent | LostEvents) -> Iterator[TraceRequest]:
        """Take in one event; the prompts that are complete by then."""
        now_ms = event.timestamp_ms
        if self._first_ms is None:
            self._first_ms = now_ms
        while self._open and (oldest := next(iter(self._open))).last_ms < now_ms - self._join_ms:
            self._close(oldest)
        if isinstance(event, BlockEvent) and event.kind != REMOVED:
            for part in self._parts(event):
                self._place(part, now_ms)
        return self._complete()

    def finish(self) -> Iterator[TraceRequest]:
        """There are no more events: the prompts that are left."""
        for prompt in list(self._open):
            self._close(prompt)
        return self._complete()

    def _complete(self) -> Iterator[TraceRequest]:
        while self._started and not self._started[0].is_open:
            prompt = self._started.popleft()
            chain = self._chain(prompt.chain[-1])  # again: the parents of blocks that it lacked may have been told since
            yield TraceRequest(prompt.start_ms - (self._first_ms or 0), len(chain) * self._block_tokens, 0, tuple(chain))

    # --- what a batch says ---

    def _parts(self, event: BlockEvent) -> Iterator[_ChainPart]:
        """One part for each chain of the batch, the first first."""
        keys = list(dict.fromkeys(self._learn(event)))
        inner = {self._parents[key] for key in keys}
        chains: list[list[int]] = []
        covered: set[int] = set()
        for key in reversed(keys):
            if key not in inner and key not in covered:
                chains.append(self._chain(key))
                covered.update(chains[-1][:-1])
        batch = frozenset(keys)
        for chain in reversed(chains):
            if chain[-1] not in covered:
                yield _ChainPart(chain, batch.intersection(chain), event.kind == READ)

    def _learn(self, event: BlockEvent) -> list[int]:
        """The ids of the batch's blocks; their parents are known from now on."""
        tenant, ids, parents = event.tenant, self._ids, self._parents
        keys = [ids.setdefault((tenant, key), len(ids)) for key in event.keys]
        if any(event.parents):
            for key, parent in zip(keys, event.parents, strict=True):
                parents[key] = ids.setdefault((tenant, parent), len(ids)) if parent else _ROOT
            for before, key in pairwise(keys):
                if parents[key] != _ROOT:
                    parents.setdefault(parents[key], before)
        else:
            before = _ROOT
            for key in keys:
                parents.setdefault(key, before)
                before = key
        return keys

    def _chain(self, key: int) -> list[int]:
        chain, seen = [], set()
        while key != _ROOT and key not in seen:  # what a client calls its parents may go round in circles
            chain.append(key)
            seen.add(key)
            key = self._parents.get(key, _ROOT)
        chain.reverse()
        return chain

    # --- which prompt it is of ---

    def _place(self, part: _ChainPart, now_ms: float) -> None:
        prompt = self._find(part, now_ms)
        if prompt is None:
            prompt = _Prompt(now_ms, now_ms, part.chain, set(part.blocks), part.is_read)
            self._started.append(prompt)
        else:
            self._forget(prompt)
            prompt.last_ms = now_ms
            prompt.blocks |= part.blocks
            prompt.is_only_read = part.is_read
            if part.chain[-1] not in prompt.members:
                prompt.chain, prompt.members = part.chain, frozenset(part.chain)
        self._open[prompt] = None
        self._by_end.setdefault(prompt.chain[-1], {})[prompt] = None
        for hole in prompt.members - prompt.blocks:
            self._by_hole.setdefault(hole, {})[prompt] = None

    def _find(self, part: _ChainPart, now_ms: float) -> _Prompt | None:
        """The newest prompt that misses a block of the part; else the one that ends closest above it, rather one without other holes."""
        ends = [key for key in reversed(part.chain) if key not in part.blocks]  # a prompt that ends with one of them has had it
        for index, keys in ((self._by_hole, part.blocks), (self._by_end, ends)):
            for key in keys:
                takers = [prompt for prompt in reversed(index.get(key, {})) if prompt.takes(part, now_ms)]
                if takers:
                    # What a prompt lacks is stored in the order of its chain: one with a hole has not come to what lies below yet.
                    return min(takers, key=lambda prompt: not prompt.members <= prompt.blocks | part.blocks)
        return None

    def _close(self, prompt: _Prompt) -> None:
        self._forget(prompt)
        prompt.is_open = False

    def _forget(self, prompt: _Prompt) -> None:
        """Take the prompt out of every index."""
        del self._open[prompt]
        for index, keys in ((self._by_end, {prompt.chain[-1]}), (self._by_hole, prompt.members - prompt.blocks)):
            for key in keys:
                del index[key][prompt]
                if not index[key]:
                    del index[key]


def prompts(
    events: Iterable[BlockEvent | LostEvents], *, join_s: float = JOIN_S, block_tokens: int = BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """The prompts behind `events`, which are in the order of their time. Timestamps count from the first event."""
    assembler = PromptAssembler(join_s=join_s, block_tokens=block_tokens)
    for event in events:
        yield from assembler.add(event)
    yield from assembler.finish()


def read_prompts(path: str | Path, *, join_s: float = JOIN_S, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """The prompts of a file, a trace in the Mooncake format or a recording of a cluster: its first line tells.

    A trace is read a line at a time; of a recording all that was read and stored is held in memory, to be put into one order of time.
    Raises TraceError as read_trace and read_events do.
    """
    if not is_recording(path):
        yield from read_trace(path)
        return
    events = (event for event in read_events(path) if isinstance(event, BlockEvent) and event.kind != REMOVED)
    yield from prompts(sorted(events, key=attrgetter("timestamp_ms")), join_s=join_s, block_tokens=block_tokens)
