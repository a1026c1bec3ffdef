"""The key that the catalog's owner holds: {"name": ..., "address": ...} under its lease. Its create revision is the epoch."""

import json
from dataclasses import dataclass
from typing import Any

from kvstore.master.catalogs.interface import Candidate, Owner


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """Of the catalog under `prefix`, which ends in a slash, as `me` would write it."""

    prefix: bytes
    me: Candidate

    @property
    def key(self) -> bytes:
        return self.prefix + b"owner"

    @property
    def value(self) -> bytes:
        return json.dumps({"name": self.me.name, "address": self.me.address}).encode()


def owner_of(record: Any) -> Owner:
    """Return who wrote the key. A value of another form gives its text as the name, and no address."""
    try:
        said = json.loads(record.value)
        return Owner(str(said["name"]), str(said["address"]), int(record.create_revision))
    except (ValueError, TypeError, KeyError):
        return Owner(record.value.decode(errors="replace"), "", int(record.create_revision))


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
