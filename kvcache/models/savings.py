"""The computing that a KV cache saves: of decoding at all, and of a prefix that it has already. Counts, no seconds; bytes are spec.py's."""

from dataclasses import dataclass

from kvstore.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSavings:
    """The prefill of `sequences` prompts of P + U tokens, with and without a cache of their first P.

    A cached prefix is not computed, but the suffix still attends to it: attention falls from T^2 to U T terms, all else from T to U.

    Raises:
        InvalidArgument: a number is negative.
    """

    prefix_tokens: int
    """P: how many the cache has."""
    suffix_tokens: int
    """U: how many are computed."""
    sequences: int = 1
    """B."""
    attention_width: int = 1
    """Layers x query heads x head_dim: L h d."""

    def __post_init__(self) -> None:
        if min(self.prefix_tokens, self.suffix_tokens, self.sequences, self.attention_width) < 0:
            raise InvalidArgument(f"{self}: none of these may be negative")

    @property
    def prompt_tokens(self) -> int:
        """T = P + U."""
        return self.prefix_tokens + self.suffix_tokens

    @property
    def saved_tokens(self) -> int:
        """Tokens that are not computed: B P."""
        return self.sequences * self.prefix_tokens

    @property
    def attention_terms(self) -> int:
        """Products of the leading attention term without the cache: B L h T^2 d."""
        return self.sequences * self.attention_width * self.prompt_tokens**2

    @property
    def attention_terms_left(self) -> int:
        """Those with it: B L h U T d."""
        return self.sequences * self.attention_width * self.suffix_tokens * self.prompt_tokens

    @property
    def saved_share(self) -> float:
        """Of the prefill, P / T: the same of attention (1 - U T / T^2) as of all that is linear in tokens. 0 of an empty prompt."""
        return self.prefix_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def passes_without_cache(*, prompt_tokens: int, output_tokens: int) -> int:
    """Token computations of decoding that forwards the whole sequence for each token: S T + T (T - 1) / 2.

    Raises:
        InvalidArgument: a number is negative.
    """
    _check(prompt_tokens, output_tokens)
    return prompt_tokens * output_tokens + output_tokens * (output_tokens - 1) // 2


def passes_with_cache(*, prompt_tokens: int, output_tokens: int) -> int:
    """Token computations with a cache: the prompt once, which gives the first token, then one for each further token: S + T - 1.

    Raises:
        InvalidArgument: a number is negative.
    """
    _check(prompt_tokens, output_tokens)
    return prompt_tokens + output_tokens - 1 if output_tokens else 0


def _check(prompt_tokens: int, output_tokens: int) -> None:
    if prompt_tokens < 0 or output_tokens < 0:
        raise InvalidArgument(f"prompt_tokens is {prompt_tokens} and output_tokens {output_tokens}: neither may be negative")
