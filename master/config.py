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
    """See docs/settings.md, which is made from this."""

    listen: str = setting("127.0.0.1:7440", "HOST:PORT for clients and nodes (frames).")
    control: str = setting("", "HOST:PORT of the control plane (gRPC); default: the host of `listen`, the next port (0 if that is 0).")
    advertise: str = setting(
        "",
        "Host, without a port, by which nodes and clients reach this master, told by itself (control plane) and by the masters that follow "
        "it; default: the address they reached, and the host of `listen`.",
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
        "Which blocks have a record in the catalog: all; outliving: those that outlive their node's process, in NVMe, at several nodes, or "
        "pinned; membership: none. Nodes, drains, pins, replica targets, quotas and removals always have (docs/operations.md).",
        choices=RECORDS,
    )
    lease_ttl_s: float = setting(
        2.0,
        "With a catalog in etcd: the owner that has not been heard from for this long is replaced. etcd takes no less than 2.",
        minimum=0.5,
        maximum=3600,
    )
    compact_interval_s: float = setting(
        60.0,
        "With a catalog in etcd: its owner compacts etcd's history this often, and keeps as much of it, or a few seconds where half of the "
        "quota is in use, and more for a master that lists the catalog, up to 80 % of the quota; 0: never. It is the history of all "
        "that uses this etcd.",
        minimum=0,
    )
    etcd_quota_bytes: Size = setting(
        Size(2 << 30),
        "The quota that etcd was started with (--quota-backend-bytes), which it does not tell; its default is 2 GiB.",
        minimum=1,
    )
    tokens: str = setting(
        "",
        "TOML file with the tokens of tenants, nodes, instances and operators (docs/security.md); without it everybody is let in. It is "
        "read again at SIGHUP and when it has changed.",
    )
    allow_unauthenticated: bool = shared_settings.ALLOW_UNAUTHENTICATED()
    quotas: str = setting(
        "",
        "TOML file with what each tenant may take (docs/security.md); without it nobody has a limit but by `kvstore quota set`. It is read "
        "again at SIGHUP and when it has changed.",
    )
    node_ttl_s: float = setting(10.0, "A node silent for this long counts as dead.", minimum=0.01)
    takeover_wait_s: float = setting(
        3.0,
        "After a take-over or a restart: what is asked about blocks of nodes that have not registered yet is answered once they have, and "
        "after this long at the latest; 0: at once, as if these blocks were gone.",
        minimum=0,
        maximum=60,
    )
    spill: bool = setting(
        False,
        "Copy the coldest blocks of a node that is nearly full to nodes with room, those of other hosts first, and have them leave the "
        "full one before the rest (docs/operations.md).",
    )
    hot_copies: int = setting(
        0,
        "Nodes besides one that get a copy of a block which other hosts read often, so that reads spread, as far as there is room; 0: none "
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
        "Which requests the scheduler takes on: all that keep their SLOs; early, by the load of both pools as it is; "
        "predicted, by the load when the prefill will be over.",
        choices=("all", "early", "predicted"),
    )
    instance_ttl_s: float = setting(
        5.0, "An inference instance silent for this long gets no more requests; at least twice `report_interval_s`.", minimum=0.01
    )
    scheduler_model: str = setting(
        "", "Model that instances run, by name or a .json file: how times are foreseen until enough was measured; default: a plain guess."
    )
    scheduler_gpu: str = setting("", "GPU that they run it on, by name or a .json file; goes with scheduler_model.")
    scheduler_gpus: int = setting(8, "GPUs of one instance, which hold one copy of the model together.", minimum=1, maximum=1024)
    share_settle_s: float = constant(3.0)
    """With several partitions: once the masters that live have been the same for so long, each gives up what is another one's share.
    With more than a master takes to restart, restarts of masters move less."""
    share_pause_s: float = constant(1.0)
    """With several partitions: between two that a master gives up, so that its nodes and clients look for one new owner at a time."""
    catalog_timeout_s: float = constant(10.0)
    """Deadline for opening the catalog at start."""
    tokens_check_interval_s: float = constant(2.0)
    """How often it is looked at whether the tokens file or the quotas file has changed, and whether a token by which somebody is
    connected has ended."""
    ticket_ttl_s: float = constant(300.0)
    """Where tokens are needed: how long a ticket opens connections to its node. Those that are open go on; they end when the token is
    revoked."""
    ticket_key_ttl_s: float = constant(3600.0)
    """How long tickets for a node are issued under one key; then it is given another one."""
    reserve_ttl_s: float = constant(30.0)
    """A granted put that is not published is forgotten after this long."""
    max_reservations: int = constant(1 << 20)
    """Puts granted and not yet published, of all tenants; more are refused as Full until some are published or expire."""
    heartbeat_interval_s: float = constant(1.0)
    """How often nodes report."""
    slow_start_s: float = constant(30.0)
    """A new node gets its full share of writes only after this long."""
    forget_node_s: float = constant(60.0)
    """Blocks held only by a node dead for this long are forgotten."""
    max_nodes: int = constant(1024)
    """Live nodes beyond this are refused."""
    max_kept_removals: int = constant(100_000)
    """Removals kept for nodes that are away. Beyond this such a node drops what it held when it returns, but for what the directory
    still lists there."""
    repair_after_s: float = constant(30.0)
    """Replicas that a dead node had are made anew at other nodes after this long: one that is restarted is back with its NVMe by
    then."""
    spill_free_share: float = constant(0.1)
    """With `spill`: a node takes what others spill as long as more than this share of its tiers is free; one with less than half of
    this free in its lowest tier spills."""
    command_timeout_s: float = constant(5.0)
    """Deadline of a command to a node."""
    control_timeout_s: float = constant(5.0)
    """Deadline of a control call within the master."""
    control_threads: int = constant(16)
    """Control calls served at once; half of them at most for one tenant, a quarter for all strangers."""
    hello_timeout_s: float = constant(HELLO_TIMEOUT_S)
    """A connection that has not introduced itself after this long is closed."""
    max_unauthenticated: int = constant(MAX_UNAUTHENTICATED)
    """Connections that have not introduced themselves, half of max_connections at most; beyond this the longest open one is closed."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """A connection over TCP is closed when its peer's host acknowledges nothing, or its peer reads nothing, for about this long."""
    report_interval_s: float = constant(0.5)
    """How often inference instances report to the scheduler."""
    decision_ttl_s: float = constant(5.0)
    """A scheduled request that its instance has not reported as seen this long after it should have come in counts as lost."""
    max_instances: int = constant(1024)
    """Inference instances beyond this are refused."""
    measured_rate_ttl_s: float = constant(60.0)
    """What a node has measured while it fetched from another counts for this long; then what the sending instance says of itself."""
