"""Tests of weights.py: which versions are in use, which are retired, and what of it outlives the master."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvstore.kvcache.namespace import Namespace
from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records, weights
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.weights import (
    FORGET_S,
    LEASE_S,
    MAX_OF_REPORT,
    NONE_RETIRED,
    RECORD_S,
    ReportedNamespace,
    WeightsTable,
)
from kvstore.master.directory.weights_records import NamespaceRecord, WeightsRecord
from kvstore.protocol.errors import Full, InvalidArgument

S = 1_000_000_000
NAMESPACE = Namespace(model="m", dtype="bf16", block_tokens=16)
PRIVATE = "~private-1"


def namespace(revision: str, *, adapter: str = "", layers: tuple[int, int] | None = None) -> ReportedNamespace:
    found = replace(NAMESPACE, revision=revision, adapter=adapter, layers=layers)
    return ReportedNamespace(found.id, found.canonical())


class Table:
    """A table, a catalog that it is recorded in, and a clock."""

    def __init__(self, table: WeightsTable | None = None, at_s: float = 0) -> None:
        self.table = table or WeightsTable()
        self.records: dict[bytes, bytes] = {}
        self.at_s = at_s

    @property
    def now_ns(self) -> int:
        return int(self.at_s * S)

    def write(self, ops: Sequence[Op]) -> int:
        for op in ops:
            if op.value is None:
                self.records.pop(op.key, None)
            else:
                self.records[op.key] = op.value
        return len(ops)

    def use(self, engine: str, version: str = "", *, base: str = "base", tenant: str = "red", **of: object) -> int:
        """One namespace, of the version; the number of operations."""
        revision = f"{base}@{version}" if version else base
        found = [namespace(revision, **of)]  # type: ignore[arg-type]
        self.at_s += 1
        return self.write(self.table.report(tenant, engine, base, version, found, self.now_ns))

    def retired(self) -> list[str]:
        return sorted(key.version or "base" for key in self.table.rows if self.table.is_retired(key))

    def taken_over(self) -> "Table":
        """As the next master has it."""
        followed = FollowedRecords()
        followed.take([Op(key, value) for key, value in self.records.items()])
        versions, namespaces = followed.each(WeightsRecord), followed.each(NamespaceRecord)
        found = Table(WeightsTable(versions, namespaces, now_ns=self.now_ns, wall_ns=self.now_ns), self.at_s)
        found.records = self.records
        return found


def test_an_older_version_is_retired_once_no_engine_uses_it() -> None:
    table = Table()
    table.use("a")
    table.use("b")
    table.use("a", "v1")
    assert table.retired() == [], "b uses the base"
    table.use("b", "v1")
    assert table.retired() == ["base"]
    assert table.table.retired.namespaces == {"red": (namespace("base").id.hex(),)}
    table.use("a", "v2")
    table.use("b", "v2")
    assert table.retired() == ["base", "v1"]


def test_the_newest_version_is_not_retired_by_its_engines_end() -> None:
    table = Table()
    table.use("a")
    table.use("a", "v1")
    table.write(table.table.leave("red", "a"))
    assert table.retired() == ["base"]
    assert table.table.leave("red", "a") == []


def test_an_engine_that_starts_from_files_uses_the_base_again() -> None:
    table = Table()
    table.use("a")
    table.use("a", "v1")
    table.use("b")
    assert table.retired() == []
    table.write(table.table.leave("red", "a"))
    assert table.retired() == ["v1"], "the base came into use after it"


def test_versions_are_of_their_own_weights_only() -> None:
    table = Table()
    table.use("a")
    table.use("b", "v1", tenant="blue")
    table.use("c", "v1", base="other")
    table.use("d", "v1", adapter="lora")
    table.write(table.table.leave("red", "a"))
    assert table.retired() == []


def test_ranks_and_layer_groups_share_one_version() -> None:
    table = Table()
    for engine, layers in (("a", (0, 2)), ("b", (2, 4))):
        table.use(engine, layers=layers)
    assert len(table.table.rows) == 1
    for engine in ("a", "b"):
        table.use(engine, "v1")
    assert len(table.table.retired.namespaces["red"]) == 2


def test_a_missed_report_ends_the_use() -> None:
    table = Table()
    table.use("a")
    table.use("b", "v1")
    assert table.table.expire(table.now_ns + int((LEASE_S - 2) * S)) == []
    table.use("b", "v1")
    table.at_s += LEASE_S - 1
    assert table.write(table.table.expire(table.now_ns)) == 1
    assert table.retired() == ["base"]
    [row] = [row for key, row in table.table.rows.items() if not key.version]
    assert (row.users, row.last_users) == (set(), ("a",)), "who used it last is kept"


def test_operator_retires_a_version_until_its_next_use() -> None:
    table = Table()
    table.use("a", "v1")
    table.use("a", "v1", adapter="lora")
    count, ops = table.table.retire("red", "base", "v1")
    table.write(ops)
    assert (count, table.retired()) == (2, ["v1", "v1"])
    table.use("a", "v1", adapter="lora")
    assert table.retired() == ["v1", "v1"], "it used it before"
    assert table.taken_over().retired() == ["v1", "v1"]
    table.use("b", "v1")
    assert table.retired() == ["v1"]
    with pytest.raises(InvalidArgument, match=r"ever reported the weights base@v9: see kvstore weights"):
        table.table.retire("red", "base", "v9")


def test_named_versions_are_durable_and_private_ones_not() -> None:
    table = Table()
    table.use("a", PRIVATE)
    assert table.records == {}
    table.use("a")
    table.use("a", "v1")
    found = table.taken_over()
    assert {key.version for key in found.table.rows} == {"", "v1"}
    assert found.retired() == ["base"]
    assert found.table.retired.namespaces == {"red": (namespace("base").id.hex(),)}
    v1 = namespace("base@v1")
    known = found.table.known("red", v1.id.hex())
    assert known is not None
    assert (known.version.version, known.model, known.form) == ("v1", "m", v1.form)
    assert found.table.known("red", namespace("base@v2").id.hex()) is None
    assert found.table.known("red", "a name") is None


def test_after_a_takeover_engines_count_as_live_for_one_lease() -> None:
    table = Table()
    table.use("a")
    table.use("b")
    table.use("b", "v1")
    found = table.taken_over()
    assert found.retired() == []
    found.at_s += LEASE_S
    assert found.write(found.table.expire(found.now_ns)) == 2
    assert found.retired() == ["base"]


def test_the_last_use_is_recorded_now_and_then() -> None:
    table = Table()
    assert table.use("a") == 2, "the namespace, and the version"
    assert table.use("a") == 0
    table.at_s += RECORD_S
    assert table.use("a") == 1
    record = next(record for key, value in table.records.items() if isinstance(record := records.decode(key, value), WeightsRecord))
    assert (record.used_ms, record.is_in_use, record.users) == (int(table.at_s * 1000), True, ("a",))


def test_what_nobody_used_for_long_is_forgotten() -> None:
    table = Table()
    table.use("a", PRIVATE)
    table.use("a")
    table.write(table.table.leave("red", "a"))
    table.at_s += FORGET_S + 1
    table.use("b", "v1")
    assert table.write(table.table.expire(table.now_ns)) == 2
    assert [key.version for key, _row in table.table.of(None)] == ["v1"]
    assert len(table.records) == 2
    assert table.table.retired is NONE_RETIRED


@pytest.mark.parametrize(
    ("engine", "base", "version", "namespaces", "told"),
    [
        ("", "b", "", [], "an engine's name is 1 to 128 bytes"),
        ("e" * 129, "b", "", [], "an engine's name is 1 to 128 bytes"),
        ("e", "b" * 1025, "", [], "the base of weights is at most 1024"),
        ("e", "b", "v" * 1025, [], "the version of weights is at most 1024"),
        ("e", "b", "", [namespace("b")] * (MAX_OF_REPORT + 1), "reports 256 namespaces at most"),
        ("e", "b", "", [ReportedNamespace(b"short", b"")], "an id of 16 bytes"),
        ("e", "b", "", [ReportedNamespace(bytes(16), bytes(9000))], "a form of 8192 bytes at most"),
        ("e", "b", "", [ReportedNamespace(bytes(16), NAMESPACE.canonical()[:-1])], "not the canonical form"),
    ],
)
def test_bad_reports_are_refused_and_change_nothing(
    engine: str, base: str, version: str, namespaces: list[ReportedNamespace], told: str
) -> None:
    table = WeightsTable()
    with pytest.raises(InvalidArgument, match=told):
        table.report("red", engine, base, version, namespaces, 0)
    assert not table.rows


def test_the_table_forgets_what_was_used_least_recently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_OF_TENANT", 3)
    monkeypatch.setattr(weights, "MAX_VERSIONS", 4)
    monkeypatch.setattr(weights, "MAX_NAMESPACES", 4)
    table = Table()
    for version in ("v1", "v2", "v3", "v4"):
        table.use("a", version)
    assert [key.version for key, _row in table.table.of(None)] == ["v4", "v3", "v2"]
    table.use("b", "v5", tenant="blue")
    table.use("b", "v6", tenant="blue")
    assert [key.version for key, _row in table.table.of(None)] == ["v6", "v5", "v4", "v3"], "the own ones do not suffice"
    for name in ("c", "d"):
        table.use(name, f"of {name}", tenant="green")
    with pytest.raises(Full, match="as many versions of weights, or namespaces"):
        table.use("e", "of e", tenant="green")
    assert len(table.table.rows) == len(table.table.namespaces) == 4
    assert len(table.records) == 8


def test_too_many_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_ENGINES", 1)
    table = Table()
    table.use("a")
    with pytest.raises(Full, match="1 engines report"):
        table.use("b")
    table.use("a", "v1")


def test_a_namespace_whose_version_is_not_recorded_is_left_out() -> None:
    table = Table()
    table.use("a")
    table.records = {key: value for key, value in table.records.items() if key.startswith(b"i")}
    assert not table.taken_over().table.namespaces


def test_retired_namespaces_have_a_version_of_their_own() -> None:
    table = Table()
    assert table.table.retired.version == NONE_RETIRED.version
    table.use("a")
    table.use("a", "v1")
    first = table.table.retired.version
    assert table.taken_over().table.retired.version == first, "nodes keep what they were told"
    table.use("a", "v2")
    assert table.table.retired.version not in (first, NONE_RETIRED.version)
