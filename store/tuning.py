"""Times and sizes of a node that no operator sets, each with its reason. Tests of what takes long shorten them."""

from dataclasses import dataclass
from typing import Final

from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.rpc.server.server import HELLO_TIMEOUT_S, MAX_STRANGERS


@dataclass(frozen=True, slots=True)
class NodeTuning:
    """Defaults for every node."""

    prefault_step: int = 64 << 20
    """Bytes of DRAM that the prefault thread touches at once."""
    put_ttl_s: float = 30.0
    """An open put expires after this long: three times the default deadline of a client."""
    max_lease_s: float = 60.0
    """Longest lease on mapped blocks, longest hold on what a lookup found."""
    peer_bytes: int = 64 << 20
    """Values on their way to one connection: in one answer, being read from NVMe or HBM for it, or unsent. A larger value goes alone."""
    read_bytes: int = 256 << 20
    """Values on their way from NVMe and HBM to all connections; reads beyond that wait for their turn."""
    peer_requests: int = 64
    """Requests of one connection that may wait for room or for their turn; more are refused."""
    send_timeout_s: float = 30.0
    """Time that a connection has to take an answer. Then it is cut, and the blocks that the answer held are free."""
    move_batch: int = 8 << 20
    """Bytes copied between tiers in one batch, which is one LMDB transaction."""
    read_threads: int = 2
    """Threads that read from NVMe and HBM. The tier itself has eight more reads of large values in flight."""
    write_threads: int = 2
    """Batches that are copied between tiers at once: one is encoded or written while the other commits."""
    tier_retry_s: float = 5.0
    """A tier whose device refused a write is tried again after this long."""
    publish_batch: int = 4096
    """Events in one message to the master."""
    publish_in_flight: int = 4
    """Messages to the master that may wait for their answer."""
    compare_from_blocks: int = 64
    """Where a master knows this many blocks of the node as its link comes up, digests are compared first: only differences are sent."""
    claim_interval_s: float = 0.002
    """What was put, has left or moved is reported to the master after this long at most, in one message; at once where a caller waits."""
    copy_batch: int = 8 << 20
    """Bytes fetched at once from another node for a replica."""
    copy_queue: int = 65_536
    """Replicas that may wait to be fetched; more are refused."""
    copy_timeout_s: float = 5.0
    """Time that one batch has to come from the other node."""
    control_timeout_s: float = 5.0
    """Deadline of a call to the master's control plane."""
    owner_patience_s: float = 1.0
    """With several masters: after a heartbeat without an answer for this long the others are asked which of them owns the catalog."""
    reconnect_interval_s: float = 0.2
    """Shortest pause before masters are tried again. It is a tenth of the time without a master."""
    reconnect_max_interval_s: float = 5.0
    """Longest pause between two tries to reach a master."""
    refused_s: float = 15.0
    """How long a first registration that masters refuse is tried: the name of a node whose host died is free after `node_ttl_s`."""
    hello_timeout_s: float = HELLO_TIMEOUT_S
    """A connection that has not introduced itself after this long is closed."""
    max_strangers: int = MAX_STRANGERS
    """Connections that have not introduced themselves; beyond this the longest open one is closed."""
    peer_timeout_s: float = PEER_TIMEOUT_S
    """A TCP connection whose peer's host acknowledges nothing, or whose peer reads nothing, for about this long is closed."""
    shutdown_timeout_s: float = 5.0
    """Time that copies under way get at the end."""


TUNING: Final = NodeTuning()
