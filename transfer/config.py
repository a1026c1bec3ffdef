"""Settings of the transfer engine, the same in every program: [transfer] in the TOML file, KVSTORE_TRANSFER_*."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import constant, setting

UCX_SLICE_BYTES: Final = 8 << 20
"""Slice size over UCX, where each slice costs a rendezvous."""
NIXL_SLICE_BYTES: Final = 16 << 20
"""Slice size over NIXL, which splits and spreads transfers itself."""

SECTION: Final = "transfer"
AUTO: Final = "auto"
"""Value of `transports` that selects them by the machine."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of a transfer engine. See docs/transfer.md."""

    transports: str = setting(
        AUTO,
        "Transports to use, the preferred one first, of shm, tcp, ucx, nixl and MODULE:CLASS for one of your own. auto: shm, "
        "then ucx or else nixl where it is installed and there is an RDMA device, then tcp. Not ucx and nixl together.",
    )
    allow_plaintext_rdma: bool = setting(
        False,
        "With TLS: use UCX, NIXL and transports of your own all the same, though nothing encrypts what goes by them (docs/security.md).",
    )
    rails: str = setting("", "NICs to use, comma separated; default: every NIC that is up, the loopback only if there is no other.")
    topology: str = setting("", "JSON file that replaces the discovered topology.")
    listen_port: int = setting(
        0,
        "TCP port of the engine on every rail, for tcp; transports beside it take the ports that follow. 0 takes free ones.",
        minimum=0,
        maximum=65535,
    )
    tcp_streams: int = setting(2, "TCP connections to a peer on each rail.", minimum=1, maximum=64)
    max_connections: int = setting(1024, "Peers' connections beyond this are refused.", minimum=1)

    deadline_s: float = constant(30.0)
    """Deadline of a transfer whose caller gives none: the longest time that a put may stay open."""
    # Over a loopback, slices of 2 MiB carry a tenth to a fifth more than of 1 MiB, of 4 MiB no more, three in flight no more than two
    # (benchmarks/RESULTS.md). More in flight would only delay urgent transfers.
    slice_bytes: int = constant(2 << 20)
    """Large transfers are cut into slices of this size."""
    shm_slice_bytes: int = constant(4 << 20)
    """Slice size over shared memory, where a slice is a copy."""
    max_endpoints: int = constant(256)
    """Connections kept open per rail; SIEVE chooses which to close."""
    idle_ttl_s: float = constant(60.0)
    """A connection that is unused for this long is closed."""
    peer_ttl_s: float = constant(600.0)
    """A node forgets a peer, and the measured rates of its paths, after copying nothing from it for this long."""
    connect_timeout_s: float = constant(2.0)
    """Timeout of one connection attempt, so that another rail can be tried before the deadline."""
    stall_timeout_s: float = constant(0.5)
    """A connection that moves no byte of a slice for this long has failed."""
    max_attempts: int = constant(6)
    """Attempts to send a slice over one transport, on all its rails, before only other transports are tried."""
    cooldown_s: float = constant(0.5)
    """Cooldown of a rail after a failure; it doubles with each further failure."""
    cooldown_max_s: float = constant(8.0)
    """Longest cooldown."""
    probe_share: float = constant(0.02)
    """Fraction of slices sent over a rail other than the best one, to measure it."""
    numa_penalty: float = constant(2.0)
    """Factor by which a rail of another NUMA node is ranked slower."""
    max_handshakes: int = constant(64)
    """Unauthenticated connections, beside max_connections; one more displaces the oldest."""
    handshake_timeout_s: float = constant(5.0)
    """A connection that has not joined within this time is closed."""
    serve_threads: int = constant(16)
    """Core threads that serve peers. Further connections queue, and get extra threads while these are blocked."""
    copy_threads: int = constant(0)
    """Threads that copy shared memory; 0: one per processor, at most 4."""
    link_poll_interval_s: float = constant(1.0)
    """Interval at which the state of links is polled."""

    def slice_bytes_of(self, transport: str) -> int:
        """Return the slice size of a transport."""
        return {"shm": self.shm_slice_bytes, "ucx": UCX_SLICE_BYTES, "nixl": NIXL_SLICE_BYTES}.get(transport, self.slice_bytes)
