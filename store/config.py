"""The settings of kvstore-node, and the two that need parsing: `nvme` and `hbm`."""

from dataclasses import dataclass
from pathlib import Path

from kvstore.protocol import shared_settings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, constant, parse_size, setting
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.rpc.server.server import HELLO_TIMEOUT_S, MAX_UNAUTHENTICATED
from kvstore.security.tls.config import ServerTlsSettings
from kvstore.tiers.policies.by_name import DEFAULT, DEFAULT_POLICY, POLICY_NAMES


@dataclass(frozen=True, slots=True)
class NodeSettings(ServerTlsSettings):
    """See docs/settings.md, which is made from this."""

    name: str = setting(
        "",
        "Name of the node and of what it keeps on NVMe, stable across restarts; default: the host's name and the listening port, or, where "
        "that is 0, an id kept in the folder of the NVMe tier, else in run_dir.",
    )
    master: str = shared_settings.MASTER()
    join_token: str = setting(
        "",
        "Token by which the node joins, of the section [nodes] of the masters' tokens file (docs/security.md). A flag is seen by whoever "
        "lists processes: rather give it by join_token_file, or by its variable.",
    )
    join_token_file: str = setting("", "File whose text is that token, read each time that the node looks for a master.")
    allow_unauthenticated: bool = shared_settings.ALLOW_UNAUTHENTICATED()
    listen: str = setting("127.0.0.1:0", "HOST:PORT for clients of other hosts; port 0 takes a free one.")
    advertise: str = setting("", "HOST:PORT told to clients instead of `listen`, behind NAT or when listening on all interfaces.")
    http: str = shared_settings.HTTP()
    http_token_file: str = shared_settings.HTTP_TOKEN_FILE()
    http_tls_cert: str = shared_settings.HTTP_TLS_CERT()
    http_tls_key: str = shared_settings.HTTP_TLS_KEY()
    log_level: str = shared_settings.LOG_LEVEL()
    log_format: str = shared_settings.LOG_FORMAT()
    run_dir: str = shared_settings.RUN_DIR()
    socket_group: str = shared_settings.SOCKET_GROUP()
    socket_mode: str = shared_settings.SOCKET_MODE()
    memory: Size = setting(
        Size(0),
        "Most memory that the node takes in all, such as its container's limit: it divides this into DRAM tier, block table "
        "(`table_share`), shared index and process. 0: `dram` says what values take, and the rest comes on top.",
    )
    dram: Size = setting(Size(0), "Capacity of the DRAM tier. 0: what `memory` leaves for it, or 1 GiB without `memory`.")
    table_share: float = setting(
        0.5,
        "Memory of the block table, as a share of the DRAM tier, beside which it comes: about 470 bytes for each block, in whichever tier, "
        "and a quarter for what the policy remembers of blocks that left. At least 64 MiB. Where it is used up the coldest blocks of the "
        "lowest tier leave the node.",
        minimum=0,
        maximum=16,
    )
    nvme: str = setting("", "DIR:SIZE of the NVMe tier; none by default.")
    nvme_codec: str = setting(
        "none",
        "Scheme in which raw tensor values are quantised on their way to NVMe: fp8-head, int8, int4/64, k=int4/64,v=int2/32, ... "
        "(docs/kvcache.md). What comes back from there is not exactly what was put. Needs the extra hbm.",
    )
    hbm: str = setting("", "DEVICE:SIZE of the HBM tier (cuda:0:8GiB), any torch device; none by default. Needs the extra hbm.")
    policy: str = setting(
        DEFAULT, f"Eviction policy of every tier: {', '.join(POLICY_NAMES)}; {DEFAULT} is {DEFAULT_POLICY}.", choices=POLICY_NAMES
    )
    hugepages: bool = setting(False, "Take huge pages for DRAM when the system has enough reserved.")
    high_watermark: float = setting(
        0.95, "Share of a tier's capacity above which blocks are demoted, if there is a lower tier.", minimum=0.01, maximum=1
    )
    low_watermark: float = setting(0.90, "Share of a tier's capacity down to which blocks are demoted.", minimum=0, maximum=1)
    demotion_wait_s: float = setting(
        0.003,
        "How long a put that finds no room waits for blocks to be copied to NVMe. Then the coldest ones leave the node for it, written or "
        "not: a burst that the disk cannot take costs cold blocks and not time.",
        minimum=0,
        maximum=3600,
    )
    busy_poll_us: int = shared_settings.BUSY_POLL_US()
    ticket_grace_s: float = setting(
        3600.0,
        "Where tokens are needed: how long those who are connected are served while no master is heard of, which would say whose token is "
        "revoked; and those who come with a ticket that has not ended.",
        minimum=0,
    )
    max_connections: int = setting(4096, "Connections beyond this, or beyond half of RLIMIT_NOFILE, are refused.", minimum=1)
    drain_s: float = setting(
        10.0,
        "At SIGTERM or SIGINT: time to write to NVMe what only memory holds, so that the next process of the node has it. A second signal "
        "ends the node at once. 0: nothing is written.",
        minimum=0,
    )
    put_ttl_s: float = constant(30.0)
    """An open put expires after this long: three times the default deadline of a client."""
    max_lease_s: float = constant(60.0)
    """Longest lease on mapped blocks, longest hold on what a lookup found."""
    peer_bytes: int = constant(64 << 20)
    """Values on their way to one connection: in one answer, being read from NVMe or HBM for it, or unsent. A larger value goes alone."""
    read_bytes: int = constant(256 << 20)
    """Values on their way from NVMe and HBM to all connections; reads beyond that wait for their turn."""
    peer_requests: int = constant(64)
    """Requests of one connection that may wait for room or for their turn; more are refused."""
    move_batch: int = constant(8 << 20)
    """Bytes copied between tiers in one batch, which is one LMDB transaction."""
    read_threads: int = constant(2)
    """Threads that read from NVMe and HBM. The tier itself has eight more reads of large values in flight."""
    write_threads: int = constant(2)
    """Batches that are copied between tiers at once: one is encoded or written while the other commits."""
    tier_retry_s: float = constant(5.0)
    """A tier whose device refused a write is tried again after this long."""
    compare_from_blocks: int = constant(64)
    """Where a master knows this many blocks of the node as its link comes up, digests are compared first: only differences are sent."""
    claim_interval_s: float = constant(0.002)
    """What was put, has left or moved is reported to the master after this long at most, in one message; at once where a caller waits."""
    copy_batch: int = constant(8 << 20)
    """Bytes fetched at once from another node for a replica."""
    copy_queue: int = constant(65_536)
    """Replicas that may wait to be fetched; more are refused."""
    copy_timeout_s: float = constant(5.0)
    """Time that one batch has to come from the other node."""
    control_timeout_s: float = constant(5.0)
    """Deadline of a call to the master's control plane."""
    owner_patience_s: float = constant(1.0)
    """With several masters: after a heartbeat without an answer for this long the others are asked which of them owns the catalog."""
    reconnect_interval_s: float = constant(0.2)
    """Shortest pause before masters are tried again. It is a tenth of the time without a master."""
    reconnect_max_interval_s: float = constant(5.0)
    """Longest pause between two tries to reach a master."""
    refused_s: float = constant(15.0)
    """How long a first registration that masters refuse is tried: the name of a node whose host died is free after `node_ttl_s`."""
    hello_timeout_s: float = constant(HELLO_TIMEOUT_S)
    """A connection that has not introduced itself after this long is closed."""
    max_unauthenticated: int = constant(MAX_UNAUTHENTICATED)
    """Connections that have not introduced themselves; beyond this the longest open one is closed."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """A TCP connection whose peer's host acknowledges nothing, or whose peer reads nothing, for about this long is closed."""


def join_token(settings: NodeSettings) -> str:
    """As it is now. Raises ConfigError: both settings name one, or the file cannot be read."""
    if not settings.join_token_file:
        return settings.join_token
    if settings.join_token:
        raise ConfigError("join_token and join_token_file are both given: leave out one")
    try:
        return Path(settings.join_token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read join_token_file {settings.join_token_file}: {error}") from None


def split_place(text: str, name: str) -> tuple[str, int]:
    """`PLACE:SIZE`, the last colon before the size. Raises ConfigError with the form expected."""
    place, colon, size = text.rpartition(":")
    if not colon or not place:
        raise ConfigError(f"{name} is {text!r}: write {name.upper()} as PLACE:SIZE, such as /mnt/nvme:100GiB or cuda:0:8GiB")
    try:
        return place, parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
