"""Argument types of Mooncake's calls: conversions that accept and reject the same objects as Mooncake's binding.

A parameter's annotation names its conversion. Numbers of any integer type become `int`, sequences become lists, and
other objects raise TypeError before the call begins. The module also has the configuration of a put.
"""

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, Any, Final, TypeVar

from kvstore.protocol.retention import MAX_RETENTION_S, Retention

UNSIGNED_LIMIT: Final = 1 << 64
SIGNED_LIMIT: Final = 1 << 31
Convert = Callable[[Any], Any]
Class = TypeVar("Class", bound=type)


def text(value: Any) -> str:
    """Return a string. Bytes that are not UTF-8 are restored by `encoded`."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise TypeError("a string with surrogates") from None
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="surrogateescape")
    raise _unfit(value, "a string")


def encoded(value: str) -> bytes:
    """Return the bytes that the caller passed as text or bytes."""
    return value.encode(errors="surrogateescape")


def integer(value: Any) -> int:
    """Return a signed number of 32 bits."""
    return _integer(value, -SIGNED_LIMIT, SIGNED_LIMIT)


def unsigned(value: Any) -> int:
    """Return an address or a size."""
    return _integer(value, 0, UNSIGNED_LIMIT)


def boolean(value: Any) -> bool:
    """Return the truth value of None and of objects that define `__bool__`, such as numbers. Strings and lists do
    not."""
    if value is None or hasattr(type(value), "__bool__"):
        return bool(value)
    raise _unfit(value, "a bool")


def buffer(value: Any) -> Any:
    """Return an object with the buffer protocol."""
    memoryview(value).release()
    return value


def part(value: Any) -> memoryview:
    """Return one part of a value, a 1-D view of bytes. Raises RuntimeError for other elements, as Mooncake does."""
    view = memoryview(value)
    if view.ndim != 1 or view.itemsize != 1:
        raise RuntimeError("parts must be 1-D bytes-like")
    return view


def optional(convert: Convert) -> Convert:
    """Return the conversion of a value that may be None."""
    return lambda value: None if value is None else convert(value)


def instance_of(kind: type) -> Convert:
    """Return the conversion that passes objects of this class unchanged."""

    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _unfit(value, f"a {kind.__name__}")
        return value

    return convert


def list_of(item: Convert) -> Convert:
    """Return the conversion of a sequence, item by item."""
    return lambda value: [item(one) for one in sequence(value)]


def sequence(value: Any) -> Any:
    """Return a sequence unchanged. Rejects strings, bytes, dictionaries, sets and iterators."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(type(value), "__getitem__"):
        raise _unfit(value, "a list")
    return value


def unsigned_list(value: Any) -> list[int]:
    """Return addresses or sizes. A list of plain integers, which engines pass, is returned unchanged."""
    if type(value) is list and value and all(type(one) is int for one in value) and min(value) >= 0 and max(value) < UNSIGNED_LIMIT:
        return value
    return [unsigned(one) for one in sequence(value)]


Text = Annotated[str, text]
Texts = Annotated[Sequence[str], list_of(text)]
TextLists = Annotated[Sequence[Sequence[str]], list_of(list_of(text))]
Integer = Annotated[int, integer]
Flag = Annotated[bool, boolean]
Number = Annotated[int, unsigned]
Numbers = Annotated[Sequence[int], unsigned_list]
NumberLists = Annotated[Sequence[Sequence[int]], list_of(unsigned_list)]
NumberListLists = Annotated[Sequence[Sequence[Sequence[int]]], list_of(list_of(unsigned_list))]
Buffer = Annotated[Any, buffer]
Buffers = Annotated[Sequence[Any], list_of(buffer)]
Part = Annotated[Any, part]
PlainList = Annotated[Sequence[Any], instance_of(list)]


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with arguments converted by their annotations. A call raises TypeError for an argument
    that cannot be converted."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    conversions = {item.name: _conversion(hints.get(item.name)) for item in parameters}
    in_order = [conversions[item.name] for item in parameters if item.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    rest = next((conversions[item.name] for item in parameters if item.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if not any(conversions.values()):
        return function
    count = len(in_order)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            arguments = [convert(value) if convert else value for convert, value in zip(in_order, given, strict=False)]
            arguments += [rest(value) if rest else value for value in given[count:]]
            for name, value in named.items():
                convert = conversions.get(name)
                if convert is not None:
                    named[name] = convert(value)
        except TypeError as error:
            raise TypeError(f"{function.__name__}(): incompatible argument: {error}") from None
        return function(*arguments, **named)

    return call


def arguments_converted(kind: Class) -> Class:
    """Class decorator: convert the arguments of all public methods, inherited ones included."""
    for name in dir(kind):
        method = getattr(kind, name)
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(kind, name, converted(method))
    return kind


def _conversion(hint: Any) -> Convert | None:
    found = next((item for item in getattr(hint, "__metadata__", ()) if callable(item)), None)
    return typing.cast("Convert | None", found)


def _integer(value: Any, start: int, end: int) -> int:
    if type(value) is not int:
        if isinstance(value, float | str):
            raise _unfit(value, "an integer")
        try:
            number = operator.index(value)
        except TypeError:
            raise _unfit(value, "an integer") from None
    else:
        number = value
    if not start <= number < end:
        raise TypeError(f"{number} is not in [{start}, {end})")
    return number


def _unfit(value: Any, wanted: str) -> TypeError:
    return TypeError(f"{value!r:.50} is not {wanted}")


SOFT_PIN_PRIORITY: Final = 90
"""Retention priority of an object with a soft pin."""
SOFT_PIN_TTL_S: Final = 30 * 60.0
"""Mooncake's `default_kv_soft_pin_ttl`, for soft pins without a TTL of their own."""


class SoftPinAction(Enum):
    """Effect of a put on the object's soft pin. ENABLE gives the object a retention hint; the others give none."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """Kind of an object in Mooncake's statistics. Ignored."""

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


_CONVERSIONS: Final[dict[str, Convert]] = {
    "replica_num": unsigned,
    "nof_replica_num": unsigned,
    "dfs_replica_num": unsigned,
    "soft_pin_action": instance_of(SoftPinAction),
    "soft_pin_ttl_ms": optional(unsigned),
    "with_hard_pin": boolean,
    "preferred_segments": list_of(text),
    "preferred_nof_segments": list_of(text),
    "preferred_segment": text,
    "prefer_alloc_in_same_node": boolean,
    "data_type": instance_of(ObjectDataType),
    "group_ids": optional(list_of(text)),
}


@dataclass(slots=True, eq=False)
class ReplicateConfig:
    """Options of a put. `with_hard_pin` keeps the object from eviction, a soft pin lets it be evicted after others.

    All other options are validated and ignored: the store decides placement and number of copies. A field of another
    type raises TypeError, as in Mooncake.
    """

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segments: list[str] = field(default_factory=list)
    preferred_nof_segments: list[str] = field(default_factory=list)
    preferred_segment: str = ""
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        convert = _CONVERSIONS.get(name)
        object.__setattr__(self, name, value if convert is None else convert(value))

    @property
    def with_soft_pin(self) -> bool:
        """Whether the put enables a soft pin; the name of older releases of Mooncake."""
        return self.soft_pin_action is SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None:
        if boolean(value):
            self.soft_pin_action = SoftPinAction.ENABLE
        elif self.with_soft_pin:
            self.soft_pin_action = SoftPinAction.PRESERVE

    def retention(self) -> Retention | None:
        """Return the hint for the objects of a put: that of an enabled soft pin, which ends with its TTL. None: no
        hint."""
        ttl_s = SOFT_PIN_TTL_S if self.soft_pin_ttl_ms is None else min(self.soft_pin_ttl_ms / 1000, MAX_RETENTION_S)
        return Retention(SOFT_PIN_PRIORITY, ttl_s) if self.with_soft_pin and ttl_s else None


def is_sound(config: ReplicateConfig, count: int) -> bool:
    """Return whether Mooncake accepts the configuration for `count` objects: at least one replica, a TTL only with
    an enabled soft pin, and as many groups as objects."""
    if not config.replica_num or (config.soft_pin_ttl_ms is not None and config.soft_pin_action is not SoftPinAction.ENABLE):
        return False
    return config.group_ids is None or len(config.group_ids) == count


def has_segments(config: ReplicateConfig) -> bool:
    """Return whether there are as many preferred segments as replicas, or none: calls that publish tensors require
    it."""
    return not config.preferred_segments or len(config.preferred_segments) == config.replica_num
