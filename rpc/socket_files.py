"""Files of Unix sockets that nobody listens on: a process that is killed leaves its own behind, and nothing else takes them away."""

import contextlib
import errno
import re
import socket
import time
from pathlib import Path
from typing import Final

OURS: Final = re.compile(r"(master|node|transfer)-.+\.sock")
"""The folder may be one in which others keep files, too."""
MIN_AGE_S: Final = 2.0
"""A younger one may be bound and not listened on yet."""
PROBE_S: Final = 1.0
"""For a connection within the host, which a listener's backlog takes at once."""


def remove_dead(path: Path) -> None:
    """Unlink a socket file that nobody listens on. Raises OSError(EADDRINUSE) if someone does."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe.connect(str(path))
            raise OSError(errno.EADDRINUSE, "another process listens there: stop it, or give this one a folder of its own (--run-dir)")
    path.unlink(missing_ok=True)


def sweep(folder: Path, *, min_age_s: float = MIN_AGE_S) -> None:
    """Remove what dead processes of ours have left in `folder`, if it is that old. What cannot be looked at or removed stays."""
    left = []
    with contextlib.suppress(OSError):
        left = [path for path in folder.iterdir() if OURS.fullmatch(path.name)]
    for path in left:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= min_age_s:
                remove_dead(path)
