"""Messages for the tests of the protocol: any message of a kind, one sample of a kind, and the vectors of this protocol
version.
"""

import json
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from kvstore.protocol.message import Message

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
INTEGERS = {"u8": st.integers(0, 255), "u32": st.integers(0, 2**32 - 1), "u64": st.integers(0, 2**64 - 1)}
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def kinds_of(module: ModuleType) -> list[type[Message]]:
    """The messages that a module defines, by type number."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Message)]
    return sorted((kind for kind in kinds if kind.__module__ == module.__name__ and kind is not Message), key=lambda kind: kind.TYPE)


def said(message: Message) -> tuple[type[Message], list[Any]]:
    """Return a value that is equal for equal messages: a column of integers may be an array, a tuple or a list."""
    values = (getattr(message, name) for name in type(message).__annotations__)
    return type(message), [list(value) if isinstance(value, array | tuple) else value for value in values]


def _column(kind: str, count: int) -> st.SearchStrategy[Any]:
    def exactly(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=count, max_size=count)

    return {
        "keys": exactly(st.binary(min_size=1, max_size=40)),
        "parents": exactly(st.binary(max_size=40)),
        "labels": exactly(TEXT),
        "blobs": exactly(st.binary(max_size=300)),
        "rest": st.binary(max_size=40),
        "u8s": st.binary(min_size=count, max_size=count),
        "u32s": exactly(INTEGERS["u32"]).map(lambda values: array("I", values)),
        "u64s": exactly(INTEGERS["u64"]).map(lambda values: array("Q", values)),
    }[kind]


@st.composite
def messages_of(draw: st.DrawFn, kind: type[Message]) -> Message:
    count = 0
    fields: dict[str, Any] = {}
    for name, column in kind.FORM:
        if column in ("count", "keys"):
            count = draw(st.integers(0, 5))
        if column == "text":
            fields[name] = draw(TEXT)
        elif column == "texts":
            fields[name] = draw(st.lists(TEXT, max_size=4))
        elif column != "count":
            fields[name] = draw(INTEGERS[column] if column in INTEGERS else _column(column, count))
    return kind(**fields)


def sample(kind: type[Message]) -> Message:
    """One message of `kind` with a recognisable value in every field, for the vectors."""
    batch: dict[str, Any] = {
        "keys": [b"key-1", b"key-22"],
        "parents": [b"", b"key-1"],
        "labels": ["one", "two"],
        "blobs": [b"", b"\0\1\2"],
        "u8s": b"\1\0",
        "u32s": array("I", [3, 0x01020304]),
        "u64s": array("Q", [5, 0x0102030405060708]),
    }
    alone = {"u8": 1, "u32": 0x0A0B0C0D, "u64": 0x1112131415161718, "text": "t\u00e9xt", "texts": ["a", "bcd"], "rest": b"rest"}
    return kind(**{name: batch.get(column, alone.get(column)) for name, column in kind.FORM if column != "count"})


def check_vector(kind: type[Message]) -> None:
    """A change of these bytes is a change of the protocol: raise frames.VERSION, then write new vectors."""
    vector = VECTORS["bodies"][kind.__name__]
    assert (kind.TYPE, sample(kind).pack().hex()) == (vector["type"], vector["hex"])
    assert kind.unpack(bytes.fromhex(vector["hex"])) == sample(kind)
