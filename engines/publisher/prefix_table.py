"""Table of which registered engine holds which blocks of its own, in which medium: for routers that ask by token ids. Sans-I/O.

Blocks of one context can be equal: those of one tenant, model, adapter, salt and block size. Keys of blocks follow from their tokens, so
that engines which hash differently are found alike.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from kvstore.engines.kv_events.events import CPU, DISK, GPU, BlockHash, BlocksRemoved, BlocksStored, Event, keys_of_stored
from kvstore.kvcache.hashing import as_int32
from kvstore.kvcache.naming import Naming
from kvstore.protocol.errors import Full, InvalidArgument

MAX_SERVICES: Final = 1024
MAX_KNOWN_TOKENS: Final = 1 << 22
"""Token ids that are remembered of blocks, of all contexts together: 16 MiB, and some 150 bytes a block."""
TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Context:
    """What blocks agree on that can be equal."""

    tenant: str
    model: str
    adapter: str
    salt: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Service:
    """One data-parallel rank of an engine, which publishes KV events."""

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
    """Leading tokens of a prompt at one rank, by medium. Each run includes the one before: it goes on where that ends."""

    gpu: int
    cpu: int
    disk: int


@dataclass(frozen=True, slots=True)
class InstanceMatch:
    """Leading tokens of a prompt at an instance: of each rank, and in each medium alone at the rank that has most."""

    ranks: Mapping[int, RankMatch]
    alone: Mapping[str, int]

    @property
    def longest(self) -> int:
        return max(rank.disk for rank in self.ranks.values())


@dataclass(slots=True)
class _Holdings:
    """Of one service: its blocks in each medium, by the engine's name of them."""

    service: Service
    naming: Naming
    keys: dict[str, dict[BlockHash, bytes]] = field(default_factory=lambda: {GPU: {}, CPU: {}, DISK: {}})
    held: dict[str, set[bytes]] = field(default_factory=lambda: {GPU: set(), CPU: set(), DISK: set()})
    """The same keys, without the names."""

    def key_of(self, name: BlockHash) -> bytes | None:
        return next((keys[name] for keys in self.keys.values() if name in keys), None)

    def apply(self, event: Event) -> list[bytes]:
        """Keys of the blocks that the event stored, in its order."""
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
    """Not thread-safe. Memory: an entry for each block of each service and medium, and the tokens of MAX_KNOWN_TOKENS."""

    def __init__(self, naming_of: Callable[[Context], Naming]) -> None:
        self._naming_of = naming_of
        self._holdings: dict[str, _Holdings] = {}
        self._tokens: dict[bytes, bytes] = {}
        """By key, the most recent last: 4 bytes a token."""
        self._known_bytes = 0

    @property
    def services(self) -> list[Service]:
        return [each.service for each in self._holdings.values()]

    def add(self, service: Service) -> bool:
        """Whether the service is new. Raises InvalidArgument if another one has its name, Full beyond MAX_SERVICES."""
        if (known := self._holdings.get(service.name)) is not None:
            if known.service == service:
                return False
            raise InvalidArgument(f"{service.name} is registered at {known.service.endpoint} with other members: unregister it first")
        if len(self._holdings) >= MAX_SERVICES:
            raise Full(f"{MAX_SERVICES} publishers are registered, which is the most: unregister those that are gone")
        self._holdings[service.name] = _Holdings(service, self._naming_of(service.context))
        return True

    def remove(self, name: str) -> Service | None:
        """The service that was removed; None: there is none of this name."""
        found = self._holdings.pop(name, None)
        return None if found is None else found.service

    def apply(self, service: Service, events: Iterable[Event]) -> None:
        """Take what an engine published; nothing of a service that was removed or replaced.

        Raises InvalidArgument for what are no token ids: the rest of the events was not taken.
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
        """Nothing is known of the service any more."""
        if (holdings := self._of(service)) is not None:
            holdings.clear()

    def tokens_of(self, key: bytes) -> list[int] | None:
        """Token ids of a block, if an engine published them lately."""
        found = self._tokens.get(key)
        return None if found is None else array("i", found).tolist()

    def match(
        self, context: Context, keys: Sequence[bytes], *, instance: str | None = None, in_store: Sequence[str] = ()
    ) -> dict[str, InstanceMatch]:
        """What each instance of the context has of a prompt whose full blocks have these keys; `instance`: that one alone.

        `in_store`: the medium in which every instance reaches each block beside its own, "" for none.
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
        """Raises InvalidArgument for what are no token ids."""
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
    """Where the unbroken run of blocks from `start` on ends."""
    end = start
    while end < len(keys) and (keys[end] in held or keys[end] in shared):
        end += 1
    return end
