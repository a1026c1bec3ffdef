"""Run by vLLM's environment: an engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from kvstore.engines.vllm.identity import Variant
from kvstore.protocol.errors import KVStoreError
from tests.engines.live.pictures import IMAGE_PIXELS
from tests.engines.live.vllm import faults


class Child:
    def __init__(self, arguments: str) -> None:
        """`arguments`: of `vllm.LLM` as JSON, "kv_transfer_config" as an object."""
        options: dict[str, Any] = json.loads(arguments)
        if transfer := options.pop("kv_transfer_config", None):
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._adapters: dict[str, LoRARequest] = {}
        self._llm = LLM(**{"enforce_eager": True, "seed": 0, "disable_log_stats": False} | options)

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salts: list[str] | None = None,
        adapter: str | None = None,
        images: list[int] | None = None,
        hints: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy tokens of each prompt, their log-probabilities, and how many tokens of it were cached. `adapter`: the folder of a LoRA,
        which is called as that is. `images`: numbers of the pictures that the prompts have. `hints`: retention hints of the prompts."""
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for prompt, salt in zip(asked, salts or [], strict=False):
            prompt["cache_salt"] = salt
        for prompt, image in zip(asked, images or [], strict=False):
            prompt["multi_modal_data"] = {"image": picture(image)}
        extra = [{"kv_transfer_params": {"retention": hint}} for hint in hints or [None] * len(prompts)]
        parameters = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, extra_args=each) for each in extra]
        if adapter is not None and adapter not in self._adapters:
            self._adapters[adapter] = LoRARequest(Path(adapter).name, len(self._adapters) + 1, adapter)
        lora = self._adapters[adapter] if adapter is not None else None
        outputs = self._llm.generate(asked, parameters, use_tqdm=False, lora_request=lora)
        self._settle()
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    places[token].logprob
                    for token, places in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
                ],
                "cached": output.num_cached_tokens,
                "first_token_s": output.metrics.first_token_latency if output.metrics is not None else None,
            }
            for output in outputs
        ]

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """Forget the engine's own prefix cache. `connector`: have it tell the store's, too."""
        done: bool = self._llm.reset_prefix_cache(running, connector)
        return done

    def rpc(self, method: str, arguments: dict[str, Any] | None = None) -> None:
        """Have each rank call `method` of its worker."""
        self._llm.collective_rpc(method, kwargs=arguments or {})

    def name(self, version: str) -> None:
        """Call the weights `version`."""
        self._llm.update_weight_version(version)

    def sleep(self, level: int) -> None:
        self._llm.sleep(level)

    def wake(self) -> None:
        self._llm.wake_up()

    def weights(self) -> str:
        """The text by which the store's connector identifies them."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        connector.variants.poll((), 0.0)
        return str(connector.variants.identity.text)

    def load_in_place(self, adapter: str) -> bool:
        """Have it read the files of an adapter again that it has used."""
        known = self._adapters[adapter]
        again = LoRARequest(known.lora_name, known.lora_int_id, adapter, load_inplace=True)
        return bool(self._llm.llm_engine.add_lora(again))

    def flush(self) -> str:
        """Come back when what the engine has saved is in the store, for all to read; what the store says of it, "" if all is well."""
        errors: list[str] = self._llm.collective_rpc(flush_rank)
        return "".join(errors)

    def lose(self, places: list[int], group: int = 0) -> None:
        """These blocks of a group of layers vanish before the next load, which is of them."""
        faults.VANISHING[:] = [(group, place) for place in places]

    def keys(self, prompt: list[int], block_tokens: int) -> list[str]:
        """Of the prompt's blocks in the store, in hexadecimal digits."""
        hashes: list[bytes] = []
        function = get_hash_fn_by_name("sha256")
        for start in range(0, len(prompt) - block_tokens + 1, block_tokens):
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block_tokens(function, parent, prompt[start : start + block_tokens]))
        shard = get_kv_transfer_group()._rank_groups[0].shard.of(Variant(self.weights()))
        return [key.hex() for key in shard.keys(hashes)]

    def ranges(self) -> int:
        """Return the number of reads of parts of blocks, by an engine that loads layer by layer."""
        durations = get_kv_transfer_group()._worker._client._timings.durations
        return sum(durations["get_ranges_into"].counts().counts)

    def timed(self) -> dict[str, float]:
        """Of an engine with benchmarks' TimedConnector: what its scheduler spent on lookups."""
        timed: dict[str, float] = self._llm.llm_engine.engine_core.engine_core.scheduler.connector.timed()
        return timed

    def metrics(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}

    def end(self) -> None:
        """The engine goes with its process."""

    def _settle(self) -> None:
        """Step the engine until it has released the blocks of finished requests: in this process nothing else steps it."""
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            self._llm.llm_engine.step()


def picture(number: int) -> Image.Image:
    """Another one for each number."""
    dots = np.random.default_rng(number).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), np.uint8)
    return Image.fromarray(dots)


def flush_rank(worker: Any) -> str:
    """In the process of a rank."""
    try:
        get_kv_transfer_group().flush()
    except KVStoreError as error:
        return str(error)
    return ""
