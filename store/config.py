"""Settings of kvstore-node, and parsing of `nvme`, `hbm` and `join_token`."""

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
    """Settings of kvstore-node. docs/settings.md is generated from this class."""

    name: str = setting(
        "",
        "Name of the node and of its blocks on NVMe, stable across restarts. Default: host name and listening port; if the port is 0, "
        "an id kept in the folder of the NVMe tier, else in run_dir.",
    )
    master: str = shared_settings.MASTER()
    join_token: str = setting(
        "",
        "Token with which the node joins, from the section [nodes] of the masters' tokens file (docs/security.md). Flags are visible in "
        "process lists: prefer join_token_file or the environment variable.",
    )
    join_token_file: str = setting("", "File that contains the token, read before each connection to a master.")
    allow_unauthenticated: bool = shared_settings.ALLOW_UNAUTHENTICATED()
    listen: str = setting("127.0.0.1:0", "HOST:PORT for clients of other hosts; port 0 takes a free one.")
    advertise: str = setting("", "HOST:PORT that clients connect to instead of `listen`, behind NAT or when listening on all interfaces.")
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
        "Limit of the node's total memory, such as its container's: it is divided into DRAM tier, block table "
        "(`table_share`), shared-memory index and process. 0: `dram` sets the memory of values, and the rest is added to it.",
    )
    dram: Size = setting(Size(0), "Capacity of the DRAM tier. 0: the part of `memory` that is left for it, or 1 GiB without `memory`.")
    table_share: float = setting(
        0.5,
        "Memory of the block table, as a share of the DRAM tier and in addition to it: about 470 bytes per block of any tier, "
        "and a quarter for the policy's memory of evicted blocks. At least 64 MiB. When it is full, the coldest blocks of the "
        "lowest tier are evicted.",
        minimum=0,
        maximum=16,
    )
    nvme: str = setting("", "DIR:SIZE of the NVMe tier, one folder (docs/operations.md, Several disks); none by default.")
    nvme_codec: str = setting(
        "none",
        "Quantization of raw tensor values in NVMe: fp8-head, int8, int4/64, k=int4/64,v=int2/32, ... "
        "(docs/kvcache.md). Values read from NVMe are not exactly those that were put. Needs the extra hbm.",
    )
    hbm: str = setting("", "DEVICE:SIZE of the HBM tier (cuda:0:8GiB), any torch device; none by default. Needs the extra hbm.")
    policy: str = setting(
        DEFAULT, f"Eviction policy of every tier: {', '.join(POLICY_NAMES)}; {DEFAULT} is {DEFAULT_POLICY}.", choices=POLICY_NAMES
    )
    hugepages: bool = setting(False, "Use huge pages for DRAM if the system has reserved enough.")
    high_watermark: float = setting(
        0.95, "Share of a tier's capacity above which blocks are demoted, if there is a lower tier.", minimum=0.01, maximum=1
    )
    low_watermark: float = setting(0.90, "Share of a tier's capacity down to which blocks are demoted.", minimum=0, maximum=1)
    demotion_wait_s: float = setting(
        0.003,
        "How long a put without a free slot waits for demotions to NVMe. Then the coldest blocks are evicted, demoted or "
        "not: a burst that exceeds the disk's rate costs cold blocks, not latency.",
        minimum=0,
        maximum=3600,
    )
    write_worth: float = setting(
        1.2,
        "With policy prefix: a demoted block is written to a full NVMe tier only if it is worth this many times the block "
        "that leaves there; else it is evicted. Higher values spare the device and cost hits.",
        minimum=0,
        maximum=1000,
    )
    busy_poll_us: int = shared_settings.BUSY_POLL_US()
    ticket_grace_s: float = setting(
        3600.0,
        "With tokens: how long connected clients are served without a link to the master, which reports revoked tokens. New "
        "clients with a valid ticket are admitted for as long.",
        minimum=0,
    )
    max_connections: int = setting(
        4096, "Limit of connections, also bounded by half of RLIMIT_NOFILE. Further ones are refused.", minimum=1
    )
    drain_s: float = setting(
        10.0,
        "At SIGTERM or SIGINT: time to write blocks that are only in memory to NVMe, for the node's next process. A second signal "
        "stops the node at once. 0: nothing is written.",
        minimum=0,
    )
    put_ttl_s: float = constant(30.0)
    """An open put expires after this long: three times the default deadline of a client."""
    max_lease_s: float = constant(60.0)
    """Longest read lease, and longest hold of a lookup."""
    peer_bytes: int = constant(64 << 20)
    """Bytes of values in progress for one connection: in one answer, being read from NVMe or HBM, or unsent. A larger
    value is sent alone."""
    read_bytes: int = constant(256 << 20)
    """Bytes of values in progress from NVMe and HBM for all connections. Further reads wait."""
    peer_requests: int = constant(64)
    """Requests of one connection that may wait for slots or for a read. Further ones are refused."""
    move_batch: int = constant(8 << 20)
    """Bytes moved between tiers in one batch, which is one LMDB transaction."""
    read_threads: int = constant(2)
    """Threads that read from NVMe and HBM. The NVMe tier has eight more large reads in flight."""
    write_threads: int = constant(2)
    """Batches moved between tiers at once: one is encoded or written while the other commits."""
    tier_retry_s: float = constant(5.0)
    """Pause before a tier whose device refused a write is used again."""
    compare_from_blocks: int = constant(64)
    """Number of this node's blocks that the master must know for an incremental resync by digests."""
    claim_interval_s: float = constant(0.002)
    """Longest delay of a commit request or event, for batching. Sent at once if a caller waits."""
    copy_batch: int = constant(8 << 20)
    """Bytes fetched at once from another node for replicas."""
    copy_queue: int = constant(65_536)
    """Queued replicas. Further ones are refused."""
    copy_timeout_s: float = constant(5.0)
    """Deadline of one batch from another node."""
    control_timeout_s: float = constant(5.0)
    """Deadline of a call to the master's control plane."""
    owner_patience_s: float = constant(1.0)
    """With several masters: an unanswered heartbeat of this age makes the node search for another owner."""
    reconnect_interval_s: float = constant(0.2)
    """Shortest pause between searches for a master. The pause is a tenth of the time without a link."""
    reconnect_max_interval_s: float = constant(5.0)
    """Longest pause between searches for a master."""
    refused_s: float = constant(15.0)
    """Time for which a refused first registration is retried: the name of a dead node is free after `node_ttl_s`."""
    hello_timeout_s: float = constant(HELLO_TIMEOUT_S)
    """A connection without a Hello after this time is closed."""
    max_unauthenticated: int = constant(MAX_UNAUTHENTICATED)
    """Unauthenticated connections; beyond this the oldest is closed."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """A TCP connection whose peer acknowledges or reads nothing for about this long is closed."""


def join_token(settings: NodeSettings) -> str:
    """Return the current token. Raises ConfigError: both settings are given, or the file cannot be read."""
    if not settings.join_token_file:
        return settings.join_token
    if settings.join_token:
        raise ConfigError("join_token and join_token_file are both given: leave out one")
    try:
        return Path(settings.join_token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read join_token_file {settings.join_token_file}: {error}") from None


def split_location(text: str, name: str) -> tuple[str, int]:
    """Split `LOCATION:SIZE` at the last colon. Raises ConfigError with the expected form."""
    place, colon, size = text.rpartition(":")
    if ":" in place.partition(",")[0] and "," in place:
        raise ConfigError(f"{name} is {text!r}: a node has one {name} tier: run a node for each, or stripe disks (docs/operations.md)")
    if not colon or not place:
        raise ConfigError(f"{name} is {text!r}: write {name} as LOCATION:SIZE, such as /mnt/nvme:100GiB or cuda:0:8GiB")
    try:
        return place, parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
