"""client/reads/inline_values.py: the hash is the value's in any order of slices, and is computed while others are in
flight."""

from itertools import permutations
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.core.effects import GatherEffect, Operation, RunInThreadEffect, SendOneWayEffect
from kvstore.client.memory import Parts
from kvstore.client.reads import inline_values as slices
from kvstore.client.reads.inline_values import STREAM_BYTES, SlicedValue, in_slices
from kvstore.protocol.node_messages import ReleaseLeases

PART = 1 << 15
"""More than what is hashed where it is."""


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", PART)


class Scene:
    """One value of `count` slices, the last one short; slices arrive, and are hashed, when the test says so."""

    def __init__(self, count: int) -> None:
        self.value = bytes(range(256)) * (PART // 256 * count)
        self.value = self.value[: -PART // 2]
        self.buffer = bytearray(len(self.value))
        self.on_the_way: dict[int, int] = {}
        """Offset of a slice to the number of the read that waits for it."""
        self.hashing: dict[int, RunInThreadEffect] = {}
        self.operation = SlicedValue((memoryview(self.buffer),), self._bring).run()
        together = next(self.operation)
        assert isinstance(together, GatherEffect)
        self.reads = together.operations
        for number in range(len(self.reads)):
            self._go_on(number)

    def _bring(self, offset: int, parts: Parts) -> Operation[None]:
        yield SendOneWayEffect(None, ReleaseLeases([offset]))  # type: ignore[arg-type]  # stands for a transfer
        [buffer] = parts
        buffer[:] = self.value[offset : offset + len(buffer)]

    def _go_on(self, read: int) -> None:
        try:
            effect: Any = next(self.reads[read])
        except StopIteration:
            return
        if isinstance(effect, RunInThreadEffect):
            self.hashing[read] = effect
        else:
            self.on_the_way[effect.message.leases[0]] = read

    def arrive(self, offset: int) -> None:
        self._go_on(self.on_the_way.pop(offset))

    def hash(self) -> None:
        [(read, work)] = self.hashing.items()
        del self.hashing[read]
        work.function()
        self._go_on(read)

    def result(self) -> Any:
        with pytest.raises(StopIteration) as end:
            self.operation.send([None, None])
        return end.value.value


@pytest.mark.parametrize("order", list(permutations("abh")))
def test_slices_are_hashed_in_order_one_at_a_time(order: tuple[str, ...]) -> None:
    """For every order of arrival and hashing of the two reads' slices."""
    scene = Scene(5)
    turn = 0
    while scene.on_the_way or scene.hashing:
        assert len(scene.hashing) <= 1
        step = order[turn % 3]
        turn += 1
        if step == "h" and scene.hashing:
            scene.hash()
        elif step == "a" and scene.on_the_way:
            scene.arrive(min(scene.on_the_way))
        elif step == "b" and scene.on_the_way:
            scene.arrive(max(scene.on_the_way))
    assert scene.buffer == scene.value
    assert scene.result() == xxhash.xxh3_64_intdigest(scene.value)


@given(st.lists(st.integers(1, 3 * STREAM_BYTES), max_size=6))
def test_a_streams_slices_are_all_of_it_in_order(sizes: list[int]) -> None:
    whole = memoryview(bytearray(sum(sizes)))
    views, at = [], 0
    for size in sizes:
        views.append(whole[at : at + size])
        at += size
    seen = [0] * len(sizes)
    last = 0
    for parts in in_slices([(view,) for view in views]):
        assert 0 < sum(len(part) for _, part in parts) <= STREAM_BYTES
        for index, part in parts:
            assert index >= last
            last = index
            assert part == views[index][seen[index] : seen[index] + len(part)]
            seen[index] += len(part)
    assert seen == sizes
