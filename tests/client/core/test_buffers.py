"""Values and destinations that are accepted, and their bytes."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.core.buffers import as_destination, as_parts, as_source, as_sources
from kvstore.protocol.errors import InvalidArgument
from tests.devices import keep_busy, needs_cuda


def kind(value: object) -> str:
    """A name for a case that is the same in every run."""
    return type(value).__name__


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
def test_as_source_refuses_non_buffers(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        as_source(value)


@pytest.mark.parametrize("buffer", [b"ab", memoryview(b"ab"), bytearray(), np.zeros((2, 3)).T, "x", torch.ones(2, 2).t()], ids=kind)
def test_a_destination_must_be_writable_contiguous_and_not_empty(buffer: Any) -> None:
    with pytest.raises(InvalidArgument):
        as_destination(buffer)


def test_torch_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert bytes(as_source(b"abc")) == b"abc"
    with pytest.raises(InvalidArgument):
        as_source(object())


@needs_cuda
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


@needs_cuda
@pytest.mark.gpu
def test_cuda_tensors_are_parts_beside_memory_of_the_host() -> None:
    tensors, buffer = [torch.zeros(4, dtype=torch.uint8, device="cuda") for _ in range(2)], bytearray(2)
    destination = as_destination([tensors[0], buffer, tensors[1]])
    for part, value in zip(destination.parts, (b"abcd", b"ef", b"ghij"), strict=True):
        part[:] = value
    assert destination.finish is not None
    destination.finish()
    assert b"".join(as_parts([tensors[0], buffer, tensors[1]])) == b"abcdefghij"


@needs_cuda
@pytest.mark.gpu
def test_cuda_rows_are_values_after_their_kernels() -> None:
    """Of one tensor, copied at once; computed late, on a stream of the caller's own."""
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = torch.zeros(3, 4, dtype=torch.int16, device="cuda")
        keep_busy()
        rows += torch.arange(12, dtype=torch.int16, device="cuda").view(3, 4)
        sources = as_sources(rows)
    assert sources.flat is not None
    assert [b"".join(parts) for parts in sources] == [np.arange(at, at + 4, dtype=np.int16).tobytes() for at in (0, 4, 8)]


@needs_cuda
@pytest.mark.gpu
def test_inference_tensors_are_filled() -> None:
    with torch.inference_mode():
        target = torch.zeros(4, dtype=torch.uint8, device="cuda")
    destination = as_destination(target)
    destination.parts[0][:] = b"abcd"
    assert destination.finish is not None
    destination.finish()
    assert bytes(as_source(target)) == b"abcd"
