"""Table of which registered engine holds which blocks, by medium, for routers that query by token ids. Sans-I/O.

Blocks can be equal within one context: tenant, model, adapter, salt and block size. Keys are computed from tokens, so
engines with different hash functions match.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from kvstore.engines.kv_events.events import CPU, DISK, GPU, BlockHash, BlocksRemoved, BlocksStored, Event, keys_of_stored
from kvstore.kvcache.hashing import as_int32
from kvstore.kvcache.key_names import Naming
from kvstore.protocol.errors import Full, InvalidArgument

MAX_SERVICES: Final = 1024
MAX_KNOWN_TOKENS: Final = 1 << 22
"""Cached token ids of blocks, over all contexts: 16 MiB, and some 150 bytes a block."""
TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Context:
    """Scope within which blocks can be equal."""

    tenant: str
    model: str
    adapter: str
    salt: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Service:
    """One data-parallel rank of an engine that publishes KV events."""

    context: Context
    instance: str
    rank: int
    endpoint: str
    replay_endpoint: str

    @property
    def name(self) -> str:
        return f"{self.instance}|{self.context.tenant}|{self.rank}"


@dataclass(frozen=True, slots=True)
class RankMatch:
    """Leading tokens of a prompt at one rank, by medium. Each number includes the previous one: its run continues
    where that ends."""

    gpu: int
    cpu: int
    disk: int


@dataclass(frozen=True, slots=True)
class InstanceMatch:
    """Leading tokens of a prompt at an instance: of each rank, and for each medium alone the longest run of any
    rank."""

    ranks: Mapping[int, RankMatch]
    alone: Mapping[str, int]

    @property
    def longest(self) -> int:
        return max(rank.disk for rank in self.ranks.values())


@dataclass(slots=True)
class _Holdings:
    """Blocks of one service in each medium, by the engine's name."""

    service: Service
    naming: Naming
    keys: dict[str, dict[BlockHash, bytes]] = field(default_factory=lambda: {GPU: {}, CPU: {}, DISK: {}})
    held: dict[str, set[bytes]] = field(default_factory=lambda: {GPU: set(), CPU: set(), DISK: set()})
    """The same keys, as sets."""

    def key_of(self, name: BlockHash) -> bytes | None:
        return next((keys[name] for keys in self.keys.values() if name in keys), None)

    def apply(self, event: Event) -> list[bytes]:
        """Apply an event; return the keys of the blocks that it stored, in order."""
        match event:
            case BlocksStored():
                named = list(keys_of_stored(event, self.naming, self.key_of, adapter=self.service.context.adapter))
                self.keys[event.medium].update(named)
                keys = [key for _, key in named]
                self.held[event.medium].update(keys)
                return keys
            case BlocksRemoved():
                for name in event.hashes:
                    if (key := self.keys[event.medium].pop(name, None)) is not None:
                        self.held[event.medium].discard(key)
            case _:
                self.clear()
        return []

    def clear(self) -> None:
        for medium in self.keys:
            self.keys[medium].clear()
            self.held[medium].clear()


class PrefixTable:
    """Blocks of all registered services. Not thread-safe. Memory: an entry for each block, service and medium, and
    the tokens of MAX_KNOWN_TOKENS."""

    def __init__(self, naming_of: Callable[[Context], Naming]) -> None:
        self._naming_of = naming_of
        self._holdings: dict[str, _Holdings] = {}
        self._tokens: dict[bytes, bytes] = {}
        """Token ids by key, 4 bytes each; the most recent key is last."""
        self._known_bytes = 0

    @property
    def services(self) -> list[Service]:
        return [each.service for each in self._holdings.values()]

    def add(self, service: Service) -> bool:
        """Add a service; return whether it is new. Raises InvalidArgument: another service has its name. Raises
        Full: beyond MAX_SERVICES."""
        if (known := self._holdings.get(service.name)) is not None:
            if known.service == service:
                return False
            raise InvalidArgument(f"{service.name} is registered at {known.service.endpoint} with other members: unregister it first")
        if len(self._holdings) >= MAX_SERVICES:
            raise Full(f"{MAX_SERVICES} publishers are registered, the maximum: unregister those that have ended")
        self._holdings[service.name] = _Holdings(service, self._naming_of(service.context))
        return True

    def remove(self, name: str) -> Service | None:
        """Remove and return a service; None if no service has this name."""
        found = self._holdings.pop(name, None)
        return None if found is None else found.service

    def apply(self, service: Service, events: Iterable[Event]) -> None:
        """Apply an engine's events. A no-op for a service that was removed or replaced.

        Raises InvalidArgument: invalid token ids; the rest of the events is not applied.
        """
        if (holdings := self._of(service)) is None:
            return
        for event in events:
            keys = holdings.apply(event)
            if isinstance(event, BlocksStored) and event.token_ids:
                size = event.block_tokens
                for index, key in enumerate(keys):
                    self._remember(key, event.token_ids[index * size : (index + 1) * size])

    def clear(self, service: Service) -> None:
        """Drop all blocks of the service."""
        if (holdings := self._of(service)) is not None:
            holdings.clear()

    def tokens_of(self, key: bytes) -> list[int] | None:
        """Return the token ids of a block, if an engine published them recently."""
        found = self._tokens.get(key)
        return None if found is None else array("i", found).tolist()

    def match(
        self, context: Context, keys: Sequence[bytes], *, instance: str | None = None, in_store: Sequence[str] = ()
    ) -> dict[str, InstanceMatch]:
        """Return what each instance of the context holds of a prompt with these block keys; `instance`: only that one.

        `in_store` has, for each block, the medium in which every instance reaches it through the store; "" for none.
        """
        found: dict[str, dict[int, _Holdings]] = {}
        for each in self._holdings.values():
            service = each.service
            if service.context == context and instance in (None, service.instance):
                found.setdefault(service.instance, {})[service.rank] = each
        return {name: _match(ranks, keys, in_store, context.block_tokens) for name, ranks in found.items()}

    def _of(self, service: Service) -> _Holdings | None:
        holdings = self._holdings.get(service.name)
        return holdings if holdings is not None and holdings.service is service else None

    def _remember(self, key: bytes, tokens: Sequence[int]) -> None:
        """Cache a block's tokens. Raises InvalidArgument: invalid token ids."""
        packed = as_int32(tokens).tobytes()
        self._known_bytes += len(packed) - len(self._tokens.pop(key, b""))
        self._tokens[key] = packed
        while self._known_bytes > MAX_KNOWN_TOKENS * TOKEN_BYTES:
            self._known_bytes -= len(self._tokens.pop(next(iter(self._tokens))))


def _match(ranks: Mapping[int, _Holdings], keys: Sequence[bytes], in_store: Sequence[str], block_tokens: int) -> InstanceMatch:
    stored = {medium: {key for key, where in zip(keys, in_store, strict=False) if where == medium} for medium in (CPU, DISK)}
    matches, alone = {}, dict.fromkeys((GPU, CPU, DISK), 0)
    for rank, holdings in sorted(ranks.items()):
        runs, end = {}, 0
        for medium, held in holdings.held.items():
            shared = stored.get(medium, set())
            end = _run_end(keys, end, held, shared)
            runs[medium] = end * block_tokens
            alone[medium] = max(alone[medium], _run_end(keys, 0, held, shared) * block_tokens)
        matches[rank] = RankMatch(**runs)
    return InstanceMatch(matches, alone)


def _run_end(keys: Sequence[bytes], start: int, held: Set[bytes], shared: Set[bytes]) -> int:
    """Return the end of the run of blocks from `start` on that are held or shared."""
    end = start
    while end < len(keys) and (keys[end] in held or keys[end] in shared):
        end += 1
    return end
