"""What every message of the hot path is: a type number and a form (fields in wire order), from which its codec is made.

A batch that is too large for one message is cut by the sender. Control (registration, heartbeats, status, listing) is gRPC:
control.proto. docs/protocol.md is the byte-for-byte description.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol, Self

from kvstore.protocol.frames import OLDEST_VERSION
from kvstore.protocol.wire import Form

Ints = Sequence[int]

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
MAX_TENANT_USES: Final = 256
"""Tenants of whose use a node tells its master with each heartbeat: those that take most."""
MAX_RATES: Final = 32
"""Measured rates that a node tells its master of: more than it fetches from at a time, and 1 MB in all for a status of 1,000 nodes."""


class Packable(Protocol):
    """What can be sent: bytes under a type number."""

    TYPE: ClassVar[int]
    SINCE: ClassVar[int]

    def pack(self) -> bytes: ...

    def pack_for(self, version: int) -> bytes: ...


class Message:
    """A body with fields in the order of FORM, whose kinds `wire.Form` explains."""

    __slots__ = ()
    TYPE: ClassVar[int]
    FORM: ClassVar[tuple[tuple[str, str], ...]] = ()
    SINCE: ClassVar[int] = OLDEST_VERSION
    """The protocol version in which the form became what it is. A form grows at its end only, by fields that have defaults."""
    FORMER_COLUMNS: ClassVar[tuple[tuple[int, int], ...]] = ()
    """The versions in which the form grew, ascending to SINCE, each with the number of columns before; none where it has not changed since
    OLDEST_VERSION."""
    _form: ClassVar[Form]
    _former: ClassVar[tuple[tuple[int, Form], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._form = Form(cls.FORM, tuple(cls.__annotations__))
        cls._former = tuple((version, cls._first(count)) for version, count in cls.FORMER_COLUMNS)

    @classmethod
    def _first(cls, count: int) -> Form:
        """The form of the first so many columns."""
        columns = cls.FORM[:count]
        names = {name for name, _kind in columns}
        return Form(columns, tuple(name for name in cls.__annotations__ if name in names))

    @classmethod
    def _form_of(cls, version: int) -> Form:
        for grown, form in cls._former:
            if version < grown:
                return form
        return cls._form

    def pack(self) -> bytes:
        return self._form.pack(self)

    def pack_for(self, version: int) -> bytes:
        """As `pack`, in the form that a peer of this version knows."""
        return (self._form_of(version) if self._former else self._form).pack(self)

    @classmethod
    def unpack(cls, body: bytes | bytearray | memoryview) -> Self:
        """Raises ProtocolError unless `body` has exactly this message's form."""
        return cls(*cls._form.unpack(body))

    @classmethod
    def unpack_of(cls, version: int, body: bytes | bytearray | memoryview) -> Self:
        """As `unpack`, of a frame of this version; fields that it does not know have their defaults."""
        if not cls._former:
            return cls.unpack(body)
        return cls(*cls._form_of(version).unpack(body))

    @classmethod
    def pack_one(cls, *row: Any) -> bytes | None:
        """The body of a message about one block, without the message: a value of each column, in wire order. None: it has to be made the
        usual way, which says what is wrong. For forms of a batch (`BatchOfOne`)."""
        assert cls._form.of_one is not None
        return cls._form.of_one.pack_row(list(row))

    @classmethod
    def unpack_one(cls, body: bytes | bytearray | memoryview) -> list[Any] | None:
        """What `pack_one` was given. None: it is about several blocks, or wrong: `unpack` tells."""
        assert cls._form.of_one is not None
        return cls._form.of_one.unpack_row(body)
