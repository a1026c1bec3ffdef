"""vLLM's OpenAI server for tests, begun by the command of docs/engines.md."""

import os
from pathlib import Path

from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.http_engine import HttpEngine
from tests.engines.live.pages import MASTER, command
from tests.engines.live.vllm.engines import BLOCK_TOKENS, CONNECTOR, PATIENT, Answer, variables
from tests.ports import free_ports


class Server(HttpEngine):
    def __init__(self, model: Path, master: str, *more: str, connector: str = CONNECTOR, **environment: str) -> None:
        """`more`: arguments of the server. `connector`: MODULE:CLASS."""
        (port,) = free_ports(1)
        module, _, name = connector.partition(":")
        changes = {MASTER: master, "MODEL": str(model), "8000": str(port)}
        changes |= {"kvstore.engines.vllm.connector": module, '"KVStoreConnector"': f'"{name}"'}
        words = command("python", "-m", "vllm.entrypoints.openai.api_server", changes=changes)
        more = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS), *more)
        patient = {f"KVSTORE_VLLM_{name.upper()}": str(value) for name, value in PATIENT.items()}
        command_line = [python_of("vllm"), *words[1:], *more]
        super().__init__(
            port, command_line, model.with_name(f"server-{port}.log"), os.environ | variables() | patient | environment, cwd=ROOT
        )

    def complete(self, tokens: list[int], count: int = 8) -> Answer:
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        found = self.post("/v1/completions", body)
        (choice,) = found["choices"]
        details = found["usage"]["prompt_tokens_details"] or {}
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0, 0.0)
