"""Settings of the hand-over: [handover] in the TOML file, KVSTORE_HANDOVER_*."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import Size, constant, setting
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.rpc.server.server import HELLO_TIMEOUT_S, MAX_UNAUTHENTICATED
from kvstore.security.tls.config import ServerTlsSettings

SECTION: Final = "handover"
MAX_SLOTS: Final = 64
"""Limit of gathered parts in flight from one rank to another, at either end."""


@dataclass(frozen=True, slots=True)
class HandoverSettings(ServerTlsSettings):
    """Settings of one rank's hand-overs. Sizes are bytes, times seconds. See docs/kvcache.md."""

    listen: str = setting("127.0.0.1:0", "HOST:PORT for the control messages of other ranks; port 0 takes a free one.")
    advertise: str = setting("", "HOST:PORT that other ranks connect to instead of `listen`, when listening on all interfaces.")
    way: str = setting(
        "auto",
        "Transfer mode into this rank's blocks: push (the sender writes one-sided), pull (this rank reads one-sided). "
        "auto: pull over shared memory, push otherwise.",
        choices=("auto", "push", "pull"),
    )
    staging_bytes: Size = setting(Size(1 << 30), "Staging memory of one rank; a request that needs more is rejected.", minimum=4096)

    min_layer_batch_bytes: int = constant(1 << 20)
    """Ready layers are sent to a rank once this much has accumulated."""
    # Over loopback TCP and shared memory, runs of 4 KiB are faster gathered, runs of 8 KiB faster direct.
    direct_min_bytes: int = constant(8 << 10)
    """Minimum average length of runs that are copied directly between the pools; shorter ones are gathered first."""
    staging_part_bytes: int = constant(4 << 20)
    """Maximum size of a gathered part."""
    staging_slots: int = constant(2)
    """Gathered parts in flight from one rank to another."""
    deadline_s: float = constant(60.0)
    """Default deadline of a request."""
    connect_timeout_s: float = constant(2.0)
    """Time to connect to another rank."""
    fence_timeout_s: float = constant(10.0)
    """Time for transfers to end after a failure, before the blocks are given up."""
    max_connections: int = constant(4096)
    """Limit of control connections, also half of RLIMIT_NOFILE; others are rejected."""
    hello_timeout_s: float = constant(HELLO_TIMEOUT_S)
    """Time for a new connection to authenticate; then it is closed."""
    max_unauthenticated: int = constant(MAX_UNAUTHENTICATED)
    """Limit of unauthenticated connections, at most half of max_connections; beyond it the oldest is closed."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """A TCP connection is closed after about this time without acknowledgements of the peer's host, or without reads
    of the peer."""
