"""Configuration of a put in Mooncake's terms, and its meaning here."""

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any, Final

from kvstore.engines.mooncake.arguments import boolean, list_of, text, unsigned


class SoftPinAction(Enum):
    """Effect of a put on the soft pin of its object. None here: the eviction policy learns which objects are read again."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """Kind of an object, for Mooncake's statistics."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _member(kind: type[Enum]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r:.50} is no {kind.__name__}")
        return value

    return convert


_CONVERSIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "replica_num": unsigned,
    "nof_replica_num": unsigned,
    "dfs_replica_num": unsigned,
    "soft_pin_action": _member(SoftPinAction),
    "soft_pin_ttl_ms": _optional(unsigned),
    "with_hard_pin": boolean,
    "preferred_segments": list_of(text),
    "preferred_nof_segments": list_of(text),
    "preferred_segment": text,
    "prefer_alloc_in_same_node": boolean,
    "data_type": _member(ObjectDataType),
    "group_ids": _optional(list_of(text)),
}


class ReplicateConfig:
    """Wishes of a put. `with_hard_pin` keeps the object from eviction. All others are checked and change nothing: the store itself decides
    where a value lies and how many copies it has. A field that does not fit its type raises TypeError, as in the original.
    """

    __slots__ = tuple(_CONVERSIONS)
    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    with_hard_pin: bool
    preferred_segments: list[str]
    preferred_nof_segments: list[str]
    preferred_segment: str
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType
    group_ids: list[str] | None

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms = None
        self.with_hard_pin = False
        self.preferred_segments = []
        self.preferred_nof_segments = []
        self.preferred_segment = ""
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids = None

    def __setattr__(self, name: str, value: Any) -> None:
        convert = _CONVERSIONS.get(name)
        object.__setattr__(self, name, value if convert is None else convert(value))

    def __str__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name in _CONVERSIONS)
        return f"ReplicateConfig({fields})"


def is_sound(config: ReplicateConfig, count: int) -> bool:
    """Return whether Mooncake takes the configuration for `count` objects: a replica at least, a time only with the soft pin that it is of,
    and as many groups as objects."""
    if not config.replica_num or (config.soft_pin_ttl_ms is not None and config.soft_pin_action is not SoftPinAction.ENABLE):
        return False
    return config.group_ids is None or len(config.group_ids) == count


def has_segments(config: ReplicateConfig) -> bool:
    """Return whether the preferred segments are as many as the replicas: calls that publish tensors refuse others."""
    return not config.preferred_segments or len(config.preferred_segments) == config.replica_num


def replicate_config(value: Any) -> ReplicateConfig:
    """Conversion of an argument."""
    if not isinstance(value, ReplicateConfig):
        raise TypeError(f"{value!r:.50} is no ReplicateConfig")
    return value
