"""Another Unix user, for tests of permissions.

Only root can change the user. Without root, the test's own user acts as a member of one of its groups, and `shut_out` removes its own
permission to enter a folder.
"""

import grp
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

IS_ROOT: Final = os.geteuid() == 0
NOBODY: Final = pwd.getpwnam("nobody")
GROUP: Final = next(one for one in grp.getgrall() if one.gr_gid not in (0, NOBODY.pw_gid)) if IS_ROOT else grp.getgrgid(os.getegid())
"""A group that this user can assign to files, without the user of NOBODY as a member."""


def become_another(*, is_member: bool) -> None:
    """Change the user of this (forked or spawned) process, to a member of GROUP or of no group."""
    if IS_ROOT:
        os.setgroups([GROUP.gr_gid] if is_member else [])
        os.setgid(NOBODY.pw_gid)
        os.setuid(NOBODY.pw_uid)


@contextmanager
def common_folder() -> Iterator[Path]:
    """Create a folder that every user can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def shut_out(folder: Path) -> Iterator[None]:
    """Context in which non-members cannot enter the folder. Without root its owner cannot either."""
    mode = folder.stat().st_mode
    if not IS_ROOT:
        folder.chmod(0)
    try:
        yield
    finally:
        folder.chmod(mode)
