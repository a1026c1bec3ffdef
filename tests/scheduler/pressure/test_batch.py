"""Promises of batch.py."""

from kvstore.scheduler.pressure.batch import Batch, Member
from kvstore.scheduler.pressure.load import Generation


def member(number: int, *, prompt: int = 10, output: int = 5, tokens: int = 1) -> Member:
    return Member(Generation(number, number, 0.0, prompt, output), tokens)


def test_each_step_gives_every_member_a_token_until_it_has_all_of_them() -> None:
    batch, long, short = Batch(), member(0), member(1, prompt=20, output=3)
    batch.join(long)
    batch.join(short)
    assert (len(batch), batch.cached_tokens, batch.full_tokens) == (2, 30, 14 + 22)
    assert batch.step() == []
    assert batch.cached_tokens == 32
    assert batch.step() == [short]
    assert (short.tokens, short.cached_tokens) == (3, 22)
    assert (len(batch), batch.cached_tokens, batch.full_tokens) == (1, 12, 14)
    batch.check_integrity()
    assert [batch.step(), batch.step()] == [[], [long]]
    assert (len(batch), batch.cached_tokens, batch.full_tokens) == (0, 0, 0)


def test_several_end_at_once_in_the_order_of_arrival() -> None:
    batch, late, early = Batch(), member(7, output=2), member(3, output=2)
    batch.join(late)
    batch.join(early)
    assert batch.step() == [early, late]


def test_the_youngest_leaves_with_what_it_has_and_may_come_back() -> None:
    batch, old, young = Batch(), member(1), member(2)
    batch.join(young)
    batch.join(old)
    batch.step()
    assert batch.leave_youngest() is young
    assert (young.tokens, young.cached_tokens, batch.cached_tokens) == (2, 11, 11)
    batch.step()
    batch.join(young)
    batch.check_integrity()
    assert [batch.step(), batch.step(), batch.step()] == [[], [old], [young]]
