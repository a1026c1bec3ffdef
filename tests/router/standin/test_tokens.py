"""Promises of tokens.py."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kvstore.router.standin.tokens import continuation, text_of

TOKENS = st.lists(st.integers(0, (1 << 31) - 1), max_size=50)


@given(TOKENS, st.integers(0, 20))
def test_an_answer_is_the_same_wherever_it_is_cut(prompt: list[int], cut: int) -> None:
    whole = list(islice(continuation(prompt), 30))
    assert list(islice(continuation(prompt + whole[:cut]), 30 - cut)) == whole[cut:]


@given(TOKENS)
def test_answers_are_small_letters(prompt: list[int]) -> None:
    text = text_of(list(islice(continuation(prompt), 20)))
    assert text.isalpha()
    assert text.islower()
    assert text.isascii()


def test_other_prompts_have_other_answers() -> None:
    assert len({text_of(list(islice(continuation([number]), 20))) for number in range(100)}) == 100
