"""Reconstructs prompts from a recording of block events: nodes see batches of blocks; chains show which belong
together.

A prompt is the chain from its first block to its deepest one. Disjoint batches of one chain make one prompt: what was
read of it at about the same time, followed by what was stored, each batch within `join_s` of the previous one, on any
nodes. A block that recurs begins another prompt. The order of batches has no other effect, so clients may be
interleaved.

**Limits.**

- Two clients that store parts of the same new chain at the same time look like one.
- Two turns of a conversation within `join_s` look like one long prompt if the second did not read its prefix, because
  the engine still had it.
- Nodes' clocks must not differ by more than the time of a prefill.
- Lengths are whole blocks and output is 0 tokens, because events have no tokens.

**Blocks without parents.** A batch without any parent is a chain in its order, if it is the first to contain them. If a
parent has never been seen itself, the previous block of the batch stands in for the gap until it is.
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
"""Maximum time between batches of one prompt: a prefill and its queueing lie between reading the prefix and storing
the rest. The next turn of a conversation comes 30 s later or more (measured in the published trace) and reads what
it shares."""
READ_SPREAD_MS: Final = 100.0
"""Reads of one prompt, from several nodes or in several messages, are within this time of each other."""
BLOCK_TOKENS: Final = 512
_ROOT: Final = -1


@dataclass(frozen=True, slots=True)
class _ChainPart:
    """Part of a batch that belongs to one chain: the chain from its first block, and the blocks in the batch."""

    chain: Sequence[int]
    blocks: frozenset[int]
    is_read: bool


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that may still grow. `blocks`: blocks of its chain that were read or stored."""

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
        """Return whether `part` may belong to this prompt: same chain, disjoint blocks, and reads only together with
        other reads."""
        if not self.blocks.isdisjoint(part.blocks):
            return False
        if part.is_read and not (self.is_only_read and now_ms - self.last_ms <= READ_SPREAD_MS):
            return False
        return part.chain[-1] in self.members or self.chain[-1] in part.chain


class PromptAssembler:
    """Assembles prompts from events in order of time; prompts are returned in order of their first events. Block ids
    are assigned on first sight. Not thread-safe."""

    def __init__(self, *, join_s: float = JOIN_S, block_tokens: int = BLOCK_TOKENS) -> None:
        """Create it without prompts. Raises InvalidArgument: a negative time, or blocks of no tokens."""
        if not join_s >= 0 or block_tokens < 1:
            raise InvalidArgument(f"join_s is {join_s} and block_tokens {block_tokens}: use at least 0 s and one token")
        self._join_ms = join_s * 1000
        self._block_tokens = block_tokens
        self._ids: dict[tuple[str, bytes], int] = {}
        self._parents: dict[int, int] = {}
        self._first_ms: float | None = None
        self._started: deque[_Prompt] = deque()
        self._open: dict[_Prompt, None] = {}
        """Open prompts in order of their last part."""
        self._by_end: dict[int, dict[_Prompt, None]] = {}
        """Open prompts by their deepest block, which another batch may extend."""
        self._by_hole: dict[int, dict[_Prompt, None]] = {}
        """Open prompts by each block of their chain that was neither read nor stored."""

    def add(self, event: BlockEvent | LostEvents) -> Iterator[TraceRequest]:
        """Add one event; return the prompts that are complete now."""
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
        """Close all prompts and return those that are left."""
        for prompt in list(self._open):
            self._close(prompt)
        return self._complete()

    def _complete(self) -> Iterator[TraceRequest]:
        while self._started and not self._started[0].is_open:
            prompt = self._started.popleft()
            chain = self._chain(prompt.chain[-1])  # again: missing parents may be known by now
            yield TraceRequest(prompt.start_ms - (self._first_ms or 0), len(chain) * self._block_tokens, 0, tuple(chain))

    # --- chains of a batch ---

    def _parts(self, event: BlockEvent) -> Iterator[_ChainPart]:
        """Yield one part for each chain of the batch, in order."""
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
        """Record the parents of the batch's blocks; return the blocks' ids."""
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
        while key != _ROOT and key not in seen:  # clients' parents may form a cycle
            chain.append(key)
            seen.add(key)
            key = self._parents.get(key, _ROOT)
        chain.reverse()
        return chain

    # --- matching of parts to prompts ---

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
        """Return the newest prompt that misses a block of the part; else the prompt that ends closest above it,
        preferably without holes."""
        ends = [key for key in reversed(part.chain) if key not in part.blocks]  # a prompt ending with one of these already has it
        for index, keys in ((self._by_hole, part.blocks), (self._by_end, ends)):
            for key in keys:
                takers = [prompt for prompt in reversed(index.get(key, {})) if prompt.takes(part, now_ms)]
                if takers:
                    # Missing blocks are stored in chain order: a prompt with a hole has not reached the blocks below it yet.
                    return min(takers, key=lambda prompt: not prompt.members <= prompt.blocks | part.blocks)
        return None

    def _close(self, prompt: _Prompt) -> None:
        self._forget(prompt)
        prompt.is_open = False

    def _forget(self, prompt: _Prompt) -> None:
        """Remove the prompt from every index."""
        del self._open[prompt]
        for index, keys in ((self._by_end, {prompt.chain[-1]}), (self._by_hole, prompt.members - prompt.blocks)):
            for key in keys:
                del index[key][prompt]
                if not index[key]:
                    del index[key]


def prompts(
    events: Iterable[BlockEvent | LostEvents], *, join_s: float = JOIN_S, block_tokens: int = BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """Yield the prompts behind `events`, which are in order of time. Timestamps count from the first event."""
    assembler = PromptAssembler(join_s=join_s, block_tokens=block_tokens)
    for event in events:
        yield from assembler.add(event)
    yield from assembler.finish()


def read_prompts(path: str | Path, *, join_s: float = JOIN_S, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Yield the prompts of a file: a trace in the Mooncake format, or a recording of a cluster, by its first line.

    A trace is read line by line. A recording's read and stored events are held in memory, to be sorted by time. Raises
    TraceError as `read_trace` and `read_events`.
    """
    if not is_recording(path):
        yield from read_trace(path)
        return
    events = (event for event in read_events(path) if isinstance(event, BlockEvent) and event.kind != REMOVED)
    yield from prompts(sorted(events, key=attrgetter("timestamp_ms")), join_s=join_s, block_tokens=block_tokens)
