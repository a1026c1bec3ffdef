from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNKNOWN: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
ROLE_UNKNOWN: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role

class TierStatus(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "quarantined_bytes", "blocks", "hits", "evictions", "demotions", "promotions", "prefaulted_bytes", "health", "codec", "logical_bytes", "payload_bytes", "metadata_bytes", "elements", "huge_bytes", "not_huge_reason", "evicted_age_s", "evictions_by_reason", "next_victim")
    class EvictionsByReasonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DEMOTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    HUGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOT_HUGE_REASON_FIELD_NUMBER: _ClassVar[int]
    EVICTED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_BY_REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_VICTIM_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    blocks: int
    hits: int
    evictions: int
    demotions: int
    promotions: int
    prefaulted_bytes: int
    health: str
    codec: str
    logical_bytes: int
    payload_bytes: int
    metadata_bytes: int
    elements: int
    huge_bytes: int
    not_huge_reason: str
    evicted_age_s: float
    evictions_by_reason: _containers.ScalarMap[str, int]
    next_victim: NextVictim
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., evictions: _Optional[int] = ..., demotions: _Optional[int] = ..., promotions: _Optional[int] = ..., prefaulted_bytes: _Optional[int] = ..., health: _Optional[str] = ..., codec: _Optional[str] = ..., logical_bytes: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., metadata_bytes: _Optional[int] = ..., elements: _Optional[int] = ..., huge_bytes: _Optional[int] = ..., not_huge_reason: _Optional[str] = ..., evicted_age_s: _Optional[float] = ..., evictions_by_reason: _Optional[_Mapping[str, int]] = ..., next_victim: _Optional[_Union[NextVictim, _Mapping]] = ...) -> None: ...

class NextVictim(_message.Message):
    __slots__ = ("unread_s", "size_bytes", "reason", "hits_per_byte_s")
    UNREAD_S_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HITS_PER_BYTE_S_FIELD_NUMBER: _ClassVar[int]
    unread_s: float
    size_bytes: int
    reason: str
    hits_per_byte_s: float
    def __init__(self, unread_s: _Optional[float] = ..., size_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., hits_per_byte_s: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("name", "instance", "version", "host_id", "unix", "tcp", "seen_master_epoch", "tiers", "topology", "transfer", "seen_catalog", "http", "quotas_version", "accepts_traces", "node_id", "retired_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    SEEN_MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SEEN_CATALOG_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_TRACES_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RETIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: int
    version: str
    host_id: str
    unix: str
    tcp: str
    seen_master_epoch: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    topology: bytes
    transfer: bytes
    seen_catalog: str
    http: str
    quotas_version: int
    accepts_traces: bool
    node_id: int
    retired_version: int
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[int] = ..., version: _Optional[str] = ..., host_id: _Optional[str] = ..., unix: _Optional[str] = ..., tcp: _Optional[str] = ..., seen_master_epoch: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., topology: _Optional[bytes] = ..., transfer: _Optional[bytes] = ..., seen_catalog: _Optional[str] = ..., http: _Optional[str] = ..., quotas_version: _Optional[int] = ..., accepts_traces: bool = ..., node_id: _Optional[int] = ..., retired_version: _Optional[int] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("hbm_bytes", "dram_bytes", "nvme_bytes", "blocks", "pins", "reservations", "requests_in_flight", "connections", "hbm_slabs", "dram_slabs")
    HBM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    HBM_SLABS_FIELD_NUMBER: _ClassVar[int]
    DRAM_SLABS_FIELD_NUMBER: _ClassVar[int]
    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    blocks: int
    pins: int
    reservations: int
    requests_in_flight: int
    connections: int
    hbm_slabs: int
    dram_slabs: int
    def __init__(self, hbm_bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., pins: _Optional[int] = ..., reservations: _Optional[int] = ..., requests_in_flight: _Optional[int] = ..., connections: _Optional[int] = ..., hbm_slabs: _Optional[int] = ..., dram_slabs: _Optional[int] = ...) -> None: ...

class Quotas(_message.Message):
    __slots__ = ("version", "default", "tenants")
    class TenantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TenantQuota
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TenantQuota, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    default: TenantQuota
    tenants: _containers.MessageMap[str, TenantQuota]
    def __init__(self, version: _Optional[int] = ..., default: _Optional[_Union[TenantQuota, _Mapping]] = ..., tenants: _Optional[_Mapping[str, TenantQuota]] = ...) -> None: ...

class QuotaOrigins(_message.Message):
    __slots__ = ("operator", "file")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    operator: _containers.RepeatedScalarFieldContainer[str]
    file: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, operator: _Optional[_Iterable[str]] = ..., file: _Optional[_Iterable[str]] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "hbm_bytes", "dram_bytes", "nvme_bytes", "blocks", "requests_in_flight", "connections", "hbm_slabs", "dram_slabs")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HBM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    HBM_SLABS_FIELD_NUMBER: _ClassVar[int]
    DRAM_SLABS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    blocks: int
    requests_in_flight: int
    connections: int
    hbm_slabs: int
    dram_slabs: int
    def __init__(self, tenant: _Optional[str] = ..., hbm_bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., requests_in_flight: _Optional[int] = ..., connections: _Optional[int] = ..., hbm_slabs: _Optional[int] = ..., dram_slabs: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("node_id", "registration_epoch", "master_epoch", "heartbeat_interval_s", "catalog", "ticket_key", "quotas", "known_blocks", "retired", "removal_horizon", "is_new")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_HORIZON_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    registration_epoch: int
    master_epoch: int
    heartbeat_interval_s: float
    catalog: str
    ticket_key: TicketKey
    quotas: Quotas
    known_blocks: int
    retired: RetiredNamespaces
    removal_horizon: int
    is_new: bool
    def __init__(self, node_id: _Optional[int] = ..., registration_epoch: _Optional[int] = ..., master_epoch: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., catalog: _Optional[str] = ..., ticket_key: _Optional[_Union[TicketKey, _Mapping]] = ..., quotas: _Optional[_Union[Quotas, _Mapping]] = ..., known_blocks: _Optional[int] = ..., retired: _Optional[_Union[RetiredNamespaces, _Mapping]] = ..., removal_horizon: _Optional[int] = ..., is_new: bool = ...) -> None: ...

class RetiredNamespaces(_message.Message):
    __slots__ = ("version", "tenants")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantRetiredNamespaces]
    def __init__(self, version: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantRetiredNamespaces, _Mapping]]] = ...) -> None: ...

class TenantRetiredNamespaces(_message.Message):
    __slots__ = ("tenant", "namespaces")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., namespaces: _Optional[_Iterable[str]] = ...) -> None: ...

class TicketKey(_message.Message):
    __slots__ = ("key_id", "secret", "age_ms")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    key_id: int
    secret: bytes
    age_ms: int
    def __init__(self, key_id: _Optional[int] = ..., secret: _Optional[bytes] = ..., age_ms: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "registration_epoch", "tiers", "counters", "topology", "transfer", "rates", "quotas_version", "tenants", "hot", "links", "retired_version", "reads", "slow", "reuse", "stopped")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    registration_epoch: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    counters: _containers.ScalarMap[str, int]
    topology: bytes
    transfer: bytes
    rates: _containers.RepeatedCompositeFieldContainer[PeerRate]
    quotas_version: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    hot: _containers.RepeatedCompositeFieldContainer[HotBlocks]
    links: _containers.RepeatedCompositeFieldContainer[LinkFlow]
    retired_version: int
    reads: _containers.RepeatedCompositeFieldContainer[NamespaceReads]
    slow: SlowTable
    reuse: ReuseReport
    stopped: bool
    def __init__(self, node_id: _Optional[int] = ..., registration_epoch: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., topology: _Optional[bytes] = ..., transfer: _Optional[bytes] = ..., rates: _Optional[_Iterable[_Union[PeerRate, _Mapping]]] = ..., quotas_version: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ..., hot: _Optional[_Iterable[_Union[HotBlocks, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkFlow, _Mapping]]] = ..., retired_version: _Optional[int] = ..., reads: _Optional[_Iterable[_Union[NamespaceReads, _Mapping]]] = ..., slow: _Optional[_Union[SlowTable, _Mapping]] = ..., reuse: _Optional[_Union[ReuseReport, _Mapping]] = ..., stopped: bool = ...) -> None: ...

class ReuseReport(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantReuse]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantReuse, _Mapping]]] = ...) -> None: ...

class TenantReuse(_message.Message):
    __slots__ = ("tenant", "statistics")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    statistics: bytes
    def __init__(self, tenant: _Optional[str] = ..., statistics: _Optional[bytes] = ...) -> None: ...

class SlowTable(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SlowRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SlowRequest, _Mapping]]] = ...) -> None: ...

class NamespaceReads(_message.Message):
    __slots__ = ("tenant", "namespace", "age_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    age_s: float
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class LinkFlow(_message.Message):
    __slots__ = ("device", "in_bytes", "out_bytes", "transfer_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    IN_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    in_bytes: int
    out_bytes: int
    transfer_bytes: int
    def __init__(self, device: _Optional[str] = ..., in_bytes: _Optional[int] = ..., out_bytes: _Optional[int] = ..., transfer_bytes: _Optional[int] = ...) -> None: ...

class HotBlocks(_message.Message):
    __slots__ = ("tenant", "keys", "reads_per_s", "remote_reads_per_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    READS_PER_S_FIELD_NUMBER: _ClassVar[int]
    REMOTE_READS_PER_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    reads_per_s: _containers.RepeatedScalarFieldContainer[float]
    remote_reads_per_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., reads_per_s: _Optional[_Iterable[float]] = ..., remote_reads_per_s: _Optional[_Iterable[float]] = ...) -> None: ...

class PeerRate(_message.Message):
    __slots__ = ("node_id", "bytes_per_s", "basis_bytes", "age_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BASIS_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    bytes_per_s: float
    basis_bytes: int
    age_s: float
    def __init__(self, node_id: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., basis_bytes: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("master_epoch", "quotas", "hot_blocks", "retired", "reuse")
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    HOT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    master_epoch: int
    quotas: Quotas
    hot_blocks: int
    retired: RetiredNamespaces
    reuse: ReuseReport
    def __init__(self, master_epoch: _Optional[int] = ..., quotas: _Optional[_Union[Quotas, _Mapping]] = ..., hot_blocks: _Optional[int] = ..., retired: _Optional[_Union[RetiredNamespaces, _Mapping]] = ..., reuse: _Optional[_Union[ReuseReport, _Mapping]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "name", "host_id", "unix", "tcp", "state", "registration_epoch", "heartbeat_age_s", "blocks", "tiers", "counters", "version", "transports", "rates", "drain", "http", "tenants")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    name: str
    host_id: str
    unix: str
    tcp: str
    state: str
    registration_epoch: int
    heartbeat_age_s: float
    blocks: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    counters: _containers.ScalarMap[str, int]
    version: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    rates: _containers.RepeatedCompositeFieldContainer[PeerRate]
    drain: DrainStatus
    http: str
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    def __init__(self, node_id: _Optional[int] = ..., name: _Optional[str] = ..., host_id: _Optional[str] = ..., unix: _Optional[str] = ..., tcp: _Optional[str] = ..., state: _Optional[str] = ..., registration_epoch: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., version: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., rates: _Optional[_Iterable[_Union[PeerRate, _Mapping]]] = ..., drain: _Optional[_Union[DrainStatus, _Mapping]] = ..., http: _Optional[str] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ...) -> None: ...

class DrainStatus(_message.Message):
    __slots__ = ("to", "is_done", "remaining_blocks", "nvme_only_blocks", "copying_blocks", "lacks_space")
    TO_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_ONLY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPYING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LACKS_SPACE_FIELD_NUMBER: _ClassVar[int]
    to: str
    is_done: bool
    remaining_blocks: int
    nvme_only_blocks: int
    copying_blocks: int
    lacks_space: bool
    def __init__(self, to: _Optional[str] = ..., is_done: bool = ..., remaining_blocks: _Optional[int] = ..., nvme_only_blocks: _Optional[int] = ..., copying_blocks: _Optional[int] = ..., lacks_space: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "epoch", "uptime_s", "catalog", "catalog_health", "blocks", "reserved", "pinned", "rss_bytes", "nodes", "counters", "name", "role", "owner", "records", "http", "quotas", "grants", "shards", "quota_origins", "partitions", "owners", "expirations")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class QuotaOriginsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: QuotaOrigins
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[QuotaOrigins, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    CATALOG_HEALTH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_ORIGINS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    EXPIRATIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    uptime_s: float
    catalog: str
    catalog_health: str
    blocks: int
    reserved: int
    pinned: int
    rss_bytes: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    counters: _containers.ScalarMap[str, int]
    name: str
    role: str
    owner: CatalogOwner
    records: int
    http: str
    quotas: Quotas
    grants: _containers.RepeatedCompositeFieldContainer[TenantGrants]
    shards: int
    quota_origins: _containers.MessageMap[str, QuotaOrigins]
    partitions: int
    owners: _containers.RepeatedCompositeFieldContainer[CatalogOwner]
    expirations: _containers.RepeatedCompositeFieldContainer[Expiration]
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., catalog: _Optional[str] = ..., catalog_health: _Optional[str] = ..., blocks: _Optional[int] = ..., reserved: _Optional[int] = ..., pinned: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., owner: _Optional[_Union[CatalogOwner, _Mapping]] = ..., records: _Optional[int] = ..., http: _Optional[str] = ..., quotas: _Optional[_Union[Quotas, _Mapping]] = ..., grants: _Optional[_Iterable[_Union[TenantGrants, _Mapping]]] = ..., shards: _Optional[int] = ..., quota_origins: _Optional[_Mapping[str, QuotaOrigins]] = ..., partitions: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[CatalogOwner, _Mapping]]] = ..., expirations: _Optional[_Iterable[_Union[Expiration, _Mapping]]] = ...) -> None: ...

class Expiration(_message.Message):
    __slots__ = ("what", "left_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    left_s: float
    def __init__(self, what: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class TenantGrants(_message.Message):
    __slots__ = ("tenant", "pins", "reservations", "requests_in_flight", "connections")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    pins: int
    reservations: int
    requests_in_flight: int
    connections: int
    def __init__(self, tenant: _Optional[str] = ..., pins: _Optional[int] = ..., reservations: _Optional[int] = ..., requests_in_flight: _Optional[int] = ..., connections: _Optional[int] = ...) -> None: ...

class CatalogOwner(_message.Message):
    __slots__ = ("name", "address", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class TopologiesRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class NodeTopology(_message.Message):
    __slots__ = ("name", "state", "topology", "links", "links_age_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    topology: bytes
    links: _containers.RepeatedCompositeFieldContainer[LinkFlow]
    links_age_s: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., topology: _Optional[bytes] = ..., links: _Optional[_Iterable[_Union[LinkFlow, _Mapping]]] = ..., links_age_s: _Optional[float] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "to", "cancel")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    node: str
    to: str
    cancel: bool
    def __init__(self, node: _Optional[str] = ..., to: _Optional[str] = ..., cancel: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "limits", "unlimited")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: _containers.ScalarMap[str, int]
    unlimited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Mapping[str, int]] = ..., unlimited: _Optional[_Iterable[str]] = ...) -> None: ...

class SetQuotaReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearQuotaRequest(_message.Message):
    __slots__ = ("tenant", "names")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class ClearQuotaReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("tenant", "namespace", "any_namespace", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ANY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    any_namespace: bool
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., any_namespace: bool = ..., limit: _Optional[int] = ...) -> None: ...

class ListKeysReply(_message.Message):
    __slots__ = ("keys", "sizes", "namespaces")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., sizes: _Optional[_Iterable[int]] = ..., namespaces: _Optional[_Iterable[str]] = ...) -> None: ...

class ContentsRequest(_message.Message):
    __slots__ = ("tenant", "namespace", "max_segments", "hottest")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    max_segments: int
    hottest: bool
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., max_segments: _Optional[int] = ..., hottest: bool = ...) -> None: ...

class StorageUsage(_message.Message):
    __slots__ = ("blocks", "bytes", "hbm_bytes", "dram_bytes", "nvme_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HBM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., hbm_bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ...) -> None: ...

class NamespaceUsage(_message.Message):
    __slots__ = ("tenant", "namespace", "stored", "pinned", "read_age_s", "model", "weights", "users", "is_used", "is_retired", "layout")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    READ_AGE_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    IS_USED_FIELD_NUMBER: _ClassVar[int]
    IS_RETIRED_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    stored: StorageUsage
    pinned: int
    read_age_s: float
    model: str
    weights: str
    users: _containers.RepeatedScalarFieldContainer[str]
    is_used: bool
    is_retired: bool
    layout: str
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., stored: _Optional[_Union[StorageUsage, _Mapping]] = ..., pinned: _Optional[int] = ..., read_age_s: _Optional[float] = ..., model: _Optional[str] = ..., weights: _Optional[str] = ..., users: _Optional[_Iterable[str]] = ..., is_used: bool = ..., is_retired: bool = ..., layout: _Optional[str] = ...) -> None: ...

class PrefixSegment(_message.Message):
    __slots__ = ("parent", "key", "stored", "subtree_bytes", "branches", "reads_per_s", "subtree_reads_per_s")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    SUBTREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    READS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SUBTREE_READS_PER_S_FIELD_NUMBER: _ClassVar[int]
    parent: int
    key: bytes
    stored: StorageUsage
    subtree_bytes: int
    branches: int
    reads_per_s: float
    subtree_reads_per_s: float
    def __init__(self, parent: _Optional[int] = ..., key: _Optional[bytes] = ..., stored: _Optional[_Union[StorageUsage, _Mapping]] = ..., subtree_bytes: _Optional[int] = ..., branches: _Optional[int] = ..., reads_per_s: _Optional[float] = ..., subtree_reads_per_s: _Optional[float] = ...) -> None: ...

class ContentsReply(_message.Message):
    __slots__ = ("namespaces", "segments")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceUsage]
    segments: _containers.RepeatedCompositeFieldContainer[PrefixSegment]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceUsage, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[PrefixSegment, _Mapping]]] = ...) -> None: ...

class WeightsReport(_message.Message):
    __slots__ = ("tenant", "engine", "base", "version", "namespaces", "ends")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    engine: str
    base: str
    version: str
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceForm]
    ends: bool
    def __init__(self, tenant: _Optional[str] = ..., engine: _Optional[str] = ..., base: _Optional[str] = ..., version: _Optional[str] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceForm, _Mapping]]] = ..., ends: bool = ...) -> None: ...

class NamespaceForm(_message.Message):
    __slots__ = ("id", "form")
    ID_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    form: bytes
    def __init__(self, id: _Optional[bytes] = ..., form: _Optional[bytes] = ...) -> None: ...

class WeightsReply(_message.Message):
    __slots__ = ("report_interval_s",)
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    report_interval_s: float
    def __init__(self, report_interval_s: _Optional[float] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class WeightsVersion(_message.Message):
    __slots__ = ("tenant", "base", "version", "adapter", "salt", "users", "is_used", "is_retired", "used_age_s", "namespaces", "is_durable")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    IS_USED_FIELD_NUMBER: _ClassVar[int]
    IS_RETIRED_FIELD_NUMBER: _ClassVar[int]
    USED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    base: str
    version: str
    adapter: str
    salt: str
    users: _containers.RepeatedScalarFieldContainer[str]
    is_used: bool
    is_retired: bool
    used_age_s: float
    namespaces: int
    is_durable: bool
    def __init__(self, tenant: _Optional[str] = ..., base: _Optional[str] = ..., version: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., users: _Optional[_Iterable[str]] = ..., is_used: bool = ..., is_retired: bool = ..., used_age_s: _Optional[float] = ..., namespaces: _Optional[int] = ..., is_durable: bool = ...) -> None: ...

class KnownNamespace(_message.Message):
    __slots__ = ("tenant", "form")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    form: NamespaceForm
    def __init__(self, tenant: _Optional[str] = ..., form: _Optional[_Union[NamespaceForm, _Mapping]] = ...) -> None: ...

class WeightsTable(_message.Message):
    __slots__ = ("versions", "namespaces")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[WeightsVersion]
    namespaces: _containers.RepeatedCompositeFieldContainer[KnownNamespace]
    def __init__(self, versions: _Optional[_Iterable[_Union[WeightsVersion, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[KnownNamespace, _Mapping]]] = ...) -> None: ...

class RetireWeightsRequest(_message.Message):
    __slots__ = ("tenant", "base", "version")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    base: str
    version: str
    def __init__(self, tenant: _Optional[str] = ..., base: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class RetireWeightsReply(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: int
    def __init__(self, versions: _Optional[int] = ...) -> None: ...

class PinNamespaceRequest(_message.Message):
    __slots__ = ("tenant", "namespace", "pinned")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    pinned: bool
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class PinNamespaceReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class RemoveNamespaceRequest(_message.Message):
    __slots__ = ("tenant", "namespace")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class RemoveNamespaceReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("number", "time_s", "master", "kind", "actor", "credential", "peer", "via", "action", "target", "old", "new", "result", "detail", "count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    time_s: float
    master: str
    kind: str
    actor: str
    credential: str
    peer: str
    via: str
    action: str
    target: str
    old: str
    new: str
    result: str
    detail: str
    count: int
    def __init__(self, number: _Optional[int] = ..., time_s: _Optional[float] = ..., master: _Optional[str] = ..., kind: _Optional[str] = ..., actor: _Optional[str] = ..., credential: _Optional[str] = ..., peer: _Optional[str] = ..., via: _Optional[str] = ..., action: _Optional[str] = ..., target: _Optional[str] = ..., old: _Optional[str] = ..., new: _Optional[str] = ..., result: _Optional[str] = ..., detail: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class AuditEntries(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ...) -> None: ...

class RecordAuditReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("id", "kind", "name", "role", "credential", "peer", "age_s", "requests", "master")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    name: str
    role: str
    credential: str
    peer: str
    age_s: float
    requests: int
    master: str
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., credential: _Optional[str] = ..., peer: _Optional[str] = ..., age_s: _Optional[float] = ..., requests: _Optional[int] = ..., master: _Optional[str] = ...) -> None: ...

class SessionTable(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenStatus(_message.Message):
    __slots__ = ("kind", "name", "role", "credential", "expires_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    role: str
    credential: str
    expires_s: float
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., credential: _Optional[str] = ..., expires_s: _Optional[float] = ...) -> None: ...

class TokenTable(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenStatus]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenStatus, _Mapping]]] = ...) -> None: ...

class SlowRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlowRequest(_message.Message):
    __slots__ = ("tenant", "operation", "duration_us", "time_s", "at", "peer")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    operation: str
    duration_us: int
    time_s: float
    at: str
    peer: str
    def __init__(self, tenant: _Optional[str] = ..., operation: _Optional[str] = ..., duration_us: _Optional[int] = ..., time_s: _Optional[float] = ..., at: _Optional[str] = ..., peer: _Optional[str] = ...) -> None: ...

class SlowRequestsReply(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SlowRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SlowRequest, _Mapping]]] = ...) -> None: ...

class PrefillSample(_message.Message):
    __slots__ = ("input_tokens", "prefix_tokens", "duration_s")
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    input_tokens: int
    prefix_tokens: int
    duration_s: float
    def __init__(self, input_tokens: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class DecodeSample(_message.Message):
    __slots__ = ("batch", "context_tokens", "duration_s")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    batch: int
    context_tokens: int
    duration_s: float
    def __init__(self, batch: _Optional[int] = ..., context_tokens: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("name", "role", "address", "node", "queue_s", "send_backlog_bytes", "send_bytes_per_s", "batch", "context_tokens", "capacity_tokens", "seen_request_ids", "prefill_samples", "decode_samples", "seen_after_s", "engine_cache")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    SEND_BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEND_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DECODE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEEN_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CACHE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    address: str
    node: str
    queue_s: float
    send_backlog_bytes: int
    send_bytes_per_s: float
    batch: int
    context_tokens: int
    capacity_tokens: int
    seen_request_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_samples: _containers.RepeatedCompositeFieldContainer[PrefillSample]
    decode_samples: _containers.RepeatedCompositeFieldContainer[DecodeSample]
    seen_after_s: float
    engine_cache: EngineCache
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., queue_s: _Optional[float] = ..., send_backlog_bytes: _Optional[int] = ..., send_bytes_per_s: _Optional[float] = ..., batch: _Optional[int] = ..., context_tokens: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., seen_request_ids: _Optional[_Iterable[int]] = ..., prefill_samples: _Optional[_Iterable[_Union[PrefillSample, _Mapping]]] = ..., decode_samples: _Optional[_Iterable[_Union[DecodeSample, _Mapping]]] = ..., seen_after_s: _Optional[float] = ..., engine_cache: _Optional[_Union[EngineCache, _Mapping]] = ...) -> None: ...

class EngineCache(_message.Message):
    __slots__ = ("tenant", "version", "base_version", "key_bytes", "added", "removed")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    version: int
    base_version: int
    key_bytes: int
    added: bytes
    removed: bytes
    def __init__(self, tenant: _Optional[str] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., key_bytes: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("report_interval_s", "engine_cache_version")
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CACHE_VERSION_FIELD_NUMBER: _ClassVar[int]
    report_interval_s: float
    engine_cache_version: int
    def __init__(self, report_interval_s: _Optional[float] = ..., engine_cache_version: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("tenant", "keys", "block_tokens", "input_tokens", "output_tokens", "ttft_slo_s", "tbt_slo_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    block_tokens: int
    input_tokens: int
    output_tokens: int
    ttft_slo_s: float
    tbt_slo_s: float
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., block_tokens: _Optional[int] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ttft_slo_s: _Optional[float] = ..., tbt_slo_s: _Optional[float] = ...) -> None: ...

class ScheduleReply(_message.Message):
    __slots__ = ("request_id", "prefill", "decode", "prefill_address", "decode_address", "prefix_blocks", "transfer_from", "transfer_blocks", "transfer_s", "queue_s", "prefill_s", "tbt_s", "rejected", "rejected_value", "rejected_limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FROM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TBT_S_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_VALUE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prefill: str
    decode: str
    prefill_address: str
    decode_address: str
    prefix_blocks: int
    transfer_from: str
    transfer_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    tbt_s: float
    rejected: str
    rejected_value: float
    rejected_limit: float
    def __init__(self, request_id: _Optional[int] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., prefill_address: _Optional[str] = ..., decode_address: _Optional[str] = ..., prefix_blocks: _Optional[int] = ..., transfer_from: _Optional[str] = ..., transfer_blocks: _Optional[int] = ..., transfer_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., tbt_s: _Optional[float] = ..., rejected: _Optional[str] = ..., rejected_value: _Optional[float] = ..., rejected_limit: _Optional[float] = ...) -> None: ...

class InstancesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("report", "report_age_s", "unseen_requests", "unseen_s", "scheduled", "engine_blocks")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    report: ReportRequest
    report_age_s: float
    unseen_requests: int
    unseen_s: float
    scheduled: int
    engine_blocks: int
    def __init__(self, report: _Optional[_Union[ReportRequest, _Mapping]] = ..., report_age_s: _Optional[float] = ..., unseen_requests: _Optional[int] = ..., unseen_s: _Optional[float] = ..., scheduled: _Optional[int] = ..., engine_blocks: _Optional[int] = ...) -> None: ...

class InstancesReply(_message.Message):
    __slots__ = ("dispatcher", "instances", "counters", "estimators")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DISPATCHER_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATORS_FIELD_NUMBER: _ClassVar[int]
    dispatcher: str
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    counters: _containers.ScalarMap[str, int]
    estimators: str
    def __init__(self, dispatcher: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., estimators: _Optional[str] = ...) -> None: ...
