"""A program of a page, run in a process that has loaded what takes such programs longest: python -m tests.docs.program CODE."""

import atexit
import gc
import sys

import torch  # noqa: F401 - loaded for all of them: it takes ten times as long as most of them do

import kvstore.client.tensors.cache  # noqa: F401 - likewise


def main() -> None:
    """As `python -c CODE`."""
    atexit.register(gc.collect)  # what was left open is warned of: nothing else takes apart what was loaded (tests/forked.py)
    exec(compile(sys.argv[1], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
