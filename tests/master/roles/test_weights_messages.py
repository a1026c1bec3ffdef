"""Promises of weights_messages.py."""

from dataclasses import replace

import pytest

from kvstore.kvcache.namespace import Namespace
from kvstore.master.directory.weights import ReportedNamespace, WeightsTable
from kvstore.master.roles import status_messages as module
from kvstore.master.roles.status_messages import retired_message, table_messages
from kvstore.protocol import control_pb2 as pb

S = 1_000_000_000
BASE = Namespace(model="m", revision="base", dtype="bf16", block_tokens=16)
V1 = replace(BASE, revision="base@v1", adapter="lora")


def reported(namespace: Namespace) -> list[ReportedNamespace]:
    return [ReportedNamespace(namespace.id, namespace.canonical())]


@pytest.fixture
def table() -> WeightsTable:
    table = WeightsTable()
    table.report("red", "a", "base", "", reported(BASE), 0)
    table.report("red", "a", "base", "v1", reported(replace(BASE, revision="base@v1")), 1 * S)
    table.report("blue", "b", "base", "v1", reported(V1), 2 * S)
    return table


def test_a_table_is_told_of_one_tenant_or_of_all(table: WeightsTable) -> None:
    whole = pb.WeightsTable()
    for part in table_messages(table, None, 5 * S):
        whole.MergeFrom(part)
    assert [(one.tenant, one.version, one.is_used, one.is_retired) for one in whole.versions] == [
        ("blue", "v1", True, False),
        ("red", "v1", True, False),
        ("red", "", False, True),
    ]
    first = whole.versions[0]
    assert (first.adapter, list(first.users), first.used_age_s, first.namespaces, first.is_durable) == ("lora", ["b"], 3.0, 1, True)
    assert len(whole.namespaces) == 3
    versions, namespaces = table_messages(table, "blue", 5 * S)
    assert [one.tenant for one in versions.versions] == [one.tenant for one in namespaces.namespaces] == ["blue"]


def test_a_long_table_is_cut_into_messages(table: WeightsTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 2)
    assert [(len(part.versions), len(part.namespaces)) for part in table_messages(table, None, 0)] == [(2, 0), (1, 0), (0, 2), (0, 1)]


def test_retired_namespaces_are_told_by_tenant(table: WeightsTable) -> None:
    message = retired_message(table.retired)
    assert [(one.tenant, list(one.namespaces)) for one in message.tenants] == [("red", [BASE.id.hex()])]
    assert message.version == table.retired.version
