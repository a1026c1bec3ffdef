"""The settings of kvstore-master."""

from dataclasses import dataclass

from kvstore.master.directory.writes.record_policy import ALL, RECORDS
from kvstore.protocol import shared_settings
from kvstore.protocol.message import MAX_REPLICAS
from kvstore.protocol.partitions import MAX_PARTITIONS
from kvstore.protocol.settings import Size, constant, setting
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.rpc.server.server import HELLO_TIMEOUT_S, MAX_UNAUTHENTICATED
from kvstore.scheduler.baselines import DISPATCHERS
from kvstore.scheduler.kvcache_centric import DEFAULT_BALANCING_THRESHOLD
from kvstore.security.tls.config import ServerTlsSettings


@dataclass(frozen=True, slots=True)
class MasterSettings(ServerTlsSettings):
    """Settings of a master; docs/settings.md is generated from this."""

    listen: str = setting("127.0.0.1:7440", "HOST:PORT for clients and nodes (frames).")
    control: str = setting("", "HOST:PORT of the control plane (gRPC); default: the host of `listen`, the next port (0 if that is 0).")
    advertise: str = setting(
        "",
        "Host, without a port, by which nodes and clients reach this master; the control plane and the following masters report it; "
        "default: the address they reached, and the host of `listen`.",
    )
    http: str = shared_settings.HTTP()
    http_tls_cert: str = shared_settings.HTTP_TLS_CERT()
    http_tls_key: str = shared_settings.HTTP_TLS_KEY()
    log_level: str = shared_settings.LOG_LEVEL()
    log_format: str = shared_settings.LOG_FORMAT()
    run_dir: str = shared_settings.RUN_DIR()
    socket_group: str = shared_settings.SOCKET_GROUP()
    socket_mode: str = shared_settings.SOCKET_MODE()
    catalog: str = setting("memory:", "Where records survive the master: memory:, lmdb:PATH, etcd://HOST:PORT,... (etcds://: by TLS).")
    partitions: int = setting(
        1,
        "Parts of the key space, each of which one of the masters owns at a time (docs/operations.md). It is fixed when a cluster is made.",
        minimum=1,
        maximum=MAX_PARTITIONS,
    )
    records: str = setting(
        ALL,
        "Blocks with a record in the catalog: all; outliving: those that outlive their node's process, in NVMe, at several nodes, or "
        "pinned; membership: none. Nodes, drains, pins, replica targets, quotas and removals always have (docs/operations.md).",
        choices=RECORDS,
    )
    lease_ttl_s: float = setting(
        2.0,
        "With a catalog in etcd: an owner that does not renew its lease for this long is replaced. etcd takes no less than 2.",
        minimum=0.5,
        maximum=3600,
    )
    compact_interval_s: float = setting(
        60.0,
        "With a catalog in etcd: interval at which the catalog's owner compacts etcd's history, and length of the history that it keeps; "
        "0: never. It keeps a few seconds if half of the quota is in use, and more for a master that lists the catalog, up to 80 % of the "
        "quota. Compaction affects all users of this etcd.",
        minimum=0,
    )
    etcd_quota_bytes: Size = setting(
        Size(2 << 30),
        "The quota that etcd was started with (--quota-backend-bytes), which its API does not report; its default is 2 GiB.",
        minimum=1,
    )
    tokens: str = setting(
        "",
        "TOML file with the tokens of tenants, nodes, instances and operators (docs/security.md); without it authentication is off. It is "
        "read again at SIGHUP and when it has changed.",
    )
    allow_unauthenticated: bool = shared_settings.ALLOW_UNAUTHENTICATED()
    quotas: str = setting(
        "",
        "TOML file with the tenants' quotas (docs/security.md); without it only `kvstore quota set` sets limits. It is read "
        "again at SIGHUP and when it has changed.",
    )
    node_ttl_s: float = setting(10.0, "A node silent for this long counts as dead.", minimum=0.01)
    takeover_wait_s: float = setting(
        3.0,
        "After a failover or restart, lookups of blocks at nodes that have not registered again wait for them, at most this long; "
        "0: no wait, and such blocks are misses.",
        minimum=0,
        maximum=60,
    )
    home_copy_rate: Size = setting(
        Size(1 << 30),
        "Bytes a second of blocks that nearly full nodes commit and that are copied to other nodes, so that the cluster's memory is one "
        "pool (docs/operations.md); 0: each node evicts for itself.",
        minimum=0,
    )
    hot_copies: int = setting(
        0,
        "Further nodes that get a copy of a block that other hosts read often, to spread the reads, while they have free space; 0: none "
        "(docs/operations.md).",
        minimum=0,
        maximum=MAX_REPLICAS - 1,
    )
    hot_reads_per_s: float = setting(
        100.0,
        "With `hot_copies`: reads a second from hosts without a copy of the block, over the last minute, for each such copy. One that is "
        "read less than half as often is kept no longer than others.",
        minimum=0.1,
        maximum=1e6,
    )
    max_connections: int = setting(8192, "Connections beyond this, or beyond half of RLIMIT_NOFILE, are refused.", minimum=1)
    dispatcher: str = setting(
        "kvcache_centric", "How the scheduler chooses instances (docs/scheduling.md): " + ", ".join(DISPATCHERS) + ".", choices=DISPATCHERS
    )
    kvcache_balancing_threshold: float = setting(
        DEFAULT_BALANCING_THRESHOLD,
        "kvcache_centric fetches a prefix where the longest one in the cluster is more than this many times the instance's own.",
        minimum=1,
    )
    admission: str = setting(
        "all",
        "Requests that the scheduler accepts: all that keep their SLOs; early, by the current load of both pools; "
        "predicted, by the load foreseen for the end of the prefill.",
        choices=("all", "early", "predicted"),
    )
    instance_ttl_s: float = setting(
        5.0, "An inference instance silent for this long gets no more requests; at least twice `report_interval_s`.", minimum=0.01
    )
    scheduler_model: str = setting(
        "", "Model that instances run, by name or a .json file: used to predict times until enough is measured; default: a plain estimate."
    )
    scheduler_gpu: str = setting("", "GPU that they run it on, by name or a .json file; goes with scheduler_model.")
    scheduler_gpus: int = setting(8, "GPUs of one instance, which hold one copy of the model together.", minimum=1, maximum=1024)
    share_settle_s: float = constant(3.0)
    """With several partitions: the set of live masters must be stable for this long before masters give up
    partitions that are others' share. Longer than a master's restart, so that restarts move fewer partitions."""
    share_pause_s: float = constant(1.0)
    """With several partitions: pause between two that a master gives up, so that nodes and clients look for one new
    owner at a time."""
    catalog_timeout_s: float = constant(10.0)
    """Deadline for opening the catalog at start."""
    tokens_check_interval_s: float = constant(2.0)
    """Interval at which the tokens and quotas files are checked for changes, and connections for expired tokens."""
    ticket_ttl_s: float = constant(300.0)
    """With tokens: how long a ticket opens connections to its node. Open connections go on until their token is
    revoked."""
    ticket_key_ttl_s: float = constant(3600.0)
    """Lifetime of a node's ticket key; then the node gets another one."""
    reserve_ttl_s: float = constant(30.0)
    """A reservation expires after this long without a publication."""
    max_reservations: int = constant(1 << 20)
    """Reservations of all tenants; further ones fail with Full until some are published or expire."""
    heartbeat_interval_s: float = constant(1.0)
    """Interval of nodes' heartbeats."""
    slow_start_s: float = constant(30.0)
    """A new node gets its full share of writes only after this long."""
    forget_node_s: float = constant(60.0)
    """Blocks held only by a node dead for this long are forgotten."""
    max_nodes: int = constant(1024)
    """Live nodes beyond this are refused."""
    max_kept_removals: int = constant(100_000)
    """Tombstones kept for unreachable nodes. Beyond this such a node, when it returns, drops all blocks that the
    directory does not list there."""
    repair_after_s: float = constant(30.0)
    """Lost replicas of a dead node are copied again after this long: a restarted node is back with its NVMe by then."""
    command_timeout_s: float = constant(5.0)
    """Deadline of a command to a node."""
    control_timeout_s: float = constant(5.0)
    """Deadline of a control call within the master."""
    control_threads: int = constant(16)
    """Concurrent control calls: at most half of them for one tenant, and a quarter for all unauthenticated callers."""
    hello_timeout_s: float = constant(HELLO_TIMEOUT_S)
    """A connection without a handshake after this long is closed."""
    max_unauthenticated: int = constant(MAX_UNAUTHENTICATED)
    """Connections before their handshake, at most half of max_connections; beyond this the oldest is closed."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """A TCP connection is closed when its peer's host acknowledges nothing, or its peer reads nothing, for about
    this long."""
    report_interval_s: float = constant(0.5)
    """Interval of inference instances' reports."""
    decision_ttl_s: float = constant(5.0)
    """A scheduled request counts as lost if its instance has not reported it this long after its expected arrival."""
    max_instances: int = constant(1024)
    """Inference instances beyond this are refused."""
    measured_rate_ttl_s: float = constant(60.0)
    """A fetch rate that a node measured is used for this long; then the rate that the sending instance reports."""
