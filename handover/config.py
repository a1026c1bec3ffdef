"""Settings of the hand-over: [handover] in the TOML file, KVSTORE_HANDOVER_*."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import Size, constant, setting
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.rpc.server.server import HELLO_TIMEOUT_S, MAX_UNAUTHENTICATED
from kvstore.security.tls.config import ServerTlsSettings

SECTION: Final = "handover"
MAX_SLOTS: Final = 64
"""Of gathered parts from one rank to another, at either end."""


@dataclass(frozen=True, slots=True)
class HandoverSettings(ServerTlsSettings):
    """How one rank hands KV cache over. Sizes are bytes, times seconds. See docs/kvcache.md."""

    listen: str = setting("127.0.0.1:0", "HOST:PORT for the control messages of other ranks; port 0 takes a free one.")
    advertise: str = setting("", "HOST:PORT told to other ranks instead of `listen`, when listening on all interfaces.")
    way: str = setting(
        "auto",
        "How bytes go to this rank's blocks: push (the sender writes one-sided), pull (this rank reads one-sided). "
        "auto: pull over shared memory, push otherwise.",
        choices=("auto", "push", "pull"),
    )
    staging_bytes: Size = setting(Size(1 << 30), "Staging memory of one rank; a request that needs more is refused.", minimum=4096)

    min_layer_batch_bytes: int = constant(1 << 20)
    """Layers that are ready wait for the next ones until this much can go to a rank at once."""
    # Over loopback TCP and shared memory alike, runs of 4 KiB are quicker gathered, those of 8 KiB straight.
    direct_min_bytes: int = constant(8 << 10)
    """Runs at least this long on average go straight between the pools; shorter ones are gathered first."""
    staging_part_bytes: int = constant(4 << 20)
    """Largest part that is gathered, sent and scattered at once."""
    staging_slots: int = constant(2)
    """Gathered parts under way from one rank to another."""
    deadline_s: float = constant(60.0)
    """Time of a request whose caller names none."""
    connect_timeout_s: float = constant(2.0)
    """Time to connect to another rank."""
    fence_timeout_s: float = constant(10.0)
    """After a failure: how long to wait for bytes under way to end before the blocks are given up for good."""
    max_connections: int = constant(4096)
    """Control connections beyond this, or beyond half of RLIMIT_NOFILE, are refused."""
    hello_timeout_s: float = constant(HELLO_TIMEOUT_S)
    """A connection that has not introduced itself after this long is closed."""
    max_unauthenticated: int = constant(MAX_UNAUTHENTICATED)
    """Connections that have not introduced themselves, half of max_connections at most; beyond this the longest open one is closed."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """A connection over TCP is closed when its peer's host acknowledges nothing, or its peer reads nothing, for about this long."""
