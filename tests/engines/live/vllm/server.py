"""vLLM's OpenAI server for tests, begun by the command of docs/engines.md."""

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.engines.live import process_group
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.pages import MASTER, command
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Answer
from tests.ports import free_ports

START_S, STOP_S = 600, 20


class Server:
    """One, in a process group of its own, with the processes that it begins."""

    def __init__(
        self, model: Path, master: str, *more: str, connector: str = "kvstore.engines.vllm.connector:KVStoreConnector", **environment: str
    ) -> None:
        """`more`: arguments of the server. `connector`: MODULE:CLASS."""
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        port = self.address.rpartition(":")[2]
        module, _, name = connector.partition(":")
        changes = {MASTER: master, "MODEL": str(model), "8000": port}
        changes |= {"kvstore.engines.vllm.connector": module, '"KVStoreConnector"': f'"{name}"'}
        words = command("python", "-m", "vllm.entrypoints.openai.api_server", changes=changes)
        more = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS), *more)
        variables = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "KVSTORE_VLLM_LOOKUP_DEADLINE_S": "30",  # what a slow machine makes late is no miss
            "KVSTORE_VLLM_LOAD_DEADLINE_S": "60",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **environment,
        }
        self._log = model.with_name(f"server-{port}.log")
        with self._log.open("ab") as log:
            self._process = process_group.start(
                [python_of("vllm"), *words[1:], *more],
                env=variables,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def wait(self) -> None:
        """Until it answers."""
        end_s = time.monotonic() + START_S
        while not self._is_up():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, self._log.read_text()
            time.sleep(1)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def _is_up(self) -> bool:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def metric(self, name: str) -> float:
        """Value of a counter in its /metrics."""
        (value,) = [line.rpartition(" ")[2] for line in self.get("/metrics").decode().splitlines() if line.startswith(f"{name}{{")]
        return float(value)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers. Raises HTTPError for a status that is not 200."""
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(f"http://{self.address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == 200
            text = answer.read()
            return json.loads(text) if text else None

    def get(self, path: str) -> bytes:
        """What it answers."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=60) as answer:
            found: bytes = answer.read()
            return found

    def complete(self, tokens: list[int], count: int = 8) -> Answer:
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        found = self.post("/v1/completions", body)
        (choice,) = found["choices"]
        details = found["usage"]["prompt_tokens_details"] or {}
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0, 0.0)

    def close(self) -> None:
        """With all that it began, which is in its group."""
        self._process.send_signal(signal.SIGTERM)
        process_group.end(self._process, STOP_S)
