"""Another Unix user of this host, for tests of what such a one may. Only root can become one: run by anybody else, the tests have that user
play the member of a group that it is in, and shut itself out by taking its own leave to enter a folder."""

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
"""One that this user can give files to, and that `nobody` is not in."""


def become_another(*, is_member: bool) -> None:
    """This process, a forked or spawned one, is another user's from now on: a member of GROUP, or of no group that anybody has."""
    if IS_ROOT:
        os.setgroups([GROUP.gr_gid] if is_member else [])
        os.setgid(NOBODY.pw_gid)
        os.setuid(NOBODY.pw_uid)


@contextmanager
def common_folder() -> Iterator[Path]:
    """A new one that every user can enter; pytest's are below one of this user's own."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def shut_out(folder: Path) -> Iterator[None]:
    """Inside, whoever is no member cannot enter the folder; nor can its owner, where the tests are not run by root."""
    mode = folder.stat().st_mode
    if not IS_ROOT:
        folder.chmod(0)
    try:
        yield
    finally:
        folder.chmod(mode)
