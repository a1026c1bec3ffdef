"""Queries over HTTP, with the daemon, a real cluster, and an engine's events: queries over HTTP as
Mooncake's clients send them, and events that Dynamo and llm-d decode."""

import http.client
import json
import signal
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.client import Client
from kvstore.engines.publisher.config import DYNAMO, LLM_D
from kvstore.kvcache.key_names import VllmNaming
from tests.client.processes import Cluster, cluster
from tests.engines.kv_events.publisher import Publisher
from tests.engines.publisher.test_conductor import PROXY, REFERENCE
from tests.engines.publisher.test_daemon import DEADLINE_S, begun, told
from tests.engines.publisher.test_form import HASHES, KEYS, TOKENS, DynamoStored, LlmdStored
from tests.system.running import until
from tests.telemetry.http.asking import ask

ID = bytes(16)
OF_STORE = ("--model", "qwen", "--namespace-id", ID.hex(), "--block-tokens", "2")
PLACES = ("--events", "tcp://127.0.0.1:*", "--events-replay", "tcp://127.0.0.1:*")
MSGPACK = "application/msgpack"


class Daemon:
    """kvstore-publisher, as a router of others reaches it."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.http = facts["http"]
        self.replay = facts["events_replay"]

    def post(self, path: str, body: Any, *, content_type: str = "application/json") -> tuple[int, Any]:
        is_msgpack = content_type == MSGPACK
        payload = body if isinstance(body, bytes) else msgspec.msgpack.encode(body) if is_msgpack else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(self.http, timeout=DEADLINE_S)) as asked:
            asked.request("POST", path, payload, {"Content-Type": content_type})
            response = asked.getresponse()
            content = response.read()
            assert response.status != 200 or response.headers["Content-Type"].startswith(content_type)
            return response.status, msgspec.msgpack.decode(content) if is_msgpack and response.status == 200 else json.loads(content)

    def query(self, instance: str = "", *, tokens: list[int] = TOKENS) -> dict[str, Any]:
        status, found = self.post("/query", {"model": "qwen", "block_size": 2, "token_ids": tokens, "instance_id": instance})
        assert status == 200
        instances: dict[str, Any] = found["instances"]
        return instances


@contextmanager
def running(master: str, *flags: str) -> Iterator[Daemon]:
    child = begun(master, *PLACES, *flags)
    try:
        yield Daemon(child.facts("ready", deadline_s=DEADLINE_S))
    finally:
        child.kill()


def registration(publisher: Publisher, instance: str = "prefill-0") -> dict[str, Any]:
    own = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "instance_id": instance}
    return PROXY | own | {"block_size": 2, "dp_rank": 0}


def shape(found: dict[str, Any]) -> tuple[int, int, int, int]:
    return found["gpu"], found["cpu"], found["disk"], found["CPU"]


def stored(start: int, stop: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": HASHES[start:stop],
        "parent_block_hash": HASHES[start - 1] if start else None,
        "token_ids": TOKENS[2 * start : 2 * stop],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def test_router_finds_blocks_of_engines_and_of_the_store(store: Cluster, publisher: Publisher) -> None:
    with running(store.address, *OF_STORE) as daemon, Client(store.address) as client:
        assert daemon.post("/register", registration(publisher)) == (
            200,
            {"status": "registered successfully", "instance_id": "prefill-0"},
        )
        assert daemon.query()["prefill-0"]["longest_matched"] == 0
        publisher.publish(stored(0, 2))
        until(lambda: daemon.query()["prefill-0"]["gpu"] == 4, "what the engine stored", DEADLINE_S)
        client.put_batch(KEYS[1:], [b"1", b"2"], parents=[None, KEYS[1]])
        client.flush()
        until(lambda: daemon.query()["prefill-0"]["longest_matched"] == 6, "the last block, of the store", DEADLINE_S)
        until(lambda: shape(daemon.query("prefill-0")["prefill-0"]) == (4, 6, 6, 0), "that in memory of a node", DEADLINE_S)
        assert "kvstore_publisher_registered 1.0\n" in ask(daemon.http, "/metrics").text
        unregister = {"instance_id": "prefill-0", "tenant_id": "default", "dp_rank": 0}
        assert daemon.post("/unregister", unregister)[0] == 200
        assert daemon.query() == {}
        assert daemon.post("/unregister", unregister)[0] == 404
        client.remove(KEYS)


def test_messages_may_be_messagepack(store: Cluster, publisher: Publisher) -> None:
    """As Mooncake's example proxy of 2026 sends them: token ids are bytes."""
    publisher.publish(stored(0, 3))
    with running(store.address) as daemon:
        status, found = daemon.post("/register", registration(publisher), content_type=MSGPACK)
        assert (status, found["instance_id"]) == (200, "prefill-0")
        query = {"model": "qwen", "block_size": 2, "tenant_id": "default", "lora_name": ""}
        query |= {"token_ids": struct.pack(f"<{len(TOKENS)}i", *TOKENS)}

        def longest() -> int:
            found = daemon.post("/query", query, content_type=MSGPACK)[1]
            length: int = found["instances"]["prefill-0"]["longest_matched"]
            return length

        until(lambda: longest() == 6, "what the engine had stored", DEADLINE_S)


def test_what_cannot_be_answered_says_why(store: Cluster) -> None:
    with running(store.address) as daemon:
        for path, body, says in (
            ("/register", REFERENCE | {"block_size": None}, "block_size is None"),
            ("/register", REFERENCE | {"endpoint": "nowhere"}, "no ZeroMQ address"),
            ("/unregister", {}, "instance_id is None"),
            ("/query", [], "not an object"),
            ("/query", b"\xc1", "neither JSON"),
            ("/query", {"model": "m" * 2000, "block_size": 2, "token_ids": []}, "model"),
        ):
            status, found = daemon.post(path, body)
            assert (status, says in found["error"]) == (400, True), found
        assert daemon.query(tokens=list(range(200_000))) == {}, "long prompts are taken"


def test_queries_go_on_without_the_store(tmp_path: Path, publisher: Publisher) -> None:
    with cluster(tmp_path) as own:
        own.start_node("--dram", "16MiB")
        with running(own.address, *OF_STORE) as daemon:
            publisher.publish(stored(0, 2))
            daemon.post("/register", registration(publisher))
            until(lambda: daemon.query()["prefill-0"]["gpu"] == 4, "what the engine stored", DEADLINE_S)
            own.master.stop(signal.SIGKILL)
            until(lambda: daemon.query()["prefill-0"]["longest_matched"] == 4, "the same", DEADLINE_S)


@pytest.mark.parametrize("form", [DYNAMO, LLM_D])
def test_store_blocks_are_published_with_engines_tokens(store: Cluster, publisher: Publisher, form: str) -> None:
    with running(store.address, *OF_STORE, "--form", form) as daemon, Client(store.address) as client:
        publisher.publish(stored(0, 3))
        daemon.post("/register", registration(publisher))
        until(lambda: daemon.query()["prefill-0"]["gpu"] == 6, "what the engine stored", DEADLINE_S)
        client.put_batch(KEYS, [b"0", b"1", b"2"], parents=[None, *KEYS[:2]])
        client.flush()
        until(lambda: bool(told(daemon.replay)), "the blocks, published", DEADLINE_S)
        [event, *_] = told(daemon.replay)
        found = msgspec.convert(event, DynamoStored) if form == DYNAMO else msgspec.convert(event, LlmdStored)
        assert found.token_ids == TOKENS[: 2 * len(found.block_hashes)]
        assert found.block_hashes == HASHES[: len(found.block_hashes)]
        client.remove(KEYS)


def test_naming_of_the_store_is_the_engines_own() -> None:
    """Check the assumption of this file: a 64-bit hash of vLLM's is the end of the store's key."""
    assert VllmNaming(ID, 2).block_keys(TOKENS) == KEYS
