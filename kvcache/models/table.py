"""Lookup of facts by name, in a table or in a JSON file, and sizes of named element types.

named.py and gpus.py use it for their tables. Element types are names only: torch and numpy have their own types of
these names.
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
"""Bytes of an element, by torch's name of its type."""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype`.

    Raises:
        InvalidArgument: not in DTYPE_BYTES (the text lists them).
    """
    try:
        return DTYPE_BYTES[dtype]
    except (KeyError, TypeError):
        raise InvalidArgument(f"dtype is {dtype!r}: take one of {', '.join(DTYPE_BYTES)}") from None


F = TypeVar("F", bound="DataclassInstance")


def find_facts(name: str, table: Mapping[str, F], kind: type[F], *, noun: str, other_files: str = "") -> F:
    """Return table[`name`], in any case, or the facts in the file `name` if it ends in .json: an object with the fields
    of `kind`.

    `other_files`: other formats that the caller reads, for the error text.

    Raises:
        ConfigError: an unknown name (the text lists the known ones), or an invalid file.
    """
    if is_file_name(name):
        return facts_of(read_object(Path(name), noun=noun), kind, what=f"the {noun} in {name}")
    for known, facts in table.items():
        if known.lower() == name.lower():
            return facts
    files = " or ".join(filter(None, [other_files, f"a .json file with the fields of {kind.__name__}"]))
    raise ConfigError(f"no {noun} is named {name!r}: take one of {', '.join(table)}, or {files}")


def is_file_name(name: str) -> bool:
    """Return whether `name` is a file, not an entry of the table."""
    return name.lower().endswith(".json")


def read_object(path: Path, *, noun: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError: unreadable, or not an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the {noun} in {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the {noun} in {path} must be a JSON object")
    return found


def facts_of(found: Mapping[str, Any], kind: type[F], *, what: str) -> F:
    """Return the dataclass `kind` with the fields in `found`; a field that is a dataclass is a nested object.

    Raises:
        ConfigError: a field is missing, unknown or of the wrong type; the text begins with `what`.
    """
    known = {field.name: field for field in fields(kind)}
    missing = [name for name, field in known.items() if field.default is MISSING and name not in found]
    unknown = [name for name in found if name not in known]
    if missing or unknown:
        raise ConfigError(f"{what}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{name: _checked(value, known[name].type, f"{name} of {what}") for name, value in found.items()})


def _checked(value: Any, wanted: Any, what: str) -> Any:
    """Return `value` if it has the type `wanted`. Whole numbers are accepted for floats; booleans are no numbers."""
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
    """Raises ConfigError unless all numbers of `facts` are finite and above 0; those in `may_be_zero` may be 0."""
    for field in fields(facts):
        value = getattr(facts, field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            lowest_is_in = field.name in may_be_zero
            if not (0 < value < float("inf") or (lowest_is_in and value == 0)):
                raise ConfigError(f"{field.name} is {value}: it must be {'0 or more' if lowest_is_in else 'above 0'}, and finite")
