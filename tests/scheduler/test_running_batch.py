"""scheduler/running_batch.py: many steps at once equal the same steps one by one, with members leaving in between."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.scheduler.running_batch import RunningBatch

Step = tuple[str, int, int]
steps = st.lists(st.tuples(st.sampled_from(["join", "leave", "advance"]), st.integers(1, 20), st.integers(1, 9)), max_size=60)


@given(steps)
def test_it_agrees_with_a_count_of_every_token(steps: list[Step]) -> None:
    batch: RunningBatch[int] = RunningBatch()
    naive: dict[int, list[Any]] = {}
    """[context, steps left] of each member."""
    for number, (what, context, count) in enumerate(steps):
        if what == "join":
            batch.join(number, context_tokens=context, steps=count)
            naive[number] = [context, count]
        elif what == "leave" and naive:
            member = list(naive)[context % len(naive)]
            assert batch.leave(member) == naive.pop(member)[1]
        elif naive:
            for _ in range(min(count, batch.steps_to_next_end)):
                for sequence in naive.values():
                    sequence[0], sequence[1] = sequence[0] + 1, sequence[1] - 1
            ended = [member for member, (_, left) in naive.items() if not left]
            assert batch.advance(min(count, batch.steps_to_next_end)) == ended
            for member in ended:
                del naive[member]
        batch.check_integrity()
        assert batch.members() == list(naive)
        assert batch.context_tokens == sum(context for context, _ in naive.values())
        assert batch.longest_steps == max((left for _, left in naive.values()), default=0)
