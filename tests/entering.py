"""To be on another host of this machine (tests/namespaces.py): what `ip netns exec` does, for a process that runs already."""

import ctypes
import os
from collections.abc import Sequence
from typing import Final

_CLONE_NEWNS: Final = 0x20000
_CLONE_NEWNET: Final = 0x40000000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_MNT_DETACH: Final = 2


def enter_network(name: str) -> None:
    """Have the calling thread, and those that it starts from then on, use that host's interfaces. It stays there: for a process's first
    one. Raises OSError."""
    with open(f"/run/netns/{name}", "rb") as namespace:
        _done(ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET), f"setns {name}")


def enter(name: str, hidden: Sequence[str] = ()) -> None:
    """Move this process, of one thread, to that host. Raises OSError.

    /sys then shows the host's interfaces. The folders `hidden` are empty and its own, since hosts share no files."""
    enter_network(name)
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(_CLONE_NEWNS), "unshare")
    _done(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_SLAVE | _MS_REC), None), "to keep mounts from others")
    libc.umount2(b"/sys", _MNT_DETACH)  # where none is mounted, as in some containers, nothing hides the next one
    for kind, folder in (("sysfs", "/sys"), *(("tmpfs", folder) for folder in hidden)):
        _done(libc.mount(name.encode(), os.fsencode(folder), kind.encode(), ctypes.c_ulong(0), None), f"mount {folder}")


def _done(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
