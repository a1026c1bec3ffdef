"""Maps memory of another process by its CUDA IPC handle, given on standard input; prints seconds to map it and GB/s of a copy.

`--hold`: prints `mapped` and waits to be killed.
"""

import ast
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.device import gb_s


def main() -> None:
    handle = ast.literal_eval(sys.stdin.readline() if "--hold" in sys.argv else sys.stdin.read())
    torch.ones(1, device="cuda:0")
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    arena = mapped(handle)
    opened_s = time.perf_counter() - begun_s
    own = torch.empty_like(arena)
    speed = gb_s(arena.nbytes, lambda: own.copy_(arena))
    if "--hold" in sys.argv:
        print("mapped", flush=True)
        time.sleep(60)
    print(opened_s, speed, flush=True)


def mapped(handle: tuple[Any, ...]) -> Any:
    """The memory behind the result of `untyped_storage()._share_cuda_()`, as bytes."""
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device="cuda:0").set_(storage)


if __name__ == "__main__":
    main()
