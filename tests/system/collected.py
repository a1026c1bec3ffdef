"""The real daemon that also reports objects that only the garbage collector could free; it rarely runs there (rpc/daemon.py)."""

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
    """Disable automatic garbage collection in this process. On request, report the garbage and free it."""
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
    """Return the number of objects of each kind in reference cycles of that daemon since the last call."""
    told = _told(pid, folder)
    os.kill(pid, ASK)
    until(told.exists, f"an answer of {pid}")
    lines = told.read_text().splitlines()
    told.unlink()
    return Counter({kind: int(count) for kind, count in (line.rsplit(maxsplit=1) for line in lines)})


def _told(pid: int, folder: Path) -> Path:
    return folder / f"{pid}.garbage"
