"""Promises of transceiver.py: every way and any two layouts, and arguments that are checked."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.handover.transceiver import check_regions
from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import Cancelled, Closed, InvalidArgument, KVStoreError, ProtocolError
from kvstore.protocol.settings import Size
from kvstore.transfer.memory.region import Region
from tests.forks import told_by_child
from tests.handover.scene import EVERY_WAY, SPEC, Executor, executor, gathered, layout_of, make_consistent, outcomes

LAYOUT = layout_of(pool_blocks=8, order="vllm-flash")
QUANTISED = dataclasses.replace(SPEC, scheme=CacheScheme.parse("int8"))
LATENT = CacheSpec(layers=4, kv_heads=1, heads=8, head_dim=24, dtype="float16", attention=Attention.MLA)
LARGE_BLOCKS = dataclasses.replace(SPEC, block_tokens=64)
LAYOUTS: dict[str, tuple[CacheLayout, CacheLayout]] = {
    "the same": (layout_of(), layout_of()),
    "tp2 pp2 to tp1": (layout_of(tp=2, pp=2), layout_of()),
    "tp2 pp2 to tp4, NHD": (layout_of(tp=2, pp=2), layout_of(tp=4, order="NHD")),
    "NHD to HND, a region a layer": (layout_of(order="NHD"), layout_of(order="vllm-flash-hnd")),
    "blocks of 16 to 64": (layout_of(), layout_of(LARGE_BLOCKS, tp=2)),
    "blocks of 64 to 16": (layout_of(LARGE_BLOCKS, tp=2), layout_of()),
    "quantised": (layout_of(QUANTISED, tp=4), layout_of(QUANTISED, tp=2)),
    "latent, with spare senders": (layout_of(LATENT, tp=2), layout_of(LATENT)),
    "more ranks than heads": (layout_of(tp=8), layout_of(tp=2)),
    "context-parallel": (layout_of(cp=2), layout_of(pp=2)),
    "groups": (layout_of(tp=2, dp=2), layout_of()),
}


def region(size_bytes: int) -> Region:
    return Region(memoryview(bytearray(size_bytes)))


def test_the_regions_are_as_many_and_as_large_as_the_layouts() -> None:
    sizes = [LAYOUT.region_bytes(0, number) for number in range(LAYOUT.region_count(0))]
    check_regions(LAYOUT, 0, [region(size + 1) for size in sizes])
    for wrong in ([], [region(size) for size in sizes[1:]], [region(size - 1) for size in sizes]):
        with pytest.raises(InvalidArgument, match="the pool of rank 0 has 4 regions"):
            check_regions(LAYOUT, 0, wrong)
    with pytest.raises(InvalidArgument, match="rank 1"):
        check_regions(LAYOUT, 1, [])


def blocks_of(layout: CacheLayout, tokens: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).permutation(layout.pool_blocks)[: -(-tokens // layout.spec.block_tokens)].tolist()
    return found


def hand_over(source: Executor, destination: Executor, *, tokens: int = 150, first_token: int = 0, request_id: bytes = b"r") -> None:
    """All of it, and every byte of both pools checked."""
    source.fill(1)
    make_consistent(source)
    destination.fill(2)
    ours, theirs = blocks_of(source.layout, tokens, 3), blocks_of(destination.layout, tokens, 4)
    untouched = blocks_of(destination.layout, 10**6, 4)[len(theirs) :]
    size = destination.layout.spec.block_tokens
    before = gathered(destination, untouched, len(untouched) * size)
    # Attention-DP: a request is one group's alone.
    givers = [rank for rank in source.ranks if source.layout.parallel.group_of(rank.rank) == 0]
    wanted = destination.receive(request_id, theirs, tokens, source, first_token=first_token)
    given = [rank.transceiver.send(request_id, ours, tokens=tokens) for rank in givers]
    for sending in given:
        sending.all_ready()
    for handover in [*given, *wanted]:
        handover.wait()
    expected = gathered(source, ours, tokens, ranks=[rank.rank for rank in givers])
    assert np.array_equal(gathered(destination, theirs, tokens)[:, :, :, first_token:], expected[:, :, :, first_token:])
    assert np.array_equal(gathered(destination, untouched, len(untouched) * size), before)
    assert sum(sending.sent_bytes for sending in given) == sum(receiving.received_bytes for receiving in wanted)
    assert [rank.outcome_of(request_id) for rank in [*givers, *destination.ranks]] == [None] * (len(givers) + len(destination.ranks))


@EVERY_WAY
@pytest.mark.parametrize("layouts", ["tp2 pp2 to tp1", "tp2 pp2 to tp4, NHD"])
def test_every_way_moves_every_byte(way: str, layouts: str) -> None:
    ours, theirs = LAYOUTS[layouts]
    with executor(ours, way) as source, executor(theirs, way) as destination:
        hand_over(source, destination)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_any_two_layouts_of_one_model_can_be_handed_over(layouts: str) -> None:
    ours, theirs = LAYOUTS[layouts]
    way = "push" if len(layouts) % 2 else "push-gathered"
    with executor(ours, way) as source, executor(theirs, way) as destination:
        hand_over(source, destination)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Executor, Executor]]:
    """TP 2 to TP 1, over TCP, for tests that leave both as they were."""
    with executor(layout_of(tp=2), "push") as source, executor(layout_of(), "push") as destination:
        yield source, destination


def test_receiver_with_everything_notifies_the_sender(pair: tuple[Executor, Executor]) -> None:
    hand_over(*pair, first_token=150, request_id=b"nothing")


def test_both_executors_may_give_and_take_at_once(pair: tuple[Executor, Executor]) -> None:
    one, other = pair
    given = [*one.send(b"there", [0, 1], 32), *other.send(b"back", [0, 1], 32)]
    wanted = [*other.receive(b"there", [2, 3], 32, one), *one.receive(b"back", [2, 3], 32, other)]
    for sending in given:
        sending.all_ready()
    for handover in [*given, *wanted]:
        handover.wait()
    assert np.array_equal(gathered(one, [0, 1], 32), gathered(other, [2, 3], 32))
    assert np.array_equal(gathered(one, [2, 3], 32), gathered(other, [0, 1], 32))
    for request_id in (b"there", b"back"):
        assert outcomes(pair, request_id) == [None, None, None]


def test_layers_go_while_later_ones_are_computed() -> None:
    settings = {"min_layer_batch_bytes": Size(0)}
    with executor(layout_of(pp=2), "push", **settings) as source, executor(layout_of(), "push") as destination:
        source.fill(1)
        wanted = destination.receive(b"r", [5, 6], 32, source)
        given = source.send(b"r", [1, 2], 32)
        given[0].layer_ready(0)
        given[1].layer_ready(3)
        given[1].layer_ready(1)  # another rank's
        half = source.layout.spec.block_bytes * 2 // 4
        source.until(lambda: [sending.sent_bytes for sending in given] == [half, half])
        assert not any(handover.is_over for handover in [*given, *wanted])
        for sending in given:
            sending.all_ready()
        for handover in [*given, *wanted]:
            handover.wait()
        assert [sending.overlap_bytes for sending in given] == [half, half]
        assert [sending.sent_bytes for sending in given] == [2 * half, 2 * half]
        assert np.array_equal(gathered(source, [1, 2], 32), gathered(destination, [5, 6], 32))


def test_shared_memory_receiver_reads_and_maps_read_only() -> None:
    with executor(layout_of(), "pull", way="auto") as source, executor(layout_of(), "pull", way="auto") as destination:
        hand_over(source, destination)
        [peer] = destination.ranks[0].engine_peers()
        assert {path.transport for path, state in peer.chooser.states.items() if state.delivered_bytes} == {"shm"}
        assert source.ranks[0].engine_peers() == []


# --- mistakes ---
def test_engines_that_disagree_about_the_model_both_hear_of_it() -> None:
    other = dataclasses.replace(SPEC, model="that")
    with Executor(layout_of(dataclasses.replace(SPEC, model="this"))) as source, Executor(layout_of(other)) as destination:
        [sending] = source.send(b"r", [0], 16)
        [receiving] = destination.receive(b"r", [0], 16, source)
        with pytest.raises(InvalidArgument, match="cache of this, the receiver of that"):
            receiving.wait()
        sending.cancel()  # it was never asked: what cannot be mapped is not asked for


def test_different_lengths_fail_both_sides_in_either_order() -> None:
    with Executor(layout_of()) as source, Executor(layout_of()) as destination:
        [receiving] = destination.receive(b"asked first", [0, 1], 20, source)
        [sending] = source.send(b"asked first", [0, 1], 21)
        for handover in (sending, receiving):
            with pytest.raises(InvalidArgument, match="21 tokens of this request, the receiver requests 20"):
                handover.wait()
        [sending] = source.send(b"sent first", [0, 1], 21)
        [receiving] = destination.receive(b"sent first", [0, 1], 20, source)
        for handover in (receiving, sending):
            with pytest.raises(InvalidArgument, match="21 tokens of this request, the receiver requests 20"):
                handover.wait()
        hand_over(source, destination)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"request_id": b""}, "1 to 255 bytes"),
        ({"request_id": bytes(256)}, "1 to 255 bytes"),
        ({"request_id": "r"}, "1 to 255 bytes"),
        ({"tokens": 17}, "1 blocks of 16 tokens for a sequence of 17"),
        ({"tokens": 0}, "a sequence of 0 tokens"),
        ({"blocks": [32]}, "0 to 31"),
        ({"blocks": [-1]}, "0 to 31"),
        ({"deadline_s": 0}, "more than 0"),
        ({"deadline_s": 3601}, "at most 3600"),
        ({"deadline_s": float("nan")}, "at most 3600"),
    ],
)
def test_arguments_out_of_range_are_refused(pair: tuple[Executor, Executor], arguments: dict[str, Any], complaint: str) -> None:
    right: dict[str, Any] = {"request_id": b"wrong", "blocks": [0], "tokens": 16}
    with pytest.raises(InvalidArgument, match=complaint):
        pair[0].ranks[0].transceiver.send(**{**right, **arguments})
    with pytest.raises(InvalidArgument, match=complaint):
        pair[0].ranks[0].transceiver.receive(**{**right, **arguments}, source=pair[0].counterpart(pair[1]))


def test_error_while_beginning_ends_that_request_only(pair: tuple[Executor, Executor]) -> None:
    nobody: Any = 5
    first, second = pair[0].ranks[0].transceiver, pair[1].ranks[0].transceiver
    receiving = second.receive(b"mistaken", [1], tokens=16, source=nobody)
    with pytest.raises(KVStoreError, match="internal error: AttributeError"):
        receiving.wait()
    assert receiving.is_fenced
    asking = pair[1].receive(b"to nobody", [1], 16, pair[0])
    pair[0].until(lambda: first.early_request_count > 0)
    part_sender = first.send(b"to nobody", [1], tokens=16, to=nobody)
    for handover in (part_sender, *asking):
        with pytest.raises(KVStoreError, match="internal error: AttributeError"):
            handover.wait()
    hand_over(*pair, request_id=b"after the mistakes")


def test_a_request_that_is_under_way_is_not_begun_again(pair: tuple[Executor, Executor]) -> None:
    sendings = pair[0].send(b"twice", [0], 16)
    with pytest.raises(InvalidArgument, match="under way already"):
        pair[0].send(b"twice", [0], 16)
    for sending in sendings:
        sending.cancel()
    assert all(isinstance(error, Cancelled) for error in outcomes(pair[:1], b"twice"))


def test_descriptions_that_are_not_one_executors_are_refused() -> None:
    with Executor(layout_of(tp=2)) as one, Executor(layout_of()) as other:
        transceiver = other.ranks[0].transceiver
        for wrong in ([], one.descriptions[:1], one.descriptions + one.descriptions[:1], [one.descriptions[0], other.descriptions[0]]):
            with pytest.raises(InvalidArgument):
                transceiver.connect(wrong)
        with pytest.raises(ProtocolError):
            transceiver.connect([b"nonsense"])
        with pytest.raises(InvalidArgument, match="rank 0 of these descriptions is not this one"):
            transceiver.join(one.descriptions)


def test_close_ends_requests_and_accepts_no_more() -> None:
    with Executor(layout_of()) as one, Executor(layout_of()) as other:
        [sending], [receiving] = one.send(b"a", [0], 16), one.receive(b"b", [1], 16, other)
        one.ranks[0].transceiver.close()
        for handover in (sending, receiving):
            assert handover.is_over
            with pytest.raises(Closed):
                handover.wait()
        one.ranks[0].transceiver.close()
        for act in (lambda: one.send(b"c", [0], 16), lambda: one.ranks[0].transceiver.finished()):
            with pytest.raises(Closed):
                act()


@pytest.mark.promise("interrupts-safe")
def test_a_forked_child_is_told_by_name_and_its_end_harms_nobody() -> None:
    with executor(layout_of(), "push") as source, executor(layout_of(), "push") as destination:
        transceiver = source.ranks[0].transceiver
        for call in (lambda: transceiver.send(b"r", [1], tokens=16), lambda: transceiver.join(source.descriptions)):
            assert told_by_child(call) == "Forked"
        assert told_by_child(transceiver.close) == "None"
        hand_over(source, destination)
