"""What is accepted as a value or destination, and what its bytes are."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.buffers import as_destination, as_parts, as_source, fresh_bytes
from kvstore.protocol.errors import InvalidArgument

SOURCES: list[tuple[Any, bytes]] = [
    (b"abc", b"abc"),
    (bytearray(b"abc"), b"abc"),
    (memoryview(b"xabcx")[1:4], b"abc"),
    (memoryview(b"abcd").cast("H"), b"abcd"),
    (np.arange(4, dtype=np.uint8).reshape(2, 2), bytes(range(4))),
    (np.array([1.0], np.float16), b"\x00\x3c"),
    (np.zeros(1, "datetime64[s]"), bytes(8)),
    (np.zeros(2, [("a", "i4")]), bytes(8)),
    (np.array(7, np.uint8), b"\x07"),
    (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), b"\x80\x3f\x00\x40"),
    (torch.tensor(7, dtype=torch.uint8), b"\x07"),
    (torch.nn.Parameter(torch.ones(1)), b"\x00\x00\x80\x3f"),
    (torch.arange(4, dtype=torch.uint8)[1:3], b"\x01\x02"),
]


def kind(value: object) -> str:
    """A name for a case that is the same in every run."""
    return type(value).__name__


@pytest.mark.parametrize(("value", "expected"), SOURCES, ids=kind)
def test_every_contiguous_buffer_is_its_bytes(value: Any, expected: bytes) -> None:
    view = as_source(value)
    assert bytes(view) == expected
    assert (view.format, view.ndim) == ("B", 1)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        12,
        b"",
        np.empty((0, 3)),
        torch.empty(0),
        memoryview(b"abcdef")[::2],
        memoryview(b"abcdef")[:0],
        np.ones((3, 4)).T,
        np.array([None]),
        torch.ones(3, 4).t(),
        torch.ones(3, 4).to_sparse(),
        torch.tensor([1j]).conj(),
    ],
    ids=kind,
)
def test_what_is_no_contiguous_buffer_of_at_least_a_byte_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        as_source(value)


@pytest.mark.parametrize("buffer", [bytearray(2), np.zeros(1, np.float16), torch.zeros(1, dtype=torch.bfloat16), memoryview(bytearray(2))])
def test_a_destination_is_filled_in_place(buffer: Any) -> None:
    destination = as_destination(buffer)
    destination.parts[0][:] = b"\x80\x3f"
    assert bytes(as_source(buffer)) == b"\x80\x3f"
    assert destination.finish is None


@pytest.mark.parametrize("buffer", [b"ab", memoryview(b"ab"), bytearray(), np.zeros((2, 3)).T, "x", torch.ones(2, 2).t()], ids=kind)
def test_a_destination_must_be_writable_contiguous_and_not_empty(buffer: Any) -> None:
    with pytest.raises(InvalidArgument):
        as_destination(buffer)


@pytest.mark.parametrize("size", [1, 2, 4096])
def test_fresh_bytes_are_what_their_view_was_filled_with(size: int) -> None:
    value, view = fresh_bytes(size)
    view[:] = b"z" * size
    assert value == b"z" * size
    assert hash(value) == hash(b"z" * size)
    assert fresh_bytes(size)[0] is not value


def test_torch_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert bytes(as_source(b"abc")) == b"abc"
    with pytest.raises(InvalidArgument):
        as_source(object())


if torch.cuda.is_available():

    @pytest.mark.gpu
    def test_cuda_tensors_are_copied_both_ways() -> None:
        tensor = torch.arange(8, dtype=torch.bfloat16, device="cuda")
        value = bytes(as_source(tensor))
        target = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
        destination = as_destination(target)
        destination.parts[0][:] = value
        assert destination.finish is not None
        destination.finish()
        assert torch.equal(tensor, target)
        with pytest.raises(InvalidArgument):
            as_destination(torch.ones(2, 3, device="cuda").t())

    @pytest.mark.gpu
    def test_cuda_tensors_are_parts_beside_memory_of_the_host() -> None:
        tensors, room = [torch.zeros(4, dtype=torch.uint8, device="cuda") for _ in range(2)], bytearray(2)
        destination = as_destination([tensors[0], room, tensors[1]])
        for part, value in zip(destination.parts, (b"abcd", b"ef", b"ghij"), strict=True):
            part[:] = value
        assert destination.finish is not None
        destination.finish()
        assert b"".join(as_parts([tensors[0], room, tensors[1]])) == b"abcdefghij"
