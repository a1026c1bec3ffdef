"""vLLM's OpenAI server, begun by the command of docs/engines.md, with its scheduler and its worker in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.transfer.testing.waiting import eventually
from tests.client.processes import Cluster
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.pages import MASTER, command
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Answer, Engine, prompt
from tests.ports import free_ports

BLOCKS = 5
START_S, STOP_S = 600, 20

pytestmark = pytest.mark.timeout(1800)  # two servers begin within it, one after the other, and an engine


class Server:
    """One, in a process group of its own, with the processes that it begins."""

    def __init__(self, model: Path, master: str) -> None:
        self._address = f"127.0.0.1:{free_ports(1)[0]}"
        port = self._address.rpartition(":")[2]
        changes = {MASTER: master, "MODEL": str(model), "8000": port}
        words = command("python", "-m", "vllm.entrypoints.openai.api_server", changes=changes)
        more = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS)]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "KVSTORE_VLLM_LOOKUP_DEADLINE_S": "30",  # what a slow machine makes late is no miss
            "KVSTORE_VLLM_LOAD_DEADLINE_S": "60",
        }
        self._log = model.with_name(f"server-{port}.log")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [python_of("vllm"), *words[1:], *more],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        end_s = time.monotonic() + START_S
        while not self._is_up():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, self._log.read_text()
            time.sleep(1)

    def _is_up(self) -> bool:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://{self._address}/health", timeout=5) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def complete(self, tokens: list[int]) -> Answer:
        body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        request = urllib.request.Request(
            f"http://{self._address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found = json.load(answer)
        (choice,) = found["choices"]
        details = found["usage"]["prompt_tokens_details"] or {}
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0, 0.0)

    def close(self) -> None:
        """With all that it began, which is in its group."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def test_servers_and_engines_take_from_one_another(model: Path, store: Cluster, plain: Engine, waiting: Engine, loading: Engine) -> None:
    to_server, from_server = prompt(80, BLOCKS), prompt(81, BLOCKS)
    plain.forget()
    right_to, right_from = plain.generate(to_server, from_server)
    waiting.generate(to_server)
    waiting.flush()
    keys = [bytes.fromhex(key) for key in waiting.tell("keys", prompt=from_server, block_tokens=BLOCK_TOKENS)]
    with contextlib.closing(Server(model, store.address)) as server, Client(store.address) as client:
        server.wait()
        warm = server.complete(to_server)
        warm.check_same(right_to)
        assert warm.cached == BLOCKS * BLOCK_TOKENS
        server.complete(from_server).check_same(right_from)
        eventually(lambda: client.match_prefix(keys) == BLOCKS, "the server's blocks are in the store")
    (answer,) = loading.generate(from_server)
    answer.check_same(right_from)
    assert answer.cached == BLOCKS * BLOCK_TOKENS
