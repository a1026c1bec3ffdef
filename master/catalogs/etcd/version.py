"""Which etcd servers are known to lose, corrupt or wrongly serve data. A warning, not a refusal: tests and trials may run on them."""

import logging
import re

LOG = logging.getLogger("kvstore.master")

SAFE_FROM = {(3, 4): 42, (3, 5): 28, (3, 6): 9}
"""(major, minor) -> the first patch release that gives no stale reads after a pause. Source: etcd issue 20418 and its back-ports."""


def known_data_bug(version: str) -> str | None:
    """One line for the operator about the server's version (`3.4.23`, `3.6.0-rc.1`), or None when nothing is known against it."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        return f"etcd's version {version!r} is not known; use 3.4.42, 3.5.28 or 3.6.9, or later ones of these"
    major, minor, patch = map(int, numbers.groups())
    if (major, minor) < min(SAFE_FROM):
        return f"etcd {version} is no longer maintained; use 3.4.42, 3.5.28 or 3.6.9, or later ones of these"
    safe_patch = SAFE_FROM.get((major, minor), 0)
    if patch >= safe_patch:
        return None
    harm = "can corrupt its data" if (major, minor) == (3, 5) and patch <= 2 else "can serve stale reads after a pause"
    return f"etcd {version} {harm}; use {major}.{minor}.{safe_patch} or later"


def warn_of_data_bug(version: str) -> None:
    if bug := known_data_bug(version):
        LOG.warning("catalog: %s", bug)
