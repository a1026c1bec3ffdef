"""What a node's heartbeats report of its use: by tenants, of namespaces, and the slowest requests."""

from typing import NamedTuple

from kvstore.protocol import control_pb2 as pb


class Uses(NamedTuple):
    """What tenants take, which namespaces were read when, and the slowest requests (None: as the master was told last)."""

    tenants: list[pb.TenantUse]
    reads: list[pb.NamespaceReads]
    slow: pb.SlowTable | None = None
    slow_version: int = 0
