"""Nodes that are stopped in peace, with real processes: what they hold is found afterwards, and puts go on meanwhile."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.client.sync import Client
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.store.served import Client as Writer
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, until

BLOCK_BYTES = 64 << 10
KEYS = [b"block-%d" % number for number in range(100)]
VALUES = [value_of(key, 0, BLOCK_BYTES) for key in KEYS]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path) as started:
        started.start_master()
        yield started


@pytest.mark.promise("restart-keeps-nvme")
def test_sigterm_and_restart_keep_acknowledged_blocks(system: System, tmp_path: Path) -> None:
    """Those that were acknowledged by their node alone, too."""
    system.start_node("n0", "--dram", "16MiB", "--nvme", f"{tmp_path / 'nvme'}:64MiB", "--drain-s", "60")
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        assert client.put(b"last", b"one of a message")
        assert system.nodes["n0"].stop(120)
        system.start_node("n0")
        until(lambda: all(client.exists_batch([*KEYS, b"last"])), "all blocks are back")
        assert client.get_batch([*KEYS, b"last"]) == [*VALUES, b"one of a message"]


def test_stopping_node_is_read_and_puts_go_elsewhere(system: System, tmp_path: Path) -> None:
    """Of its own host's clients, too. It ends late, because a put stays open."""
    for name in ("n0", "n1"):
        system.start_node(name, "--dram", "16MiB", "--nvme", f"{tmp_path / name}:64MiB", "--drain-s", "3600")
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        client.flush()
        [name] = {place.node for places in client.locate(KEYS) for place in places}
        [other] = {"n0", "n1"} - {name}
        unix = system.nodes[name].facts("ready", deadline_s=DEADLINE_S)["unix"]
        writer = Writer(Channel.open(Address(unix=unix), Hello(ROLE_CLIENT, "other"), Deadline(DEADLINE_S)))
        writer.open({"never committed": 1000})
        system.nodes[name].terminate()
        until(lambda: system.node_status(name).counters["closed"] == 1, "the node is ending")
        more = [b"more-%d" % number for number in range(20)]
        assert [client.put(key, value_of(key, 0, 100)) for key in more[:10]] == [True] * 10
        assert client.put_batch(more[10:], [value_of(key, 0, BLOCK_BYTES) for key in more[10:]]) == [True] * 10
        assert {place.node for places in client.locate(more) for place in places} == {other}
        assert client.get_batch(KEYS) == VALUES
        until(lambda: all("nvme" in places[0].tiers for places in client.locate(KEYS)), "all of its blocks are on NVMe")
        writer.close()
        assert system.nodes[name].stop(120)
        system.start_node(name)
        until(lambda: all(client.exists_batch(KEYS)), "all blocks are back")
        assert client.get_batch([*KEYS, *more[:1]]) == [*VALUES, value_of(more[0], 0, 100)]


# --- kvstore drain ---


def drain(system: System, *arguments: str) -> str:
    """Return the output of the command, which must succeed."""
    result = CliRunner().invoke(kvstore, ["drain", *arguments, "--master", system.address], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def two_nodes(system: System, *flags: str, folder: Path | None = None) -> None:
    for name in ("n0", "n1"):
        nvme = ("--nvme", f"{folder / name}:64MiB") if folder is not None else ()
        system.start_node(name, "--dram", "16MiB", *nvme, *flags)


def put_all(client: Client) -> tuple[str, str]:
    """All of KEYS at one node; its name, and the other's."""
    assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
    client.pin(KEYS[:1])
    [name] = {place.node for places in client.locate(KEYS) for place in places}
    return name, "n1" if name == "n0" else "n0"


@pytest.mark.promise("drain-loses-nothing")
def test_drain_copies_last_replicas_to_peers(system: System) -> None:
    two_nodes(system)
    with system.client(ack="node") as client:
        assert client.put(b"small", b"the way of one message") is True
        name, other = put_all(client)
        assert f"{name} is drained: no block is in its memory only, and it can be stopped\n" in drain(system, name)
        assert all({place.node for place in places} == {name, other} for places in client.locate([*KEYS, b"small"]))
        until(lambda: system.node_status(other).counters["copied_blocks_drain"] == len(KEYS) + 1, "its peer reports why")
        assert client.put(b"later", b"value") is True
        client.flush()
        assert [place.node for place in client.locate([b"later"])[0]] == [other], "its own host's clients put elsewhere too"
        assert system.nodes[name].stop(120)
        until(lambda: {place.node for places in client.locate(KEYS) for place in places} == {other}, "the master knows that it ended")
        assert client.get_batch([*KEYS, b"small", b"later"]) == [*VALUES, b"the way of one message", b"value"]
        system.start_node(name)
        assert client.put(b"still drained", b"value") is True
        client.flush()
        assert [place.node for place in client.locate([b"still drained"])[0]] == [other]
        assert drain(system, name, "--cancel") == f"{name} accepts blocks again\n"

        def goes_there_again() -> bool:
            key = os.urandom(16)
            assert client.put(key, b"value")
            client.flush()
            return [place.node for place in client.locate([key])[0]] == [name]

        until(goes_there_again, "puts go to this host's node again")


@pytest.mark.promise("drain-loses-nothing")
def test_drain_without_peer_space_keeps_blocks_on_nvme(system: System, tmp_path: Path) -> None:
    """100 blocks of 64 KiB do not fit into the other's 4 MiB."""
    system.start_node("n0", "--dram", "16MiB", "--nvme", f"{tmp_path / 'n0'}:64MiB")
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        system.start_node("n1", "--dram", "4MiB")
        said = drain(system, "n0")
        assert "n0 is drained: no block is in its memory only, and it can be stopped; " in said
        assert "blocks are on its NVMe only, until it is restarted" in said
        assert system.nodes["n0"].stop(120)
        system.start_node("n0")
        until(lambda: all(client.exists_batch(KEYS)), "all blocks are back")
        assert client.get_batch(KEYS) == VALUES


@pytest.mark.promise("drain-loses-nothing")
def test_drain_to_nvme_survives_a_master_restart(tmp_path: Path) -> None:
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as system:
        system.start_master()
        two_nodes(system, folder=tmp_path)
        with system.client() as client:
            name, other = put_all(client)
            drain(system, name, "--to", "nvme", "--no-wait")
            os.kill(system.masters[0].pid, signal.SIGKILL)
            system.masters[0].stop()
            system.start_master()
            system.await_alive("n0", "n1")
            said = drain(system, name, "--to", "nvme")
            assert f"can be stopped; {len(KEYS)} blocks are on its NVMe only, until it is restarted" in said
            assert not any(place.node == other for places in client.locate(KEYS) for place in places)
            assert system.node_status(name).drain.to == "nvme"
            assert "alive, drained" in CliRunner().invoke(kvstore, ["nodes", "--master", system.address], env={"COLUMNS": "300"}).output


@pytest.mark.promise("drain-loses-nothing")
def test_drain_without_space_reports_and_continues(system: System) -> None:
    system.start_node("n0", "--dram", "16MiB")
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        result = CliRunner().invoke(kvstore, ["drain", "n0", "--wait-s", "5", "--master", system.address])
        assert result.exit_code == 2
        assert f"n0: {len(KEYS)} blocks left in its memory only (no node has free space); 0 are being copied" in result.output
        assert "n0 is not drained after 5 s; the drain continues" in result.output
        with pytest.raises(Unavailable):
            client.put(b"nowhere", b"value", deadline_s=5)
        system.start_node("n1", "--dram", "16MiB")
        assert "n0 is drained: no block is in its memory only" in drain(system, "n0")
        assert all({place.node for place in places} == {"n0", "n1"} for places in client.locate(KEYS))
