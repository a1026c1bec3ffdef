"""Promises of put_targets.py."""

from kvstore.client.reservations import TARGET_NS, PutTargets


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_target_is_the_last_node_chosen_for_the_size() -> None:
    targets = PutTargets(Clock())
    assert targets.node_id(4096) == 0
    targets.learn([4096, 100], 3)
    targets.learn([4100], 7)
    assert (targets.node_id(4096), targets.node_id(100), targets.node_id(1000)) == (7, 3, 0)


def test_target_ends_after_its_time_however_often_it_is_used() -> None:
    clock = Clock()
    targets = PutTargets(clock)
    targets.learn([4096], 3)
    clock.now_ns = TARGET_NS - 1
    assert targets.node_id(4096) == 3
    clock.now_ns = TARGET_NS
    assert targets.node_id(4096) == 0


def test_forgotten_node_is_no_target_for_any_size() -> None:
    targets = PutTargets(Clock())
    targets.learn([100, 4096], 3)
    targets.learn([60_000], 7)
    targets.forget(3)
    assert (targets.node_id(100), targets.node_id(4096), targets.node_id(60_000)) == (0, 0, 7)
