"""Promises of server.py: small cases reckoned by hand. A prompt token takes 1 s, a decode step 1/8 s (pressed.py)."""

import pytest

from kvstore.lab.pressure.load import FinishReason, Generation
from kvstore.lab.pressure.server import PressedServer, ServerWork
from tests.lab.pressure.pressed import Asked, dram, serve, server

COMPLETED, REJECTED, EVICTED = FinishReason.COMPLETED, FinishReason.REJECTED, FinishReason.EVICTED
ALL = ("reject", "queue", "evict", "recompute", "offload", "queue+recompute")


def by_number(pressed: PressedServer) -> list[Generation]:
    return sorted(pressed.ended, key=lambda request: request.number)


def expirations(pressed: PressedServer) -> list[FinishReason | None]:
    return [request.ending for request in by_number(pressed)]


def ended_s(pressed: PressedServer) -> list[float]:
    return [request.ended_s for request in by_number(pressed)]


def ttft_s(pressed: PressedServer) -> list[float]:
    return [request.ttft_s for request in by_number(pressed)]


@pytest.mark.parametrize("name", ALL)
def test_server_single_request_takes_prefill_and_steps(name: str) -> None:
    pressed = serve(server(12), name, [Asked(3.0, 8, 5)])
    assert expirations(pressed) == [COMPLETED]
    assert (ttft_s(pressed), ended_s(pressed)) == ([8.0], [11.5])
    assert pressed.work == ServerWork(prefilled_tokens=8, prefill_s=8.0)


@pytest.mark.parametrize("name", ALL)
def test_what_can_never_fit_is_rejected_whatever_the_strategy(name: str) -> None:
    """8 + 5 - 1 tokens are cached before the last one is computed."""
    pressed = serve(server(11), name, [Asked(3.0, 8, 5)])
    assert (expirations(pressed), ended_s(pressed)) == ([REJECTED], [3.0])
    assert pressed.work == ServerWork()


@pytest.mark.parametrize("name", ALL)
def test_server_alternates_prefills_and_steps(name: str) -> None:
    """0-4 prefill of 0; a step to 4.125; 4.125-8.125 prefill of 1; then steps of both."""
    pressed = serve(server(100), name, [Asked(0.0, 4, 3), Asked(1.0, 4, 3)])
    assert ttft_s(pressed) == [4.0, 7.125]
    assert ended_s(pressed) == [8.25, 8.375]
    assert pressed.work == ServerWork(prefilled_tokens=8, prefill_s=8.0)


# Room for 10 tokens; two requests of 6 + 3 - 1 = 8, the second at 1.0, when the first is in its prefill.
BOTH = [Asked(0.0, 6, 3), Asked(1.0, 6, 3)]


def test_reject_turns_the_newcomer_away() -> None:
    pressed = serve(server(10), "reject", BOTH)
    assert expirations(pressed) == [COMPLETED, REJECTED]
    assert ended_s(pressed) == [6.25, 6.125]
    assert pressed.work.prefilled_tokens == 6


def test_server_queue_strategy_waits_for_the_whole_answer() -> None:
    pressed = serve(server(10), "queue", BOTH)
    assert expirations(pressed) == [COMPLETED, COMPLETED]
    assert [request.wait_s for request in by_number(pressed)] == [0.0, 5.25]
    assert (ttft_s(pressed), ended_s(pressed)) == ([6.0, 11.25], [6.25, 12.5])


def test_queue_lets_nobody_overtake() -> None:
    """The third would fit beside the first; it starts after the second, whose last step it delays by 2 s."""
    pressed = serve(server(10), "queue", [*BOTH, Asked(2.0, 2, 1)])
    assert ended_s(pressed) == [6.25, 14.5, 14.375]


def test_evict_kills_the_one_that_came_last() -> None:
    """The first has 2 of its 3 tokens when the second takes its room at 6.125."""
    pressed = serve(server(10), "evict", BOTH)
    assert expirations(pressed) == [EVICTED, COMPLETED]
    assert ended_s(pressed) == [6.125, 12.375]
    assert pressed.work == ServerWork(prefilled_tokens=12, prefill_s=12.0, displacements=1)


def test_server_recompute_repeats_prompt_and_output() -> None:
    """The first loses a cache of 7 at 6.125, and computes 6 + 2 tokens from 12.375 on, which gives its third."""
    pressed = serve(server(10), "recompute", BOTH)
    assert expirations(pressed) == [COMPLETED, COMPLETED]
    assert (ttft_s(pressed), ended_s(pressed)) == ([6.0, 11.125], [20.375, 12.375])
    assert pressed.work == ServerWork(
        prefilled_tokens=20,
        prefill_s=20.0,
        recomputed_tokens=7,
        recompute_s=8.0,
        displacements=1,
    )


def test_offload_moves_the_cache_out_and_back() -> None:
    """70 bytes at 80 a second: out from 6.125 to 7, back from 13.25 to 14.125, and one step for the token that was missing."""
    pressed = serve(server(10, dram(7)), "offload", BOTH)
    assert (ttft_s(pressed), ended_s(pressed)) == ([6.0, 12.0], [14.25, 13.25])
    assert pressed.work == ServerWork(
        prefilled_tokens=12,
        prefill_s=12.0,
        displacements=1,
        offloaded_bytes=70,
        fetched_bytes=70,
        copying_s=1.75,
    )


def test_offload_recomputes_what_no_tier_below_has_room_for() -> None:
    assert serve(server(10, dram(6)), "offload", BOTH).work == serve(server(10), "recompute", BOTH).work


def test_offload_takes_the_first_tier_with_room() -> None:
    pressed = serve(server(10, dram(6), dram(7, bytes_per_s=7.0)), "offload", BOTH)
    assert (pressed.work.offloaded_bytes, pressed.work.copying_s) == (70, 20.0)


def test_server_newcomer_displaces_latest_first() -> None:
    """Two of 3 tokens beside one another; one of 10 comes and takes the room of both. They come back in the order of arrival."""
    pressed = serve(server(12, dram(100)), "offload", [Asked(0.0, 3, 4), Asked(0.0, 3, 4), Asked(5.0, 10, 1)])
    assert pressed.work.displacements == 2
    first, second, third = ended_s(pressed)
    assert third < first < second


def test_server_full_batch_displaces_the_latest() -> None:
    """Two prompts of 4 in room for 10 grow: at 10 tokens the next step takes 2 more, so the second of them leaves with 5 cached."""
    pressed = serve(server(10), "queue+recompute", [Asked(0.0, 4, 5), Asked(0.0, 4, 5)])
    assert expirations(pressed) == [COMPLETED, COMPLETED]
    assert pressed.work.displacements == 1
    assert pressed.work.recomputed_tokens == 4
    # 0-4 prefill, a step; 4.125-8.125 prefill, a step (6 + 5 cached would be 11: the second leaves before it, with its 4 tokens cached).
    assert ended_s(pressed) == [8.5, 13.875]


def test_who_waits_and_displaces_nobody_leaves_a_watermark_free() -> None:
    """In room for 200 the second prompt fits beside the first's 101 tokens, but not with 2 (1 %) left free."""
    close = serve(server(200), "queue+recompute", [Asked(0.0, 100, 3), Asked(0.0, 98, 3)])
    assert [request.wait_s for request in by_number(close)] == [0.0, 100.25]
    beside = serve(server(200), "queue+recompute", [Asked(0.0, 100, 3), Asked(0.0, 97, 3)])
    assert [request.wait_s for request in by_number(beside)] == [0.0, 100.125]
