"""What a cache saves is what a count of the single steps gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.models.savings import PrefixSavings, passes_with_cache, passes_without_cache
from kvstore.protocol.errors import InvalidArgument

TOKENS = st.integers(0, 300)


@given(prompt=TOKENS, output=TOKENS)
def test_passes_are_those_that_a_loop_of_decoding_makes(prompt: int, output: int) -> None:
    """The sequence grows by a token a step; the first step sees the prompt, with a cache the others their newest token only."""
    sequences = [prompt + step for step in range(output)]
    assert passes_without_cache(prompt_tokens=prompt, output_tokens=output) == sum(sequences)
    assert passes_with_cache(prompt_tokens=prompt, output_tokens=output) == sum(1 if step else prompt for step in range(output))


def test_an_answer_of_200_tokens_to_1000_takes_220_000_passes() -> None:
    """The worked figure says "about 220,000" and that this is 1,100 times the need; the latter counts the 200 output tokens only. With the
    prompt's own pass, which a cache needs as well, it is 183 times.
    """
    without = passes_without_cache(prompt_tokens=1000, output_tokens=200)
    assert without == 219_900
    assert without / 200 == pytest.approx(1100, rel=0.001)
    assert without / passes_with_cache(prompt_tokens=1000, output_tokens=200) == pytest.approx(183.4, rel=0.001)


@given(prefix=TOKENS, suffix=TOKENS, sequences=st.integers(0, 5), width=st.integers(1, 9))
def test_a_prefix_saves_its_rows_of_attention(prefix: int, suffix: int, sequences: int, width: int) -> None:
    """Every query row is as long as the prompt (the leading term masks nothing), and those of the prefix are not computed."""
    found = PrefixSavings(prefix_tokens=prefix, suffix_tokens=suffix, sequences=sequences, attention_width=width)
    rows = [[width * sequences * (prefix + suffix)] for _ in range(prefix + suffix)]
    assert found.attention_terms == sum(map(sum, rows))
    assert found.attention_terms_left == sum(map(sum, rows[prefix:]))
    assert found.saved_tokens == sequences * prefix
    assert found.prompt_tokens == prefix + suffix


def test_the_share_saved_is_that_of_the_prefix_in_attention_as_in_all_else() -> None:
    found = PrefixSavings(prefix_tokens=6000, suffix_tokens=2000)
    assert found.saved_share == 1 - found.attention_terms_left / found.attention_terms == 0.75
    assert PrefixSavings(prefix_tokens=0, suffix_tokens=0).saved_share == 0


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"prefix_tokens=-1.*: none of these may be negative"):
        PrefixSavings(prefix_tokens=-1, suffix_tokens=2)
    with pytest.raises(InvalidArgument, match="prompt_tokens is -1 and output_tokens 2: neither may be negative"):
        passes_without_cache(prompt_tokens=-1, output_tokens=2)
    with pytest.raises(InvalidArgument, match="output_tokens -2"):
        passes_with_cache(prompt_tokens=1, output_tokens=-2)
