"""Promises of weights.py, against a real master: an engine reports what it uses, and notices nothing of a store that is away."""

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client.control import Control
from kvstore.client.instances import weights as module
from kvstore.client.instances.weights import WeightsReporter, hidden
from kvstore.client.sync import Client
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import OPERATOR, tokens_file
from tests.master.running import Places, master_in_thread
from tests.ports import free_ports

NAMESPACE = Namespace(model="m", revision="base@v1", dtype="bf16", block_tokens=16, salt="pepper")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path) as places:
        yield places


@pytest.fixture
def client(places: Places) -> Iterator[Client]:
    with Client(places.listen, tenant="red") as client:
        yield client


def used(client: Client, *, is_operator: bool = False) -> list[tuple[str, str, list[str], bool]]:
    settings = replace(client.settings, tenant="", token=OPERATOR) if is_operator else client.settings
    with Control.find(settings) as control:
        return [(one.base, one.version, list(one.users), one.is_used) for one in control.weights().versions]


def test_reports_what_the_engine_uses_and_its_end(client: Client) -> None:
    reporter = WeightsReporter(client, "engine-1")
    reporter.use("base")
    eventually(lambda: used(client) == [("base", "", ["engine-1"], True)], "its start is reported")
    reporter.use("base", "v1", [NAMESPACE.canonical(), NAMESPACE.canonical()])
    eventually(lambda: used(client)[0] == ("base", "v1", ["engine-1"], True), "each change is")
    with Control.find(client.settings) as control:
        table = control.weights()
    assert [one.is_retired for one in table.versions] == [False, False], "the salt makes other weights of it"
    [known] = table.namespaces
    assert known.form.id == NAMESPACE.id
    assert b"pepper" not in known.form.form
    reporter.close()
    assert not any(is_used for *_rest, is_used in used(client))
    reporter.close()
    reporter.use("base", "v2")
    assert len(used(client)) == 2, "it is closed"


def test_unreachable_master_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.02)
    caplog.set_level(logging.INFO, "kvstore.client")
    [port] = free_ports(1)
    with Client(f"127.0.0.1:{port}", tenant="red", deadline_s=1.0) as client:
        reporter = WeightsReporter(client, "engine-1")
        failed = threading.Event()
        original = WeightsReporter._failed
        tries: list[Exception] = []

        def counted(self: WeightsReporter, error: Exception) -> None:
            original(self, error)
            tries.append(error)
            if len(tries) > 2:
                failed.set()

        monkeypatch.setattr(WeightsReporter, "_failed", counted)
        reporter.use("base", "v1")
        assert failed.wait(30)
        assert caplog.text.count("cannot report the weights of engine engine-1, which continues") == 1
        with master_in_thread(tmp_path, listen=f"127.0.0.1:{port}"):
            eventually(lambda: "reports of the weights of engine engine-1 succeed again" in caplog.text, "it says when that ends")
            assert used(client) == [("base", "v1", ["engine-1"], True)]
            reporter.close()


def test_a_forked_childs_reports_are_dropped(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = WeightsReporter(client, "engine-1")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    reporter.use("base")
    reporter.close()
    assert reporter._thread is None


def test_a_tenant_reports_and_sees_its_own_weights_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tokens_file(tmp_path, {"red": "r", "blue": "b"})
    with master_in_thread(tmp_path, tokens=tokens) as places, Client(places.listen, tenant="red", token="r") as red:
        reporter = WeightsReporter(red, "engine-1")
        reporter.use("base", "v1")
        eventually(lambda: bool(used(red)), "its own")
        with Client(places.listen, tenant="blue", token="b") as blue:
            assert used(blue) == []
            assert used(blue, is_operator=True) == used(red)
            stranger = WeightsReporter(blue, "engine-2")
            stranger._settings = replace(blue.settings, tenant="red")
            stranger.use("base", "v9")
            eventually(lambda: "cannot report the weights of engine engine-2" in caplog.text, "it is refused")
            stranger.close()
        assert len(used(red)) == 1
        reporter.close()


def test_a_salt_is_hidden_by_a_digest() -> None:
    id, form = hidden(NAMESPACE.canonical())
    found = Namespace.from_canonical(form)
    assert id == NAMESPACE.id
    assert found == replace(NAMESPACE, salt=found.salt)
    assert len(found.salt) == 16
    bare = replace(NAMESPACE, salt="")
    assert hidden(bare.canonical()) == (bare.id, bare.canonical())
    with pytest.raises(InvalidArgument):
        hidden(b"no form")
