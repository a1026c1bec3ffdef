"""A program of a page, run in a process that has loaded what takes such programs longest: python -m tests.docs.program CODE."""

import atexit
import gc
import os
import sys

import torch  # noqa: F401 - loaded for all of them: it takes ten times as long as most of them do

import kvstore.client.tensors.cache  # noqa: F401 - likewise


def main() -> None:
    """As `python -c CODE`; where that ends well, without taking apart what was loaded before, which takes as long as all else."""
    done: list[bool] = []
    atexit.register(_end, done)  # the first to be registered is the last to be called, after threads have been waited for
    exec(compile(sys.argv[1], "<string>", "exec"), {"__name__": "__main__"})
    done.append(True)


def _end(done: list[bool]) -> None:
    gc.collect()  # what was left open is warned of now
    if done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
