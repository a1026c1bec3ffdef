"""A daemon that tells what only the collector could free, which rarely comes by in one (rpc/daemon.py). The rest is the real daemon."""

import gc
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

from tests.garbage import collected
from tests.system.running import until

ASK: Final = signal.SIGRTMIN
FOLDER: Final = "GARBAGE_FOLDER"
"""The environment's variable with the folder in which it tells."""


def tells() -> None:
    """From now on this process collects nothing by itself, and when it is asked tells what it would, and frees it."""
    folder = Path(os.environ[FOLDER])

    def tell(_number: int, _frame: FrameType | None) -> None:
        handle, name = tempfile.mkstemp(dir=folder)
        with open(handle, "w") as file:
            for kind, count in collected().items():
                file.write(f"{kind} {count}\n")
        os.rename(name, _told(os.getpid(), folder))

    gc.disable()
    signal.signal(ASK, tell)


def garbage(pid: int, folder: Path) -> Counter[str]:
    """How many objects of each kind that daemon had since it was asked last that nothing but themselves refers to."""
    told = _told(pid, folder)
    os.kill(pid, ASK)
    until(told.exists, f"an answer of {pid}")
    lines = told.read_text().splitlines()
    told.unlink()
    return Counter({kind: int(count) for kind, count in (line.rsplit(maxsplit=1) for line in lines)})


def _told(pid: int, folder: Path) -> Path:
    return folder / f"{pid}.garbage"
