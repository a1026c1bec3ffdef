"""Base class of frame messages: a type number, and fields whose annotations give their encoding (`wire.Form`).

Senders split batches that exceed one message. Control (registration, status, listing) is gRPC: control.proto.
docs/protocol.md is the byte-for-byte description.
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
Rest = Annotated[bytes, "rest"]
"""Kinds of fields. A counted one begins a batch: its length precedes it."""

GRANTED, PRESENT, BUSY = 0, 1, 2
"""Statuses of Reserve and OpenSlots: write it; it exists already; another writer has it, retry."""

MAX_REPLICAS: Final = 16
"""Highest replica target."""
REPLICAS_PENDING, REPLICAS_REACHED, REPLICAS_NO_NODES, REPLICAS_NO_BLOCK = 0, 1, 2, 3
"""Statuses of Replicate: copies are pending; the target is reached; too few nodes accept blocks; no such block."""

TIER_BITS: Final = {"hbm": 1, "dram": 2, "nvme": 4}
"""Bits of a tier mask: the tiers in which a node has a block."""

MAX_LINKS: Final = 64
"""NICs in a heartbeat."""
MAX_SLOW: Final = 64
"""Slow requests in a heartbeat."""
MAX_TENANT_USES: Final = 256
"""Tenants in a heartbeat, by memory used."""
MAX_REUSE_TENANTS: Final = 8
"""Tenants in a heartbeat's statistics of reuse: 48 KB."""
MAX_RATES: Final = 32
"""Measured rates in a heartbeat: more than a node's concurrent sources, and 1 MB in all for a status of 1,000 nodes."""


class Packable(Protocol):
    """Anything that has a type number and packs into a body."""

    TYPE: ClassVar[int]

    def pack(self) -> bytes: ...


class _FormOnUse:
    """Lazy form of a message: programs import all messages and use a few."""

    def __get__(self, message: object, kind: "type[Message]") -> Form:
        kind._form = form = Form(kind.FORM, tuple(kind.__annotations__))
        return form


class Message:
    """Message body. Fields are encoded in the order of WIRE, or of their declaration where WIRE is empty."""

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
        """Decode a body. Raises ProtocolError unless it has exactly this message's form."""
        return cls(*cls._form.unpack(body))


M = TypeVar("M", bound=type[Message])


@dataclass_transform(field_specifiers=(field,))
def message(kind: M) -> M:
    """Class decorator: a dataclass with slots, with its form from the annotations.

    Comparison and repr are Message's: generating them for sixty classes took a tenth of a client's import.
    """
    hints = kind.__annotations__
    kind.FORM = tuple((name, column) for name in kind.WIRE or hints for column in hints[name].__metadata__)
    return cast(M, dataclass(slots=True, eq=False, repr=False)(kind))
