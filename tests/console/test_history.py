"""Promises of history.py."""

from kvstore.console.history import LATE_SAMPLES, History, SampleRing


def history(*, span_s: float = 10, interval_s: float = 1, node_interval_s: float = 2, max_nodes: int = 2) -> History:
    return History(["x"], ["y"], span_s=span_s, interval_s=interval_s, node_interval_s=node_interval_s, max_nodes=max_nodes)


def xs(found: History, samples: int = 100) -> list[float | None]:
    told: list[float | None] = found.cluster(samples)["series"]["x"]
    return told


def test_ring_keeps_newest_and_marks_missing_values() -> None:
    ring = SampleRing(["a", "b"], 3)
    assert ring.last(5) == {"a": [], "b": []}
    for value in range(5):
        ring.add({"a": value * 1.00001, "other": 1})
    assert ring.last(5) == {"a": [2, 3, 4], "b": [None] * 3}
    assert ring.last(2)["a"] == [3, 4]
    ring.skip(100)
    assert ring.last(5)["a"] == [None] * 3


def test_a_sample_a_look_and_one_of_each_node_less_often() -> None:
    found = history()
    for second in range(6):
        found.add(100.0 + second, {"x": second}, {"n": {"y": second}})
    assert found.cluster(4) == {"interval_s": 1, "series": {"x": [2, 3, 4, 5]}}
    assert found.node("n", 100) == {"interval_s": 2, "series": {"y": [0, 2, 4]}}
    assert found.node("nobody", 100)["series"] == {"y": []}


def test_history_fills_a_late_poll_and_leaves_longer_gaps() -> None:
    found = history()
    found.add(0, {"x": 1}, {"n": {"y": 1}})
    found.add(0.2, {"x": 9}, {})  # not due
    found.add(1 + LATE_SAMPLES, {"x": 2}, {"n": {"y": 2}})
    assert xs(found) == [1, 2, 2, 2]
    found.add(7, {"x": 3}, {"n": {"y": 3}})
    assert xs(found) == [1, 2, 2, 2, None, None, None, 3]
    assert found.node("n", 9)["series"]["y"] == [1, None, 2, None, 3]


def test_history_limits_nodes_and_frees_forgotten_ones() -> None:
    found = history(max_nodes=1)
    found.add(0, {}, {"a": {"y": 1}, "b": {"y": 1}})
    assert (found.node("a", 9)["series"]["y"], found.node("b", 9)["series"]["y"]) == ([1], [])
    found.add(2, {}, {"b": {"y": 2}})
    assert (found.node("a", 9)["series"]["y"], found.node("b", 9)["series"]["y"]) == ([], [2])
