"""Tables that all parts of one directory share."""

from dataclasses import dataclass

from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenants
from kvstore.master.directory.membership.members import Membership
from kvstore.master.directory.writes.record_policy import RecordPolicy


@dataclass(frozen=True, slots=True)
class DirectoryParts:
    """Blocks, tenants and nodes of one directory, its record policy, and the epoch of its commands."""

    rows: Rows
    tenants: Tenants
    members: Membership
    record_policy: RecordPolicy
    master_epoch: int
