"""Base of the messages of the hot path: a type number, and fields whose annotations name their kinds on the wire (`wire.Form`).

A batch that is too large for one message is cut by the sender. Control (registration, heartbeats, status, listing) is gRPC:
control.proto. docs/protocol.md is the byte-for-byte description.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, Protocol, Self, TypeVar, cast, dataclass_transform

from kvstore.protocol.wire import Form

Ints = Sequence[int]

U8 = Annotated[int, "u8"]
U32 = Annotated[int, "u32"]
U64 = Annotated[int, "u64"]
Text = Annotated[str, "text"]
Keys = Annotated[list[bytes], "keys"]
Parents = Annotated[list[bytes], "parents"]
Blobs = Annotated[list[bytes], "blobs"]
Labels = Annotated[list[str], "labels"]
Texts = Annotated[list[str], "texts"]
U8s = Annotated[bytes, "u8s"]
U32s = Annotated[Ints, "u32s"]
U64s = Annotated[Ints, "u64s"]
CountedU8s = Annotated[bytes, "count", "u8s"]
CountedU32s = Annotated[Ints, "count", "u32s"]
CountedU64s = Annotated[Ints, "count", "u64s"]
CountedBlobs = Annotated[list[bytes], "count", "blobs"]
"""Kinds of fields. One that is counted begins a batch: its length goes before it."""

GRANTED, PRESENT, BUSY = 0, 1, 2
"""Answers to Reserve and Open: write it; it is already there; another writer holds it, ask again."""

MAX_REPLICAS: Final = 16
"""Nodes that a block can be asked to be at."""
REPLICAS_NOT_YET, REPLICAS_THERE, REPLICAS_NOWHERE, REPLICAS_ABSENT = 0, 1, 2, 3
"""Answers to Replicate: copies are to come; it is at so many nodes; not so many nodes take blocks; there is no such block."""

TIER_BITS: Final = {"hbm": 1, "dram": 2, "nvme": 4}
"""Bits of a tier mask: where a node has copies of a block."""

MAX_LINKS: Final = 64
"""NICs of a host that a node tells of."""
MAX_SLOW: Final = 64
"""Slow requests that a node tells of."""
MAX_TENANT_USES: Final = 256
"""Tenants of whose use a node tells its master with each heartbeat: those that take most."""
MAX_RATES: Final = 32
"""Measured rates that a node tells its master of: more than it fetches from at a time, and 1 MB in all for a status of 1,000 nodes."""


class Packable(Protocol):
    """What can be sent: bytes under a type number."""

    TYPE: ClassVar[int]

    def pack(self) -> bytes: ...


class _FormOnUse:
    """In place of a message's form until it is packed or unpacked: most programs use a few messages, and import all."""

    def __get__(self, message: object, kind: "type[Message]") -> Form:
        kind._form = form = Form(kind.FORM, tuple(kind.__annotations__))
        return form


class Message:
    """A body whose fields are on the wire in the order of WIRE, or in their own."""

    __slots__ = ()
    TYPE: ClassVar[int]
    WIRE: ClassVar[tuple[str, ...]] = ()
    FORM: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Name and kind of each column, in wire order; made by `message`."""
    _form: ClassVar[Form]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(getattr(self, one.name) == getattr(other, one.name) for one in fields(cast(Any, self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{one.name}={getattr(self, one.name)!r}' for one in fields(cast(Any, self)))})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._form = cast(Form, _FormOnUse())

    def pack(self) -> bytes:
        return self._form.pack(self)

    @classmethod
    def unpack(cls, body: bytes | bytearray | memoryview) -> Self:
        """Raises ProtocolError unless `body` has exactly this message's form."""
        return cls(*cls._form.unpack(body))


M = TypeVar("M", bound=type[Message])


@dataclass_transform(field_specifiers=(field,))
def message(kind: M) -> M:
    """Make a message's class a dataclass with slots, and its form of its annotations. Comparison and repr are Message's: compiling them for
    each of sixty classes took a tenth of a client's import."""
    hints = kind.__annotations__
    kind.FORM = tuple((name, column) for name in kind.WIRE or hints for column in hints[name].__metadata__)
    return cast(M, dataclass(slots=True, eq=False, repr=False)(kind))
