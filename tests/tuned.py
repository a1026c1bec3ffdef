"""Settings whose constants a test chooses: shorter time limits, smaller bounds."""

import dataclasses
from typing import Any, TypeVar, overload

S = TypeVar("S")


@overload
def tuned(kind: type[S], **values: Any) -> S: ...
@overload
def tuned(kind: S, **values: Any) -> S: ...
def tuned(kind: Any, **values: Any) -> Any:
    """Make settings of `kind`, or as others but for these values. A value may be that of a constant of the class."""
    if not isinstance(kind, type):
        given = {field.name: getattr(kind, field.name) for field in dataclasses.fields(kind)}
        return tuned(type(kind), **(given | values))
    settings = {field.name for field in dataclasses.fields(kind)}
    constants = {name: value for name, value in values.items() if name not in settings}
    assert all(hasattr(kind, name) for name in constants), constants
    made = type(kind.__name__, (kind,), {"__slots__": (), **constants})
    return made(**{name: value for name, value in values.items() if name in settings})
