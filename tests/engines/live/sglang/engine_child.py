"""Run by SGLang's environment: an engine on a CPU with HiCache, told what to generate by lines of JSON.

`engine_child.py FD OPTIONS_JSON` writes `{}` to descriptor FD once the engine is up, then a line there for each line of standard input. It
ends when standard input does. OPTIONS are arguments of `sglang.Engine` beyond those that all engines of the tests have.
"""

import json
import sys
from typing import Any

import sglang

PAGE = 16


class Child:
    def __init__(self, options: dict[str, Any]) -> None:
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
            | options
        )

    def generate(self, prompts: list[list[int]], tokens: int, salt: str | None = None, lora: str | None = None) -> Any:
        """Greedily, of prompts that are there at once: of each the tokens, their log-probabilities, how much of it was not computed."""
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        more = {"lora_path": [lora] * len(prompts)} if lora else {}
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
        """What is in the pools of the device and of the host; not what is in the store."""
        return self.engine.flush_cache().success


def main() -> None:
    with open(int(sys.argv[1]), "w", buffering=1) as out:
        child = Child(json.loads(sys.argv[2]))
        print("{}", file=out)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(child, command.pop("do"))(**command)), file=out)
        child.engine.shutdown()


if __name__ == "__main__":  # the engine starts processes that import this file
    main()
