"""What a connector did since it was last asked, as plain numbers that add up over ranks and steps."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(slots=True)
class Counters:
    """Sums; seconds are of the threads that did it."""

    lookups: int = 0
    lookup_s: float = 0.0
    hit_blocks: int = 0
    missed_blocks: int = 0
    """Those that the store does not have, or did not say so in time."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    failed_blocks: int = 0
    """Found, but not loaded: gone since, late, or damaged."""
    saved_blocks: int = 0
    """Those that the store had already are not among them."""
    saved_bytes: int = 0
    save_s: float = 0.0
    dropped_blocks: int = 0
    """Not stored: no room in the write-behind memory, or the store did not take them in time."""

    @classmethod
    def of(cls, values: Mapping[str, int | float]) -> Self:
        """What `values` gave."""
        return cls(**values)  # type: ignore[arg-type]

    def values(self) -> dict[str, int | float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, other: "Counters") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def take(self) -> "Counters":
        """All so far; it begins at 0 again."""
        taken = replace(self)
        for field in fields(self):
            setattr(self, field.name, field.default)
        return taken
