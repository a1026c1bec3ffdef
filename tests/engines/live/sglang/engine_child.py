"""Run by SGLang's environment: an engine on a CPU with HiCache over our back end, told what to generate by lines of JSON.

`engine_child.py FD MODEL EXTRA_JSON` writes `{}` to descriptor FD once the engine is up, then a line there for each line of standard input.
It ends when standard input does.
"""

import json
import sys
from typing import Any

import sglang

PAGE = 16


class Child:
    def __init__(self, model: str, extra: str) -> None:
        self.engine = sglang.Engine(
            model_path=model,
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            dtype="float32",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            mem_fraction_static=0.6,
            max_total_tokens=2048,
            context_length=1024,
            page_size=PAGE,
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_write_policy="write_through",
            hicache_mem_layout="page_first",
            hicache_io_backend="kernel",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=extra,
        )

    def generate(self, prompt: list[int], tokens: int) -> Any:
        """Greedily: the tokens, and how many of the prompt were not computed."""
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        done = self.engine.generate(input_ids=prompt, sampling_params=parameters)
        return {"tokens": done["output_ids"], "cached": done["meta_info"]["cached_tokens"]}

    def forget(self) -> Any:
        """What is in the pools of the device and of the host; not what is in the store."""
        return self.engine.flush_cache().success


def main() -> None:
    with open(int(sys.argv[1]), "w", buffering=1) as out:
        child = Child(*sys.argv[2:])
        print("{}", file=out)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(child, command.pop("do"))(**command)), file=out)
        child.engine.shutdown()


if __name__ == "__main__":  # the engine starts processes that import this file
    main()
