"""Run by SGLang's environment: an engine on a CPU with HiCache."""

import json
from typing import Any

import sglang
from prometheus_client import CollectorRegistry, multiprocess
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput

PAGE = 16


class Child:
    def __init__(self, options: str) -> None:
        """`options`: arguments of `sglang.Engine` beyond those that all engines of the tests have, as JSON."""
        self.engine = sglang.Engine(
            **{
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "dtype": "float32",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
                "mem_fraction_static": 0.6,
                "max_total_tokens": 2048,
                "context_length": 1024,
                "page_size": PAGE,
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "hicache_write_policy": "write_through",
                "hicache_mem_layout": "page_first",
                "hicache_io_backend": "kernel",
                "hicache_storage_prefetch_policy": "wait_complete",
            }
            | json.loads(options)
        )

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salt: str | None = None,
        lora: str | None = None,
        bootstrap: dict[str, Any] | None = None,
        priority: int | None = None,
    ) -> Any:
        """Greedily, of prompts that are there at once: of each the tokens, their log-probabilities, how much of it was not computed.
        `bootstrap`: where the prefill engine is, and the room of each prompt."""
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        more: dict[str, Any] = {"lora_path": [lora] * len(prompts)} if lora else {}
        more |= bootstrap or {}
        if priority is not None:
            more["priority"] = priority
        outputs = self.engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=True, cache_salt=salt, **more)
        return [
            {
                "tokens": output["output_ids"],
                "logprobs": [each[0] for each in output["meta_info"]["output_token_logprobs"]],
                "cached": output["meta_info"]["cached_tokens"],
            }
            for output in outputs
        ]

    def forget(self) -> Any:
        """Flush the pools of the device and of the host, not the store. Return True on success."""
        return self.engine.flush_cache().success

    def update(self, folder: str, how: str, version: str | None = None, flush: bool = True) -> Any:
        """Load the weights of `folder` from its files (`disk`), or from memory (`tensor`)."""
        manager, wait = self.engine.tokenizer_manager, self.engine.loop.run_until_complete
        if how == "disk":
            return wait(manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=folder, weight_version=version), None))[:2]
        tensors = self.engine._serialize_tensors_per_rank(list(load_file(f"{folder}/model.safetensors").items()), None)
        self.engine.begin_weight_update()
        wanted = UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors, weight_version=version, flush_cache=flush)
        updated = wait(manager.update_weights_from_tensor(wanted, None))
        self.engine.end_weight_update()
        return updated

    def clear(self) -> Any:
        """Clear the storage by SGLang's own request, and return its result."""
        return self.engine.loop.run_until_complete(self.engine.tokenizer_manager.clear_hicache_storage()).success

    def metrics(self) -> Any:
        """The back end's counters, as SGLang's /metrics would have them."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return {each.name: each.value for metric in registry.collect() for each in metric.samples if each.name.startswith("kvstore")}

    def end(self) -> None:
        self.engine.shutdown()
