"""Promises of console.py: the page of a real cluster, served by a process outside of it."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from kvstore.cli.console import ConsoleClient
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.security.actor import THIS_MASTER
from kvstore.testing.transfer.awaited import eventually
from tests.forked import COMMAND, Forked
from tests.ports import free_ports

TIMEOUT_S = 60.0


class Running:
    """`kvstore console`, and the address that it prints."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = ["console", "--listen", "127.0.0.1:0", *arguments]
        self.process = Forked(COMMAND, command, environment={**os.environ, **environment}, stderr=sys.__stderr__)

    def __enter__(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __exit__(self, *_error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


def ask(address: str, path: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read())


def test_it_serves_a_cluster_of_elsewhere(master: str) -> None:
    with Running("--master", master, "--interval-s", "0.2") as address:
        assert address.startswith("http://127.0.0.1:")
        eventually(lambda: (ask(address, "api/state")["cluster"] or {"nodes": {"rows": []}})["nodes"]["rows"] != [], "the node is shown")
        assert ask(address, "api/access") == {"access": "admin"}


def test_with_a_token_only_who_has_the_printed_key_is_let_in(master: str) -> None:
    with Running("--master", master, KVSTORE_CLIENT_TOKEN="secret") as printed:
        address, _sharp, key = printed.partition("#key=")
        assert "secret" not in printed
        assert len(key) == 32
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            ask(address, "api/state")
        refused.value.close()
        assert ask(address, "api/access", Authorization=f"Bearer {key}") == {"access": "admin"}
        assert ask(address, "api/access", Authorization="Bearer other") == {"access": "none"}


def test_a_cluster_that_does_not_answer_is_told(master: str) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with Running("--master", nobody, "--deadline-s", "0.3", "--interval-s", "0.1") as address:
        eventually(lambda: nobody in ask(address, "api/state")["failure"], "it says that nobody answers")


@pytest.mark.promise("observable")
def test_a_source_from_outside_does_what_it_says(master: str) -> None:
    source = ConsoleClient(ClientSettings(master=master))
    try:
        with Client(master) as client:
            client.put_batch([b"a", b"b"], [b"1", b"22"], namespace="n", ack="cluster")
            assert [node.name for node in source.snapshot().status.nodes] == ["node-0"]
            assert [one.name for one in source.topologies()] == ["node-0"]
            assert [(one.role, one.behind, one.error) for one in source.masters()] == [("owner", 0, "")]
            assert [one.stored.blocks for one in source.contents(pb.ContentsRequest(namespace="n")).namespaces] == [2]
            assert source.pin("", "n", THIS_MASTER, pinned=True) == 2
            assert source.remove("", "n", THIS_MASTER) == 0
            assert source.pin("", "n", THIS_MASTER, pinned=False) == 2
            assert source.remove("", "n", THIS_MASTER) == 2
            assert client.get(b"a") is None
        source.drain("node-0", THIS_MASTER, to="nvme", cancel=False)
        assert source.snapshot().status.nodes[0].HasField("drain")
        source.drain("node-0", THIS_MASTER, to="nvme", cancel=True)
        source.set_quota("red", {"pins": 3, "blocks": None}, THIS_MASTER)
        assert source.snapshot().status.quota_origins["red"].operator == ["blocks", "pins"]
        source.clear_quota("red", ["blocks"], THIS_MASTER)
        assert source.snapshot().status.quota_origins["red"].operator == ["pins"]
        with pytest.raises(InvalidArgument, match="is alive"):
            source.forget("node-0", THIS_MASTER)
        with pytest.raises(InvalidArgument, match="start it with --tenant red"):
            source.remove("red", "n", THIS_MASTER)
    finally:
        source.close()


def test_a_source_looks_for_the_owner_again_when_one_has_failed() -> None:
    source = ConsoleClient(ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}", deadline_s=0.2))
    for _ in range(2):
        with pytest.raises(Unavailable):
            source.snapshot()
    source.close()
