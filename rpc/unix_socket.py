"""Unix socket files: who of a host may connect to a daemon's, and removal of those that nobody listens on.

To connect one needs leave to write the socket file and to enter its folder. The folder is opened for entering, not for listing, and nothing
else in it becomes anybody's. A process that is killed leaves its files behind.
"""

import contextlib
import errno
import grp
import os
import re
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE
from typing import Final

from kvstore.protocol.errors import ConfigError

UNCHANGED: Final = -1
"""As a gid: the file keeps the group that it is made with."""
_MODE: Final = re.compile(r"0?[0-7]{3}")
_CREDENTIALS: Final = struct.Struct("@iII")
"""struct ucred: process, user and group."""
_SO_PEERGROUPS: Final = 59
_GROUPS_BYTES: Final = 1024
"""256 supplementary groups; Python asks the kernel for no more."""
OURS: Final = re.compile(r"(master|node|transfer)-.+\.sock")
"""The folder may be one in which others keep files, too."""
MIN_AGE_S: Final = 2.0
"""A younger one may be bound and not listened on yet."""
PROBE_S: Final = 1.0
"""For a connection within the host, which a listener's backlog takes at once."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """The group and the permission bits of a socket file."""

    gid: int = UNCHANGED
    mode: int = 0o600

    @classmethod
    def chosen(cls, group: str, mode: str) -> "SocketAccess":
        """As the settings `socket_group` (a name or a number; "": this process's) and `socket_mode` (octal; "": 0660 with a group, else
        0600) say. Raises ConfigError: no such group, or no such mode.
        """
        if mode and (not _MODE.fullmatch(mode) or int(mode, 8) & 0o111 or int(mode, 8) & 0o600 != 0o600):
            raise ConfigError(f"socket_mode is {mode!r}: write octal digits, 6 for those who may connect and 0 for others, such as 0660")
        bits = int(mode, 8) if mode else 0o660 if group else 0o600
        if group:
            return cls(_gid(group), bits)
        return cls(os.getegid() if bits & 0o060 else UNCHANGED, bits)

    def open_folder(self, folder: Path) -> None:
        """Have those enter the folder whom the socket is for, unless they may. Raises ConfigError (it is another group's), OSError."""
        found = folder.stat()
        mode, is_theirs = S_IMODE(found.st_mode), found.st_gid == self.gid
        needed = (0o010 if is_theirs else 0o001) if self.mode & 0o060 else 0
        needed |= 0o011 if self.mode & 0o006 else 0
        if mode & needed == needed:
            return
        if not is_theirs and not self.mode & 0o006:
            if mode & 0o070:
                raise ConfigError(f"{folder} is open to group {_name(found.st_gid)}, not to {_name(self.gid)}: take another run_dir")
            os.chown(folder, -1, self.gid)
            needed = 0o010
        folder.chmod(mode | needed)

    def give(self, path: Path) -> None:
        """Make the socket file so. Raises OSError."""
        if self.gid != UNCHANGED:
            os.chown(path, -1, self.gid)
        path.chmod(self.mode)

    def admits(self, sock: socket.socket) -> bool:
        """Whether whoever connected this accepted Unix socket may talk to us: this user, root, or one whom group and mode let in. The
        kernel names him as he was when he connected. A file's mode alone would let in everybody once someone has changed it, or moved the
        file where others reach it."""
        _pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid in (os.geteuid(), 0) or self.mode & 0o006:
            return True
        wanted = os.getegid() if self.gid == UNCHANGED else self.gid
        return bool(self.mode & 0o060) and (gid == wanted or wanted in _groups(sock))

    def __str__(self) -> str:
        return f"{self.mode:04o}" if self.gid == UNCHANGED else f"group {_name(self.gid)}, {self.mode:04o}"


def why_denied(path: Path) -> str:
    """Of a socket that this process may not connect to: what keeps it out, and what would let it in."""
    for place, enter in (*((folder, True) for folder in reversed(path.parents)), (path, False)):
        if not os.access(place, os.X_OK if enter else os.W_OK, effective_ids=True):
            break
    try:
        found = place.stat()
    except OSError as error:  # gone since
        return f"{place}: {error.strerror}"
    if found.st_mode & (0o010 if enter else 0o020):
        return f"permission denied on {place}: put this user in group {_name(found.st_gid)}"
    return f"permission denied on {place}: it is only for its owner; set the daemon's socket_group to a group that this user is in"


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of a Unix socket's peer; none for one that has more than we can be told of."""
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"@{len(found) // 4}I", found)


def _gid(group: str) -> int:
    if group.isdecimal() and len(group) < 10:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group is {group!r}: this host has no such group") from None


def _name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


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
