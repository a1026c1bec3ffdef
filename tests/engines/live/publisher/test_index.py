"""kvstore-publisher beside a real vLLM server with kvstore's connector: what a router of others finds by `/query`, and the hashes of the
events that it reads."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.engines.kv_events.events import BlocksStored, Event
from kvstore.engines.kv_events.subscriber import Subscriber
from tests.client.processes import Process
from tests.engines.live.http_engine import PATIENCE_S
from tests.engines.live.router.comparing import ask
from tests.engines.live.router.fleet import BLOCK_TOKENS, MODEL, Fleet
from tests.engines.live.vllm.engines import prompt
from tests.engines.publisher.test_daemon import told
from tests.system.running import until

BLOCKS = 6
LENGTH = BLOCKS * BLOCK_TOKENS


FLEET = {"servers": 1}


@pytest.fixture
def publisher(fleet: Fleet, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """It follows the server."""
    places = ("--events", "tcp://127.0.0.1:*", "--events-replay", "tcp://127.0.0.1:*")
    flags = ("--master", fleet.store.address, "--model", MODEL, *fleet.naming[2:], "--form", "dynamo")
    process = Process("kvstore.engines.publisher.daemon", *places, *flags, log=tmp_path / "publisher.log")
    [server] = fleet.servers
    service = {"type": "vLLM", "modelname": MODEL, "instance_id": "e0", "block_size": BLOCK_TOKENS, "dp_rank": 0}
    post(process.ready["http"], "/register", service | {"endpoint": server.events, "replay_endpoint": server.replay})
    yield process.ready
    process.stop()


def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = ask(f"http://{address}", path, body)
    assert reply.status == 200, reply
    return dict(reply.body)


def test_router_finds_blocks_of_the_engine_and_of_the_store(fleet: Fleet, publisher: dict[str, Any]) -> None:
    [server] = fleet.servers
    asked = prompt(1, BLOCKS)

    def runs() -> tuple[int, int]:
        query = {"model": MODEL, "block_size": BLOCK_TOKENS, "token_ids": asked}
        found = post(publisher["http"], "/query", query)["instances"]["e0"]
        return found["gpu"], found["CPU"]

    assert runs() == (0, 0)
    fleet.ask(asked)
    until(lambda: runs() == (LENGTH, LENGTH), "its blocks, in the engine and in the store", PATIENCE_S)
    server.post("/reset_prefix_cache")
    fleet.ask(prompt(2, BLOCKS))
    until(lambda: runs() == (0, LENGTH), "its blocks, in the store alone", PATIENCE_S)


def test_hashes_in_events_of_the_store_are_the_engines(fleet: Fleet, publisher: dict[str, Any]) -> None:
    [server] = fleet.servers
    fleet.ask(prompt(3, BLOCKS))
    until(lambda: sum(len(each["block_hashes"]) for each in told(publisher["events_replay"])) >= BLOCKS, "events", PATIENCE_S)
    own: dict[int, list[int]] = {}

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                for index, name in enumerate(event.hashes):
                    number = name if isinstance(name, int) else int.from_bytes(name[-8:], "big")
                    own[number] = event.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

    with contextlib.closing(Subscriber(server.events, server.replay, replay_timeout_s=PATIENCE_S)) as subscriber:
        subscriber.catch_up(take, own.clear)
    for event in told(publisher["events_replay"]):
        tokens = [own[name] for name in event["block_hashes"]]
        assert event["token_ids"] == [token for each in tokens for token in each]
        assert event["block_size"] == BLOCK_TOKENS
