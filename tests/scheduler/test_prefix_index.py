"""The index counts what a walk through each instance's own set counts."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.scheduler.prefix_index import PrefixIndex, leading_blocks

BLOCKS = st.integers(0, 11)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 4), st.lists(BLOCKS, max_size=12)), max_size=12)


@given(steps=STEPS, prompt=st.lists(BLOCKS, max_size=12))
def test_a_match_is_the_leading_run_of_each_instances_set(steps: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    sets: list[set[int]] = [set() for _ in range(5)]
    for step, instance, blocks in steps:
        if step == "add":
            index.add(instance, blocks)
            sets[instance].update(blocks)
        else:
            index.remove(instance, blocks)
            sets[instance].difference_update(blocks)
    expected = [next((n for n, block in enumerate(prompt) if block not in held), len(prompt)) for held in sets]
    assert index.match(prompt, 5) == expected
    assert len(index) == len(set().union(*sets))


def test_nothing_is_read_beyond_the_longest_run() -> None:
    holders = iter([0b11, 0b01, 0, 0b11])
    assert leading_blocks(holders, 2) == [2, 1]
    assert next(holders) == 0b11
