from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TierStatus(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "quarantined_bytes", "blocks", "hits", "evictions", "demotions", "promotions", "prefaulted_bytes", "health")
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
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., evictions: _Optional[int] = ..., demotions: _Optional[int] = ..., promotions: _Optional[int] = ..., prefaulted_bytes: _Optional[int] = ..., health: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("name", "instance", "version", "host_id", "unix", "tcp", "seen_master_epoch", "tiers", "topology", "transfer")
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
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[int] = ..., version: _Optional[str] = ..., host_id: _Optional[str] = ..., unix: _Optional[str] = ..., tcp: _Optional[str] = ..., seen_master_epoch: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., topology: _Optional[bytes] = ..., transfer: _Optional[bytes] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("node_id", "registration_epoch", "master_epoch", "heartbeat_interval_s", "tenant_token_sha256")
    class TenantTokenSha256Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_TOKEN_SHA256_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    registration_epoch: int
    master_epoch: int
    heartbeat_interval_s: float
    tenant_token_sha256: _containers.ScalarMap[str, bytes]
    def __init__(self, node_id: _Optional[int] = ..., registration_epoch: _Optional[int] = ..., master_epoch: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., tenant_token_sha256: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "registration_epoch", "tiers", "counters", "topology", "transfer")
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
    node_id: int
    registration_epoch: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    counters: _containers.ScalarMap[str, int]
    topology: bytes
    transfer: bytes
    def __init__(self, node_id: _Optional[int] = ..., registration_epoch: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., topology: _Optional[bytes] = ..., transfer: _Optional[bytes] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("master_epoch",)
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    master_epoch: int
    def __init__(self, master_epoch: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "name", "host_id", "unix", "tcp", "state", "registration_epoch", "heartbeat_age_s", "blocks", "tiers", "counters", "version", "transports")
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
    def __init__(self, node_id: _Optional[int] = ..., name: _Optional[str] = ..., host_id: _Optional[str] = ..., unix: _Optional[str] = ..., tcp: _Optional[str] = ..., state: _Optional[str] = ..., registration_epoch: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., version: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "epoch", "uptime_s", "catalog", "catalog_health", "blocks", "reserved", "pinned", "rss_bytes", "nodes", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
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
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., catalog: _Optional[str] = ..., catalog_health: _Optional[str] = ..., blocks: _Optional[int] = ..., reserved: _Optional[int] = ..., pinned: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TopologiesRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class NodeTopology(_message.Message):
    __slots__ = ("name", "state", "topology")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    topology: bytes
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., topology: _Optional[bytes] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("tenant", "token", "namespace", "any_namespace", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ANY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    token: str
    namespace: str
    any_namespace: bool
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., token: _Optional[str] = ..., namespace: _Optional[str] = ..., any_namespace: _Optional[bool] = ..., limit: _Optional[int] = ...) -> None: ...

class ListKeysReply(_message.Message):
    __slots__ = ("keys", "sizes", "namespaces")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., sizes: _Optional[_Iterable[int]] = ..., namespaces: _Optional[_Iterable[str]] = ...) -> None: ...
