"""Side streams of arrays.py; the tests of GPUs need one."""

import pytest
import torch

from kvstore.client.tensors.arrays import mark, on_side_stream
from tests.devices import needs_cuda


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_on_the_cpu_copies_are_made_where_they_stand(device: torch.device | None) -> None:
    marked = mark(device)
    assert marked is None
    with on_side_stream(device, marked):
        copied = torch.ones(2).clone()
    assert copied.tolist() == [1, 1]


@needs_cuda
@pytest.mark.gpu
def test_copies_wait_for_the_marked_event_only() -> None:
    device = torch.device("cuda", 0)
    source = torch.zeros(1 << 22, device=device)
    torch.cuda._sleep(50_000_000)
    source.fill_(7)
    marked = mark(device)
    engine = torch.cuda.current_stream(device)
    torch.cuda._sleep(2_000_000_000)
    with on_side_stream(device, marked):
        host = source.to("cpu", non_blocking=True)
        side = torch.cuda.current_stream(device)
    assert side != engine
    assert (host == 7).all()
    assert not engine.query(), "the engine is at its own work still"
    with on_side_stream(device, mark(device)):
        assert torch.cuda.current_stream(device) == side, "a thread keeps its stream"
