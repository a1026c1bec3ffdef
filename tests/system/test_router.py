"""The router in front of stand-in engines: a master, two nodes, two prefill and two decode engines, all of them processes."""

import contextlib
import http.client
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import pytest

from kvstore.cli.tools.child import Child
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from kvstore.protocol import control_pb2 as pb
from kvstore.router.fake_engine.compute import continuation, text_of
from tests.forked import Forked
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until

MODEL: Final = "llama3-8b"
BLOCK_TOKENS: Final = 16
INSTANCE_TTL_S: Final = 8.0
ENGINES: Final = {"p0": ("prefill", "n0"), "p1": ("prefill", "n1"), "d0": ("decode", "n0"), "d1": ("decode", "n1")}
COMMON: Final = ("--model", MODEL, "--block-tokens", str(BLOCK_TOKENS))


@dataclass
class Answer:
    """Result of one request."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def decision(self) -> dict[str, Any]:
        decision: dict[str, Any] = json.loads(self.headers["x-kvstore-decision"])
        return decision

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        return str(self.body["choices"][0]["text"])


@dataclass
class Fleet:
    """All the processes, and a client of the router."""

    system: System
    engines: dict[str, Child] = field(default_factory=dict)
    address: str = ""

    def start_engine(self, name: str) -> None:
        role, node = ENGINES[name]
        self.engines[name] = self.start(
            name,
            "kvstore.router.fake_engine.engine",
            *("--role", role, "--node", node, "--name", name, "--gpu", "A100-80G", "--speedup", "10"),
        )

    def kill_engines(self) -> None:
        for engine in self.engines.values():
            engine.kill()

    def start(self, name: str, module: str, *flags: str) -> Child:
        environment = {variable: value for variable, value in os.environ.items() if not variable.startswith("KVSTORE_")}
        return Child(
            name,
            module,
            (*flags, "--master", self.system.address, "--listen", "127.0.0.1:0", *COMMON),
            environment=environment,
            on_log=lambda child, line: self.system.logs.append(f"{child} | {line}"),
            on_end=lambda _child: None,
            start=Forked,
        )

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=DEADLINE_S)

    def ask(self, body: Any, path: str = "/v1/completions", **headers: str) -> Answer:
        with contextlib.closing(self.connection()) as connection:
            data = body if isinstance(body, bytes) else json.dumps(body)
            connection.request("POST", path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, json.load(response))

    def stats(self) -> dict[str, Any]:
        with contextlib.closing(self.connection()) as connection:
            connection.request("GET", "/stats")
            stats: dict[str, Any] = json.load(connection.getresponse())
            return stats

    def instances(self) -> dict[str, pb.InstanceStatus]:
        with SchedulerClient(ClientSettings(master=self.system.address, deadline_s=DEADLINE_S)) as scheduler:
            return {status.report.name: status for status in scheduler.instances().instances}

    def await_instances(self, *names: str) -> None:
        until(lambda: set(self.instances()) == set(names), f"instances {', '.join(names)} at the master", every_s=STATUS_POLL_S)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with System(tmp_path_factory.mktemp("router")) as system, contextlib.ExitStack() as ending:
        system.start_master(
            0,
            *("--report-interval-s", "0.05", "--instance-ttl-s", str(INSTANCE_TTL_S), "--decision-ttl-s", "1"),
            *("--scheduler-model", MODEL, "--scheduler-gpu", "A100-80G", "--scheduler-gpus", "1"),
        )
        running = Fleet(system)
        ending.callback(running.kill_engines)
        for name in ENGINES:
            running.start_engine(name)
        router = running.start("router", "tests.tuned_daemon", "kvstore-router", "--attempts", "9", "--max-body-bytes", "100KiB")
        ending.callback(router.kill)
        for name in ("n0", "n1"):
            system.start_node(name, "--dram", "32MiB")
        system.await_alive("n0", "n1")
        running.address = router.facts("ready", deadline_s=DEADLINE_S)["listen"]
        running.await_instances(*ENGINES)
        yield running


def prompt_of(name: str, characters: int) -> str:
    return (f"{name}: " + "All work and no play makes Jack a dull boy. " * (characters // 40))[:characters]


def completion(prompt: str, max_tokens: int = 8) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}


def expected(prompt: str, max_tokens: int = 8) -> str:
    """Return the response of every fake engine."""
    return text_of(list(islice(continuation(list(prompt.encode())), max_tokens)))


def test_router_repeated_prompt_goes_to_its_blocks(fleet: Fleet) -> None:
    prompt = prompt_of("twice", 12_000)
    first, second = fleet.ask(completion(prompt)), fleet.ask(completion(prompt))
    assert first.text == second.text == expected(prompt)
    assert first.decision["prefix_blocks"] == 0
    assert second.decision["prefix_blocks"] == 12_000 // BLOCK_TOKENS
    assert second.decision["prefill"] == first.decision["prefill"]
    assert second.decision["prefill_s"] < first.decision["prefill_s"] / 10
    longer = fleet.ask(completion(prompt + first.text + "And then?"))
    assert longer.decision["prefix_blocks"] >= 12_000 // BLOCK_TOKENS


def test_a_burst_spreads_over_the_engines(fleet: Fleet) -> None:
    prompts = [prompt_of(f"burst {number}", 8000) for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: fleet.ask(completion(prompt)), prompts))
    assert [answer.text for answer in answers] == [expected(prompt) for prompt in prompts]
    for pool, names in (("prefill", {"p0", "p1"}), ("decode", {"d0", "d1"})):
        count = Counter(answer.decision[pool] for answer in answers)
        assert set(count) == names
        assert min(count.values()) >= 2, count


def test_router_second_engine_fetches_blocks_of_busy_one(fleet: Fleet) -> None:
    shared = prompt_of("shared", 8000)
    home = fleet.ask(completion(shared)).decision["prefill"]
    prompts = [shared + prompt_of(f"and {number}", 6000) for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: fleet.ask(completion(prompt)), prompts))
    assert [answer.text for answer in answers] == [expected(prompt) for prompt in prompts]
    moved = [answer.decision for answer in answers if answer.decision["transfer_from"]]
    assert moved, [answer.decision for answer in answers]
    assert {decision["transfer_from"] for decision in moved} == {home}
    assert all(decision["prefill"] != home and decision["transfer_blocks"] > 0 for decision in moved)
    assert all(answer.decision["prefix_blocks"] >= 8000 // BLOCK_TOKENS for answer in answers)


def test_router_disconnect_frees_router_and_engine(fleet: Fleet) -> None:
    disconnects = fleet.stats()["disconnects"]
    host, port = fleet.address.split(":")
    body = json.dumps({**completion(prompt_of("gone", 300), 8000), "stream": True})
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(1) == b"H"
        until(lambda: any(status.report.batch for status in fleet.instances().values()), "the sequence at a decode engine")
    until(lambda: fleet.stats()["active"] == 0, "the router's place free")
    until(lambda: not any(status.report.batch for status in fleet.instances().values()), "the engine's place free")
    assert fleet.stats()["disconnects"] == disconnects + 1


def test_router_continues_and_forgets_a_killed_engine(fleet: Fleet) -> None:
    fleet.engines["p0"].kill()
    prompts = [prompt_of(f"survivor {number}", 2000) for number in range(6)]
    answers = [fleet.ask(completion(prompt)) for prompt in prompts]
    assert [answer.text for answer in answers] == [expected(prompt) for prompt in prompts]
    assert {answer.decision["prefill"] for answer in answers} == {"p1"}
    fleet.await_instances("p1", "d0", "d1")
    fleet.start_engine("p0")
    fleet.await_instances(*ENGINES)


def test_an_engine_that_is_stopped_leaves_at_once(fleet: Fleet) -> None:
    assert fleet.engines["d1"].stop()
    assert "d1" not in fleet.instances()
    assert fleet.ask(completion("x")).decision["decode"] == "d0"
    fleet.start_engine("d1")
    fleet.await_instances(*ENGINES)


def test_logs_have_no_tracebacks(fleet: Fleet) -> None:
    assert not [line for line in fleet.system.logs if "Traceback" in line], "\n".join(fleet.system.logs[-50:])
