"""Settings of the transfer engine, the same for every program that has one: [transfer] in the TOML file, KVSTORE_TRANSFER_*."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import constant, setting

UCX_SLICE_BYTES: Final = 8 << 20
"""Size of slices that go by UCX, where each slice costs a rendezvous."""
NIXL_SLICE_BYTES: Final = 16 << 20
"""Size of slices that go by NIXL, which cuts and spreads by itself."""

SECTION: Final = "transfer"
AUTO: Final = "auto"
"""Of the transports."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How an engine moves bytes. See docs/transfer.md."""

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
    """Time for a transfer whose caller names none: as long as a put may stay open."""
    # Over a loopback, slices of 2 MiB carry a tenth to a fifth more than of 1 MiB, of 4 MiB no more, three under way no more than two
    # (benchmarks/RESULTS.md). More under way would only be more for an urgent transfer to wait for.
    slice_bytes: int = constant(2 << 20)
    """Large transfers are cut into slices of this size."""
    shm_slice_bytes: int = constant(4 << 20)
    """The same for shared memory, where a slice is a copy."""
    max_endpoints: int = constant(256)
    """Connections kept open on a rail; the SIEVE policy chooses which to close."""
    idle_ttl_s: float = constant(60.0)
    """A connection unused for this long is closed."""
    peer_ttl_s: float = constant(600.0)
    """A node forgets another one that it has copied nothing from for this long, and how fast the ways to it were."""
    connect_timeout_s: float = constant(2.0)
    """Time for one attempt to connect, so that another rail can still be tried."""
    stall_timeout_s: float = constant(0.5)
    """A connection that moves no byte of a slice for this long has failed."""
    max_attempts: int = constant(6)
    """How often a slice is tried by one transport, over all its rails, before only others are left to it."""
    cooldown_s: float = constant(0.5)
    """A rail that failed rests for this long, then twice as long with each further failure."""
    cooldown_max_s: float = constant(8.0)
    """Longest rest of a failing rail."""
    probe_share: float = constant(0.02)
    """Share of slices sent over a rail other than the best one, to measure it."""
    numa_penalty: float = constant(2.0)
    """A rail of another NUMA node counts as this much slower."""
    max_handshakes: int = constant(64)
    """Connections that have not said yet who they are, beside max_connections; one more takes the oldest's place."""
    handshake_timeout_s: float = constant(5.0)
    """A connection that has not said by then who it is is closed."""
    serve_threads: int = constant(16)
    """Threads that serve peers; connections beyond wait their turn, and get threads of their own where those are held up."""
    copy_threads: int = constant(0)
    """Threads that copy shared memory; 0: one a processor, 4 at most."""
    link_poll_interval_s: float = constant(1.0)
    """How often the state of the links is looked at."""

    def slice_bytes_of(self, transport: str) -> int:
        """The size of a slice that goes by this transport."""
        return {"shm": self.shm_slice_bytes, "ucx": UCX_SLICE_BYTES, "nixl": NIXL_SLICE_BYTES}.get(transport, self.slice_bytes)
