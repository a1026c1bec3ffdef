"""Tables of facts by name, and the element types that they name.

Element types of caches and weights by name, and their sizes. Names only: torch and numpy have their own of the same name.

How named facts are looked up, in a table or in a JSON file of one's own: for named.py and gpus.py. It knows no fact itself.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from kvstore.protocol.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element, by the name that torch has for its type."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        InvalidArgument: it is none of DTYPE_BYTES (the message lists them).
    """
    try:
        return DTYPE_BYTES[dtype]
    except (KeyError, TypeError):
        raise InvalidArgument(f"dtype is {dtype!r}: take one of {', '.join(DTYPE_BYTES)}") from None


F = TypeVar("F", bound="DataclassInstance")


def find_facts(name: str, table: Mapping[str, F], kind: type[F], *, noun: str, other_files: str = "") -> F:
    """table[`name`], whatever the case of its letters, or what the file `name` describes if it ends in .json: an object with the fields of
    the dataclass `kind`. `other_files`: what else the caller reads, for the message.

    Raises:
        ConfigError: there is none of this name (the message lists those there are), or the file is not such an object.
    """
    if is_file_name(name):
        return facts_of(read_object(Path(name), noun=noun), kind, what=f"the {noun} in {name}")
    for known, facts in table.items():
        if known.lower() == name.lower():
            return facts
    files = " or ".join(filter(None, [other_files, f"a .json file with the fields of {kind.__name__}"]))
    raise ConfigError(f"no {noun} is named {name!r}: take one of {', '.join(table)}, or {files}")


def is_file_name(name: str) -> bool:
    """Whether `name` names a file, not facts of the table."""
    return name.lower().endswith(".json")


def read_object(path: Path, *, noun: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError if it cannot be read or is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the {noun} in {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the {noun} in {path} must be a JSON object")
    return found


def facts_of(found: Mapping[str, Any], kind: type[F], *, what: str) -> F:
    """The dataclass `kind` with the fields that `found` has; a field that is a dataclass is an object in its turn.

    Raises:
        ConfigError: a field is missing, unknown or of the wrong type; the message begins with `what`.
    """
    known = {field.name: field for field in fields(kind)}
    missing = [name for name, field in known.items() if field.default is MISSING and name not in found]
    unknown = [name for name in found if name not in known]
    if missing or unknown:
        raise ConfigError(f"{what}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{name: _checked(value, known[name].type, f"{name} of {what}") for name, value in found.items()})


def _checked(value: Any, wanted: Any, what: str) -> Any:
    """`value` if it is of the type `wanted`; a whole number will do for a float, true and false are no numbers."""
    if isinstance(wanted, UnionType):
        if value is None:
            return None
        wanted = get_args(wanted)[0]
    if is_dataclass(wanted) and isinstance(wanted, type) and isinstance(value, dict):
        return facts_of(value, wanted, what=what)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{what} must be of type {wanted.__name__}, not {value!r}")
    return value


def check_above_zero(facts: "DataclassInstance", *, may_be_zero: frozenset[str] = frozenset()) -> None:
    """Raises ConfigError unless all numbers of `facts` are finite and above 0; those named may be 0."""
    for field in fields(facts):
        value = getattr(facts, field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            lowest_is_in = field.name in may_be_zero
            if not (0 < value < float("inf") or (lowest_is_in and value == 0)):
                raise ConfigError(f"{field.name} is {value}: it must be {'0 or more' if lowest_is_in else 'above 0'}, and finite")
