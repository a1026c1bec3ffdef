"""vLLM servers behind kvstore-router: each with kvstore's connector, KV events and a sidecar, on one node of one cluster."""

import contextlib
import http.client
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from kvstore.kvcache.namespace import ID_BYTES
from tests.client.processes import Cluster, Process, cluster
from tests.engines.live import process_group
from tests.engines.live.environments import python_of
from tests.engines.live.http_engine import PATIENCE_S, HttpEngine
from tests.engines.live.vllm.engines import transfer_to, variables
from tests.ports import free_ports

RETRY_S: Final = 0.1
BLOCK_TOKENS: Final = 32
MODEL: Final = "tiny"
ROLES: Final = {"both": "kv_both", "prefill": "kv_both", "decode": "kv_consumer"}
"""vLLM's name for each role of the scheduler. An engine that computes prompts also loads blocks that others computed."""
NAMESPACE: Final = re.compile(r"of the namespace ([0-9a-f]{32})")


class Server(HttpEngine):
    """A server of vLLM."""

    def __init__(
        self,
        model: Path,
        master: str,
        *,
        log: Path,
        blocks: int,
        store: bool = True,
        role: str = "both",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`blocks`: of its own cache; `role`: of ROLES; `settings`: of the connector. Comes back before it is ready."""
        port, events, replay = free_ports(3)
        self.events, self.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        # The publisher binds only what has a star.
        publishing = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": self.replay}
        transfer = transfer_to({"master": master, **(settings or {})}, role=ROLES[role])
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "VLLM_"))} | variables()
        environment |= {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_SERVER_DEV_MODE": "1"}  # without that there is no /sleep
        command = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks), "--max-num-seqs", "8"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
        command += ["--kv-events-config", json.dumps(publishing), "--disable-uvicorn-access-log"]
        command += ["--kv-transfer-config", json.dumps(transfer)] if store else []
        super().__init__(port, command, log, environment)

    def await_ready(self) -> str:
        """Once it serves: the id of its blocks' namespace, "" without a store."""
        found = NAMESPACE.search(self.wait().log)
        return found[1] if found else ""

    def close(self) -> None:
        """At once, as one that dies."""
        process_group.end(self._process)


@dataclass
class Answer:
    """Of the router."""

    text: str
    decision: dict[str, Any]
    first_token_s: float


class Fleet:
    """A context manager: servers, sidecars and a router, all ready inside."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        servers: int = 2,
        blocks: int = 256,
        dram: str = "512MiB",
        dispatcher: str = "",
        has_store: bool = True,
        roles: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`blocks`: of each engine's own cache; `dispatcher`: the master's, "" for its default; without a store engines have their own
        caches only; `roles`: of the servers, where they have any; `settings`: of their connectors."""
        self._folder = folder
        self._model = model
        self._count = servers
        self._blocks = blocks
        self._dram = dram
        self._has_store = has_store
        self._roles = list(roles) or ["both"] * servers
        self._settings = settings
        self._dispatcher = ("--dispatcher", dispatcher) if dispatcher else ()
        self._ending = contextlib.ExitStack()
        self.naming: tuple[str, ...] = ()
        """Flags that name the blocks' keys."""
        self._sidecars: list[Process] = []
        self.servers: list[Server] = []
        self.address = ""
        self.store: Cluster

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as beginning:
            self.store = beginning.enter_context(cluster(self._folder, "--report-interval-s", "0.1", *self._dispatcher))
            self.store.start_node("--dram", self._dram)
            for number in range(self._count):
                log = self._folder / f"vllm{number}.log"
                server = Server(
                    self._model,
                    self.store.address,
                    log=log,
                    blocks=self._blocks,
                    store=self._has_store,
                    role=self._roles[number],
                    settings=self._settings,
                )
                self.servers.append(server)
                beginning.callback(server.close)
            self.naming = ("--naming", "vllm", "--block-tokens", str(BLOCK_TOKENS), "--namespace-id", self._namespace_id())
            beginning.callback(self._stop_sidecars)
            self.start_sidecars()
            where = ("--listen", "127.0.0.1:0", "--master", self.store.address)
            router = Process(
                "tests.tuned_daemon",
                "kvstore-router",
                *(*where, "--model", MODEL, "--schedule-timeout-s", "60", "--next-token-timeout-s", "300", "--tokenize-timeout-s", "60"),
                *self.naming,
                log=self._folder / "router.log",
            )
            beginning.callback(router.stop)
            self.address = router.ready["listen"]
            self._ending = beginning.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.close()

    def start_sidecars(self, *, node: str = "n0", roles: Sequence[str] = ()) -> None:
        """Restart the sidecars. `node`: location of the engines' blocks, "" for none; `roles`: replace the current ones."""
        self._stop_sidecars()
        self._roles = list(roles) or self._roles
        for number, server in enumerate(self.servers):
            self._sidecars.append(
                Process(
                    "kvstore.engines.sidecar.daemon",
                    *("--engine", server.url, "--events", server.events, "--events-replay", server.replay, "--name", f"e{number}"),
                    *("--role", self._roles[number], "--node", node, "--master", self.store.address, "--deadline-s", "30"),
                    *self.naming[2:],
                    log=self._folder / f"sidecar{number}.log",
                )
            )

    def _stop_sidecars(self) -> None:
        while self._sidecars:
            self._sidecars.pop().stop()

    def ask(self, prompt: list[int], tokens: int = 4) -> Answer:
        """Through the router, as a stream, until its end. Asked again, as clients do, while there is no room; the wait counts."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        begin_s = time.monotonic()
        while True:
            with contextlib.closing(connection(self.url)) as asked:
                asked.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                response = asked.getresponse()
                if response.status == http.HTTPStatus.OK:
                    return _read(response, begin_s)
                assert response.status == http.HTTPStatus.TOO_MANY_REQUESTS, response.read()
                assert time.monotonic() - begin_s < PATIENCE_S, response.read()
            time.sleep(RETRY_S)

    @property
    def url(self) -> str:
        """URL of the router."""
        return f"http://{self.address}"

    def own_blocks(self) -> dict[str, int]:
        """Return the number of blocks that each engine known to the scheduler has in its own memory, by name."""
        with SchedulerClient(ClientSettings(master=self.store.address, deadline_s=PATIENCE_S)) as client:
            return {each.report.name: each.engine_blocks for each in client.instances().instances}

    def loaded_tokens(self) -> int:
        """Return the number of tokens that all engines loaded from the store."""
        return sum(round(server.metric("vllm:external_prefix_cache_hits_total")) for server in self.servers)

    def _namespace_id(self) -> str:
        """Without a store the engines' blocks have names all the same, for what they have themselves."""
        [found] = {server.await_ready() for server in self.servers}
        return found or "00" * ID_BYTES


def _read(response: http.client.HTTPResponse, begin_s: float) -> Answer:
    texts, first_s = [], 0.0
    for line in response:
        if line.startswith(b"data: {"):
            first_s = first_s or time.monotonic() - begin_s
            event = json.loads(line[6:])
            assert "error" not in event, event
            texts.append(event["choices"][0]["text"])
    return Answer("".join(texts), json.loads(response.headers["x-kvstore-decision"]), first_s)


def connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
