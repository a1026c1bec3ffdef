"""Why a node of this host is not reached through shared memory is logged once, and kept as long as it is so."""

import logging

import pytest

from kvstore.client.connections import routes
from kvstore.client.connections.routes import ShmDiagnostics
from kvstore.rpc.address import NOT_LOCAL


def nowhere(unix: str, host_id: str) -> str:
    return NOT_LOCAL


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "kvstore.client")
    return caplog


@pytest.mark.promise("observable")
def test_each_reason_is_logged_once_per_node(logged: pytest.LogCaptureFixture) -> None:
    told = ShmDiagnostics(nowhere)
    for _ in range(3):
        told.note("n1", "permission denied")
        told.note("n2", "permission denied")
    told.note("n1", "no index")
    told.note("n1", "permission denied")
    assert [record.getMessage() for record in logged.records] == [
        "node 'n1' of this host is not reached through shared memory: permission denied",
        "node 'n2' of this host is not reached through shared memory: permission denied",
        "node 'n1' of this host is not reached through shared memory: no index",
    ]
    assert told.reasons() == {"n1": "permission denied", "n2": "permission denied"}


def test_a_cluster_whose_names_never_end_does_not_fill_memory(logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_LOGGED_REASONS", 2)
    told = ShmDiagnostics(nowhere)
    for number in range(5):
        told.note(f"n{number}", "gone")
    assert len(logged.records) == len(told._logged) == 2
