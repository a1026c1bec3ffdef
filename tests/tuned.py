"""Settings whose constants a test chooses: shorter time limits, smaller bounds."""

import dataclasses
from typing import Any, TypeVar

S = TypeVar("S")


def tuned(kind: type[S] | S, **values: Any) -> S:
    """Make settings of `kind`, or as others but for these values. A value may be that of a constant of the class."""
    if not isinstance(kind, type):
        given = {field.name: getattr(kind, field.name) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        return tuned(type(kind), **(given | values))
    settings = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    constants = {name: value for name, value in values.items() if name not in settings}
    assert all(hasattr(kind, name) for name in constants), constants
    made = type(kind.__name__, (kind,), {"__slots__": (), **constants})
    return made(**{name: value for name, value in values.items() if name in settings})
