"""Unix socket files: permissions to connect, and removal of stale ones.

Connecting requires write permission on the socket file and search permission on its folder. The folder is made
searchable, not readable, and permissions of its other files are unchanged. A killed process leaves its socket file
behind.
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
"""gid: the file keeps its group."""
_MODE: Final = re.compile(r"0?[0-7]{3}")
_CREDENTIALS: Final = struct.Struct("@iII")
"""struct ucred: process, user and group."""
_SO_PEERGROUPS: Final = 59
_GROUPS_BYTES: Final = 1024
"""256 supplementary groups, the most that getsockopt of Python returns."""
SOCKET_NAMES: Final = re.compile(r"(master|node|transfer)-.+\.sock")
"""Names of kvstore's socket files; the folder may have other files."""
MIN_AGE_S: Final = 2.0
"""A younger file may be bound but not listening yet."""
PROBE_S: Final = 1.0
"""Timeout of a probe; a listener's backlog accepts at once."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Group and permission bits of a socket file."""

    gid: int = UNCHANGED
    mode: int = 0o600

    @classmethod
    def chosen(cls, group: str, mode: str) -> "SocketAccess":
        """Parse the settings `socket_group` (name or number; "": this process's) and `socket_mode` (octal).

        The mode's default is 0660 with a group, else 0600. Raises ConfigError: unknown group, or invalid mode.
        """
        if mode and (not _MODE.fullmatch(mode) or int(mode, 8) & 0o111 or int(mode, 8) & 0o600 != 0o600):
            raise ConfigError(f"socket_mode is {mode!r}: write octal digits, 6 for those who may connect and 0 for others, such as 0660")
        bits = int(mode, 8) if mode else 0o660 if group else 0o600
        if group:
            return cls(_gid(group), bits)
        return cls(os.getegid() if bits & 0o060 else UNCHANGED, bits)

    def open_folder(self, folder: Path) -> None:
        """Give the socket's users search permission on the folder.

        Raises ConfigError (it belongs to another group), OSError.
        """
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
        """Set group and mode of the socket file. Raises OSError."""
        if self.gid != UNCHANGED:
            os.chown(path, -1, self.gid)
        path.chmod(self.mode)

    def admits(self, sock: socket.socket) -> bool:
        """Return True if the peer of this accepted Unix socket is permitted.

        Permitted are this user, root, and users that group and mode admit.
        The kernel reports the peer's credentials at its connect. The file's mode alone does not suffice: it may be
        changed, or the file moved.
        """
        _pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid in (os.geteuid(), 0) or self.mode & 0o006:
            return True
        admitted = os.getegid() if self.gid == UNCHANGED else self.gid
        return bool(self.mode & 0o060) and (gid == admitted or admitted in _groups(sock))

    def __str__(self) -> str:
        return f"{self.mode:04o}" if self.gid == UNCHANGED else f"group {_name(self.gid)}, {self.mode:04o}"


def denied_reason(path: Path) -> str:
    """Return what denies this process to connect to the socket `path`, with the remedy."""
    for denied, enter in (*((folder, True) for folder in reversed(path.parents)), (path, False)):
        if not os.access(denied, os.X_OK if enter else os.W_OK, effective_ids=True):
            break
    try:
        found = denied.stat()
    except OSError as error:  # removed since
        return f"{denied}: {error.strerror}"
    if found.st_mode & (0o010 if enter else 0o020):
        return f"permission denied on {denied}: put this user in group {_name(found.st_gid)}"
    return f"permission denied on {denied}: it is only for its owner; set the daemon's socket_group to a group that this user is in"


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups of a Unix socket's peer; empty if there are more than _GROUPS_BYTES."""
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


def remove_stale(path: Path) -> None:
    """Unlink a socket file without a listener. Raises OSError(EADDRINUSE) if a process listens on it."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe.connect(str(path))
            raise OSError(errno.EADDRINUSE, "another process listens there: stop it, or give this one another folder (--run-dir)")
    path.unlink(missing_ok=True)


def remove_stale_sockets(folder: Path, *, min_age_s: float = MIN_AGE_S) -> None:
    """Remove kvstore's stale socket files in `folder` that are older than `min_age_s`; errors are ignored."""
    left = []
    with contextlib.suppress(OSError):
        left = [path for path in folder.iterdir() if SOCKET_NAMES.fullmatch(path.name)]
    for path in left:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= min_age_s:
                remove_stale(path)
