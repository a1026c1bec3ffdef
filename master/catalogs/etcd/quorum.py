"""Health of the etcd servers: warnings about releases that lose or corrupt data, and the reason when no member has a
leader."""

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.protocol.errors import KVStoreError

LOG = logging.getLogger("kvstore.master")

SAFE_FROM = {(3, 4): 42, (3, 5): 28, (3, 6): 9}
"""(major, minor) -> first patch release without stale reads after a pause. Source: etcd issue 20418 and its
back-ports."""


def known_data_bug(version: str) -> str | None:
    """Return a warning about the server's version (`3.4.23`, `3.6.0-rc.1`), or None if it has no known data bug."""
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


PROBE_S: Final = 2.0
"""Timeout of one endpoint. A member answers a status request without the others."""
MEANWHILE: Final = "reads continue, puts are not confirmed"


class EtcdQuorum:
    """Probes all endpoints in parallel, each over its own connection. Not thread-safe, but for `close`."""

    def __init__(self, endpoints: Sequence[str], access: EtcdAccess) -> None:
        """Raises ConfigError when a file of `access` cannot be read."""
        anonymous = replace(access, user=None, password=None)  # a login needs a quorum, a status needs no login
        self._channels = {endpoint: EtcdChannel([endpoint], anonymous) for endpoint in dict.fromkeys(endpoints)}

    def outage(self) -> str:
        """Return one sentence about what etcd lacks, "" while any member knows a leader. Takes at most PROBE_S."""
        with ThreadPoolExecutor(len(self._channels)) as threads:
            return outage_of(dict(zip(self._channels, threads.map(_is_led, self._channels.values()), strict=True)))

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def outage_of(answers: dict[str, bool | None]) -> str:
    """As `EtcdQuorum.outage`. By endpoint: True if the member knows a leader, None if it does not respond."""
    count = len(answers)
    answering = sum(is_led is not None for is_led in answers.values())
    if any(answers.values()):
        return ""
    if not answering:
        where = f" at {next(iter(answers))}" if count == 1 else f": 0 of {count} members can be reached"
        return f"etcd does not answer{where}; {MEANWHILE}"
    lack = "quorum" if answering <= count // 2 else "leader"
    return f"etcd has no {lack}: {answering} of {count} {'answers' if answering == 1 else 'answer'}; {MEANWHILE}"


def _is_led(channel: EtcdChannel) -> bool | None:
    try:
        return bool(channel.call("Status", rpc_pb2.StatusRequest(), timeout_s=PROBE_S).leader)
    except KVStoreError:
        return None
