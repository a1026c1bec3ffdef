"""kvstore-publisher with a real cluster, asked again and again for all that it has told."""

import os
from typing import Any

import msgspec
import pytest
import zmq

from kvstore.cli.tools.child import Child
from kvstore.client import Client
from kvstore.protocol.errors import ConfigError
from tests.client.processes import Cluster
from tests.ports import free_ports
from tests.system.running import until
from tests.telemetry.http.asking import ask

DEADLINE_S = 120.0


def begun(master: str, *flags: str, logs: list[str] | None = None) -> Child:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return Child(
        "publisher",
        "kvstore.engines.publisher.daemon",
        ("--master", master, *flags),
        environment=environment,
        on_log=lambda _name, line: None if logs is None else logs.append(line),
        on_end=lambda _child: None,
    )


def told(replay_endpoint: str) -> list[dict[str, Any]]:
    """All events since it began."""
    found: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(replay_endpoint)
        asking.send_multipart((b"", bytes(8)))
        while True:
            assert asking.poll(round(DEADLINE_S * 1000))
            _, _, number, payload = asking.recv_multipart()
            if number == b"\xff" * 8:
                return found
            found += msgspec.msgpack.decode(payload)[1]


def test_what_happens_to_blocks_is_told(store: Cluster) -> None:
    logs: list[str] = []
    places = ("--events", "tcp://127.0.0.1:*", "--events-replay", "tcp://127.0.0.1:*")
    child = begun(store.address, *places, logs=logs)
    try:
        facts = child.facts("ready", deadline_s=DEADLINE_S)
        replay = facts["events_replay"]
        with Client(store.address) as client:
            client.put_batch([b"one", b"two"], [b"1", b"2"], parents=[None, b"one"])
            client.flush()
            client.remove([b"two"])
        until(lambda: any(each["type"] == "BlockRemoved" for each in told(replay)), "the removal", DEADLINE_S)
        stored = [each for each in told(replay) if each["type"] == "BlockStored"]
        [removed] = [each for each in told(replay) if each["type"] == "BlockRemoved"]
        assert [key for each in stored for key in each["block_hashes"]] == [b"one", b"two"]
        assert (removed["block_hashes"], removed["ownership"]) == ([b"two"], "n0")
        assert "kvstore_publisher_removed_blocks_total 1" in ask(facts["http"], "/metrics").text
        assert child.stop()
        assert logs[-1].endswith("this publisher stops: SIGTERM [daemon_stops why=SIGTERM]")
    finally:
        child.kill()


def test_without_a_master_it_says_so_and_ends() -> None:
    [nowhere] = free_ports(1)
    child = begun(f"127.0.0.1:{nowhere}", "--events", "tcp://127.0.0.1:*", "--events-replay", "")
    try:
        with pytest.raises(ConfigError, match="no master can be reached"):
            child.facts("ready", deadline_s=DEADLINE_S)
    finally:
        child.kill()
