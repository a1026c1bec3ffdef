"""What a caller says of an object that it puts, in Mooncake's terms, and what of it means something here."""

from enum import Enum, IntEnum
from typing import Any, Final

MAX_TTL_MS: Final = (1 << 64) - 1


class SoftPinAction(Enum):
    """What a put does to the soft pin of its object. Here there are none: the eviction policy learns what comes back."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """What an object is, for Mooncake's statistics."""

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


class ReplicateConfig:
    """The wishes of a put. `with_hard_pin` keeps the object from eviction. All others are taken and change nothing: where a value lies, and
    how many copies of it there are, is the store's own affair.
    """

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.with_hard_pin = False
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.preferred_segment = ""
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: list[str] | None = None
        self._soft_pin_ttl_ms: int | None = None

    @property
    def soft_pin_ttl_ms(self) -> int | None:
        """How long a soft pin lasts; None: as the master has it."""
        return self._soft_pin_ttl_ms

    @soft_pin_ttl_ms.setter
    def soft_pin_ttl_ms(self, value: Any) -> None:
        """Raises TypeError, as the original does, for what is no unsigned number of 64 bits."""
        if value is not None and not (isinstance(value, int) and 0 <= value <= MAX_TTL_MS):
            raise TypeError(f"soft_pin_ttl_ms is a number of milliseconds or None, not {value!r:.50}")
        self._soft_pin_ttl_ms = value

    def is_sound(self, count: int) -> bool:
        """Whether it can be said of `count` objects: a time for a soft pin that is not asked for is refused by Mooncake, and so are groups
        for another number of objects."""
        if self._soft_pin_ttl_ms is not None and self.soft_pin_action is not SoftPinAction.ENABLE:
            return False
        return self.group_ids is None or len(self.group_ids) == count

    def __str__(self) -> str:
        fields = ", ".join(f"{name.lstrip('_')}={value}" for name, value in vars(self).items())
        return f"ReplicateConfig({fields})"
