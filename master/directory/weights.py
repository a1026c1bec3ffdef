"""Table of weight versions: which engines use which, and whose blocks nodes evict first. Sans-I/O; `now_ns` is passed
in.

Engines report the versions that they use; a use ends LEASE_S after its last report. Named versions, and that of the
files, are durable; private ones (made in memory, without a name) are not. A version is retired in two cases:

- No live engine uses it, and a later version of the same weights came into use.
- An operator retired it, and no engine has begun to use it since."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash

from kvstore.kvcache.namespace import ID_BYTES, Namespace
from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import weights_records as form
from kvstore.master.directory.weights_records import NamespaceRecord, Weights, WeightsRecord, WeightsVersion
from kvstore.protocol.errors import Full, InvalidArgument

LEASE_S: Final = 30.0
REPORT_S: Final = 10.0
"""Interval of reports: two may be lost."""
RECORD_S: Final = 600.0
"""Interval at which the last use of a version in use is stored."""
SCAN_S: Final = 60.0
"""Interval at which long unused versions are searched."""
FORGET_S: Final = 30 * 86_400.0
"""An unused version is forgotten after this; its blocks are evicted like others from then on."""
MAX_VERSIONS: Final = 4096
MAX_OF_TENANT: Final = 512
"""Versions in the table. Above either limit the least recently used one is forgotten."""
MAX_NAMESPACES: Final = 4096
MAX_OF_REPORT: Final = 256
"""Namespaces in one report: shards times groups of layers times adapters."""
MAX_ENGINES: Final = 4096
MAX_USERS: Final = 16
"""Engine names stored with a version."""
MAX_ENGINE_BYTES: Final = 128
MAX_TEXT_BYTES: Final = 1024
MAX_FORM_BYTES: Final = 8192
PRIVATE: Final = "~private-"
"""Prefix of versions that no other engine can name (engines/weights/identity.py)."""


class ReportedNamespace(NamedTuple):
    """A namespace's id and its canonical form with a digest in place of the salt."""

    id: bytes
    form: bytes


class KnownNamespace(NamedTuple):
    """A namespace in the table: the version of its blocks, its model, and its canonical form."""

    version: WeightsVersion
    model: str
    form: bytes


class RetiredNamespaces(NamedTuple):
    """Namespaces of retired weights by tenant, as in block records. `version` differs when they do; never 0."""

    version: int
    namespaces: Mapping[str, tuple[str, ...]]


NONE_RETIRED: Final = RetiredNamespaces(1, {})

_Reported = Mapping[bytes, KnownNamespace]
"""Namespaces of one version by id."""


@dataclass(slots=True)
class VersionRow:
    """A version in the table. `users` are live engines; `last_users` are the live ones, or those of the last use."""

    began_ms: int
    used_ms: int
    is_retired: bool = False
    """By an operator."""
    users: set[str] = field(default_factory=set)
    last_users: tuple[str, ...] = ()
    namespaces: set[bytes] = field(default_factory=set)
    recorded_ms: int = 0


@dataclass(slots=True)
class _Engine:
    keys: frozenset[WeightsVersion]
    until_ns: int


class WeightsTable:
    """Versions, their engines and namespaces. Not thread-safe."""

    def __init__(
        self, recorded: Iterable[WeightsRecord] = (), namespaces: Iterable[NamespaceRecord] = (), *, now_ns: int = 0, wall_ns: int = 0
    ) -> None:
        """Load the table from its records. Engines in use count as live for one lease: they report to this master
        soon."""
        self._wall_offset_ns = wall_ns - now_ns
        self.rows: dict[WeightsVersion, VersionRow] = {}
        self.namespaces: dict[tuple[str, bytes], KnownNamespace] = {}
        """By tenant and id."""
        self._scan_ns = now_ns
        """Next search for long unused versions."""
        self._engines: dict[tuple[str, str], _Engine] = {}
        self._retired: set[WeightsVersion] = set()
        self.retired = NONE_RETIRED
        for record in recorded:
            self.rows[record.key] = VersionRow(record.began_ms, record.used_ms, record.is_retired, last_users=record.users)
            if record.is_in_use:
                self._restore(record, now_ns)
        by_digest = {form.digest(key): key for key in self.rows}
        for one in namespaces:
            if one.version in by_digest:
                self._keep((one.tenant, one.id), KnownNamespace(by_digest[one.version], one.model, one.form))
        self._find_retired()

    def _restore(self, record: WeightsRecord, now_ns: int) -> None:
        tenant = record.key.weights.tenant
        self.rows[record.key].users.update(record.users)
        for user in record.users:
            known = self._engines.get((tenant, user))
            keys = (known.keys if known is not None else frozenset()) | {record.key}
            self._engines[tenant, user] = _Engine(keys, now_ns + int(LEASE_S * 1e9))

    def report(self, tenant: str, engine: str, base: str, version: str, namespaces: Sequence[ReportedNamespace], now_ns: int) -> list[Op]:
        """Record that the engine uses these weights, and no others; return operations.

        Raises InvalidArgument (a text or form is too long, or invalid), Full (too many engines, or versions or
        namespaces in use); nothing has changed then."""
        found = self._checked(tenant, engine, base, version, namespaces)
        known = self._engines.get((tenant, engine))
        if known is None and len(self._engines) >= MAX_ENGINES:
            raise Full(f"{MAX_ENGINES} engines report weights already")
        ops = self._evict_for(tenant, found)
        now_ms, changed = self._ms(now_ns), known is None or known.keys != found.keys()
        for key, of_version in found.items():
            ops += self._use(key, engine, of_version, now_ms)
        self._engines[tenant, engine] = _Engine(frozenset(found), now_ns + int(LEASE_S * 1e9))
        if known is not None:
            ops += self._end_use(engine, known.keys - found.keys())
        if changed or ops:
            self._find_retired()
        return ops

    def leave(self, tenant: str, engine: str) -> list[Op]:
        """End the engine's use; return operations. An unknown engine is ignored."""
        known = self._engines.pop((tenant, engine), None)
        if known is None:
            return []
        ops = self._end_use(engine, known.keys)
        self._find_retired()
        return ops

    def retire(self, tenant: str, base: str, version: str) -> tuple[int, list[Op]]:
        """Retire a version with all its adapters; return the number of rows, and operations. Raises InvalidArgument
        for an unknown version."""
        keys = [key for key in self.rows if (key.weights.tenant, key.weights.base, key.version) == (tenant, base, version)]
        if not keys:
            raise InvalidArgument(f"no engine of tenant {tenant!r} ever reported the weights {named(base, version)}: see kvstore weights")
        for key in keys:
            self.rows[key].is_retired = True
        self._find_retired()
        return len(keys), [op for key in keys for op in self._recorded(key)]

    def expire(self, now_ns: int) -> list[Op]:
        """End the use of engines that stopped reporting, and forget long unused versions; return operations."""
        over = [place for place, engine in self._engines.items() if engine.until_ns <= now_ns]
        ops = [op for place in over for op in self._end_use(place[1], self._engines.pop(place).keys)]
        forgotten: list[WeightsVersion] = []
        if now_ns >= self._scan_ns:
            self._scan_ns = now_ns + int(SCAN_S * 1e9)
            oldest_ms = self._ms(now_ns) - int(FORGET_S * 1000)
            forgotten = [key for key, row in self.rows.items() if not row.users and row.used_ms < oldest_ms]
        ops += [op for key in forgotten for op in self._forget(key)]
        if over or forgotten:
            self._find_retired()
        return ops

    def is_retired(self, key: WeightsVersion) -> bool:
        """True if blocks of the version are evicted first."""
        return key in self._retired

    def used_age_s(self, row: VersionRow, now_ns: int) -> float:
        """Seconds since its last report."""
        return max(0, self._ms(now_ns) - row.used_ms) / 1000

    def _checked(
        self, tenant: str, engine: str, base: str, version: str, namespaces: Sequence[ReportedNamespace]
    ) -> dict[WeightsVersion, dict[bytes, KnownNamespace]]:
        """Return the reported versions with their namespaces. Known forms are not parsed again. Raises
        InvalidArgument."""
        _check(engine, base, version, namespaces)
        found: dict[WeightsVersion, dict[bytes, KnownNamespace]] = {}
        if not namespaces:
            found[WeightsVersion(Weights(tenant, base), version)] = {}
        for one in namespaces:
            known = self.namespaces.get((tenant, one.id))
            if known is None or known.form != one.form:
                known = _read(tenant, one.form)
            found.setdefault(known.version, {})[one.id] = known
        return found

    def _use(self, key: WeightsVersion, engine: str, namespaces: _Reported, now_ms: int) -> list[Op]:
        row = self.rows.get(key)
        is_new = row is None
        if row is None:
            row = self.rows[key] = VersionRow(now_ms, now_ms)
        begins = engine not in row.users
        if begins:
            if not row.users:
                row.began_ms = max([now_ms, *(other.began_ms + 1 for found, other in self.rows.items() if found.weights == key.weights)])
                row.last_users = ()
            row.is_retired = False
            row.users.add(engine)
            row.last_users = tuple(sorted(row.users)[:MAX_USERS])
        row.used_ms = max(row.used_ms, now_ms)
        tenant, digest = key.weights.tenant, form.digest(key)
        new = [(id, one) for id, one in namespaces.items() if self._keep((tenant, id), one)]
        ops = [form.put_namespace(NamespaceRecord(tenant, id, digest, one.model, one.form)) for id, one in new]
        if is_private(key.version):
            return []
        return ops + (self._recorded(key) if is_new or begins or now_ms - row.recorded_ms >= RECORD_S * 1000 else [])

    def _end_use(self, engine: str, keys: Iterable[WeightsVersion]) -> list[Op]:
        ops: list[Op] = []
        for key in keys:
            row = self.rows[key]
            row.users.discard(engine)
            if row.users:
                row.last_users = tuple(sorted(row.users)[:MAX_USERS])
            ops += self._recorded(key)
        return ops

    def _recorded(self, key: WeightsVersion) -> list[Op]:
        if is_private(key.version):
            return []
        row = self.rows[key]
        row.recorded_ms = row.used_ms
        return [form.put_weights(WeightsRecord(key, row.began_ms, row.used_ms, bool(row.users), row.is_retired, row.last_users))]

    def _keep(self, place: tuple[str, bytes], namespace: KnownNamespace) -> bool:
        """Store a namespace of a version. Return False if it is known."""
        if place in self.namespaces:
            return False
        self.namespaces[place] = namespace
        self.rows[namespace.version].namespaces.add(place[1])
        return True

    def known(self, tenant: str, namespace: str) -> KnownNamespace | None:
        """Look up a namespace as it is in block records; None if no engine reported it."""
        try:
            return self.namespaces.get((tenant, bytes.fromhex(namespace)))
        except ValueError:
            return None

    def _evict_for(self, tenant: str, wanted: Mapping[WeightsVersion, _Reported]) -> list[Op]:
        """Forget least recently used versions to fit `wanted`. Raises Full, with nothing changed."""
        versions = sum(key not in self.rows for key in wanted)
        namespaces = sum((tenant, id) not in self.namespaces for of_version in wanted.values() for id in of_version)
        if not versions and not namespaces:
            return []
        of_tenant = sum(key.weights.tenant == tenant for key in self.rows) if versions else 0
        mine = _WeightsLimits(of_tenant + versions - MAX_OF_TENANT, 0)
        all_of = _WeightsLimits(len(self.rows) + versions - MAX_VERSIONS, len(self.namespaces) + namespaces - MAX_NAMESPACES)
        chosen: list[WeightsVersion] = []
        unused = sorted((row.used_ms, key) for key, row in self.rows.items() if not row.users and key not in wanted)
        for is_own in (True, False):  # other tenants' versions only if its own do not suffice
            for _used_ms, key in unused:
                if (key.weights.tenant == tenant) is is_own and (all_of.is_lacking or (is_own and mine.is_lacking)):
                    chosen.append(key)
                    for room in (mine, all_of) if is_own else (all_of,):
                        room.free(len(self.rows[key].namespaces))
        if mine.is_lacking or all_of.is_lacking:
            raise Full("engines use as many versions of weights, or namespaces, as the master's table holds: report fewer")
        return [op for key in chosen for op in self._forget(key)]

    def _forget(self, key: WeightsVersion) -> list[Op]:
        row, tenant = self.rows.pop(key), key.weights.tenant
        for id in row.namespaces:
            del self.namespaces[tenant, id]
        if is_private(key.version):
            return []
        return [form.delete_weights(key), *(form.delete_namespace(tenant, id) for id in row.namespaces)]

    def _find_retired(self) -> None:
        """Recompute the retired namespaces."""
        newest: dict[Weights, int] = {}
        for key, row in self.rows.items():
            newest[key.weights] = max(newest.get(key.weights, 0), row.began_ms)
        self._retired = {key for key, row in self.rows.items() if row.is_retired or (not row.users and row.began_ms < newest[key.weights])}
        found: dict[str, list[str]] = {}
        for key in self._retired:
            if ids := self.rows[key].namespaces:
                found.setdefault(key.weights.tenant, []).extend(id.hex() for id in ids)
        namespaces = {tenant: tuple(sorted(ids)) for tenant, ids in sorted(found.items())}
        if namespaces != self.retired.namespaces:
            self.retired = (
                RetiredNamespaces(xxhash.xxh3_64_intdigest(repr(namespaces).encode()) or 1, namespaces) if namespaces else NONE_RETIRED
            )

    def _ms(self, now_ns: int) -> int:
        return (now_ns + self._wall_offset_ns) // 1_000_000

    def of(self, tenant: str | None) -> Iterator[tuple[WeightsVersion, VersionRow]]:
        """Return versions of a tenant, or of all (None), the latest to come into use first."""
        rows = sorted(self.rows.items(), key=lambda item: (-item[1].began_ms, item[0]))
        return ((key, row) for key, row in rows if tenant is None or key.weights.tenant == tenant)


@dataclass(slots=True)
class _WeightsLimits:
    """Versions and namespaces above a limit; none if not positive."""

    versions: int
    namespaces: int

    @property
    def is_lacking(self) -> bool:
        return self.versions > 0 or self.namespaces > 0

    def free(self, namespaces: int) -> None:
        self.versions -= 1
        self.namespaces -= namespaces


def is_private(version: str) -> bool:
    """Return True if no other engine can name the version: it is in memory only."""
    return version.startswith(PRIVATE)


def named(base: str, version: str) -> str:
    """`BASE` or `BASE@VERSION`."""
    return f"{base}@{version}" if version else base


def _check(engine: str, base: str, version: str, namespaces: Sequence[ReportedNamespace]) -> None:
    """Raises InvalidArgument."""
    if not 1 <= len(engine.encode()) <= MAX_ENGINE_BYTES:
        raise InvalidArgument(f"an engine's name is 1 to {MAX_ENGINE_BYTES} bytes long, not {len(engine.encode())}")
    for name, text in (("base", base), ("version", version)):
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise InvalidArgument(f"the {name} of weights is at most {MAX_TEXT_BYTES} bytes long, not {len(text.encode())}")
    if len(namespaces) > MAX_OF_REPORT:
        raise InvalidArgument(f"an engine reports {MAX_OF_REPORT} namespaces at most, not {len(namespaces)}")
    for one in namespaces:
        if len(one.id) != ID_BYTES or len(one.form) > MAX_FORM_BYTES:
            raise InvalidArgument(f"a namespace has an id of {ID_BYTES} bytes and a form of {MAX_FORM_BYTES} bytes at most")


def _read(tenant: str, form: bytes) -> KnownNamespace:
    """Raises InvalidArgument."""
    namespace = Namespace.from_canonical(form)
    base, _at, version = namespace.revision.partition("@")
    key = WeightsVersion(Weights(tenant, base, namespace.adapter, namespace.salt), version)
    return KnownNamespace(key, namespace.model, form)
