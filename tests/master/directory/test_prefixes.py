"""Tests of prefix queries (index/queries.py) through a directory; a naive count is the oracle."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.master.blocks import TENANT, Event, Master, S

KEYS = [b"%d" % number for number in range(8)]


def test_what_a_dead_node_has_is_not_counted() -> None:
    master = Master()
    a, b = master.register("a", 1), master.register("b", 2)
    master.sync(a, *(Event(key) for key in KEYS))
    master.sync(b, *(Event(key) for key in KEYS[:3]))
    master.directory.disconnected(a.node_id, a.epoch, S)
    assert master.directory.queries.prefixes(TENANT, KEYS).blocks == {b.node_id: 3}


def test_block_bytes_are_the_mean_of_the_longest_run() -> None:
    master = Master()
    node = master.register("a")
    master.sync(node, Event(b"0", size=100), Event(b"1", size=300), Event(b"3", size=5000))
    assert master.directory.queries.prefixes(TENANT, KEYS).block_bytes == 200


@settings(max_examples=100)
@given(st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=5), st.lists(st.integers(0, 9), max_size=12))
def test_any_holders_of_any_prompt_are_counted_as_naively(held: list[set[int]], prompt: list[int]) -> None:
    master = Master()
    nodes = [master.register(f"n{number}", number + 1) for number in range(len(held))]
    for node, numbers in zip(nodes, held, strict=True):
        master.sync(node, *(Event(b"%d" % number) for number in sorted(numbers)))
    runs = {}
    for node, numbers in zip(nodes, held, strict=True):
        run = next((at for at, number in enumerate(prompt) if number not in numbers), len(prompt))
        if run:
            runs[node.node_id] = run
    assert master.directory.queries.prefixes(TENANT, [b"%d" % number for number in prompt]).blocks == runs
