"""What Algorithm 1 is measured against: dispatchers that use less of what is known, and never fetch a prefix; and the table of all by name.

They share the choice of the decode instance and the SLOs (dispatcher.py), so that they differ only in the prefill instance. What an
instance has of the prompt it does use: a baseline chooses worse, it does not compute worse.

Source: the first four are compared in Qin et al., Mooncake, FAST 2025, section 5; two choices: Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", IEEE TPDS 12 (2001).
"""

import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.dispatcher import Dispatcher, Estimators, broken_slo, decodings
from kvstore.scheduler.kvcache_centric import DEFAULT_BALANCING_THRESHOLD, KVCacheCentric
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest


class Baseline(Dispatcher):
    """Everything but the choice of the prefill instance."""

    def __init__(self, estimators: Estimators) -> None:
        self._estimators = estimators

    def dispatch(
        self,
        request: ScheduleRequest,
        matches: Sequence[int],
        prefill: Sequence[PrefillInstance],
        decode: Sequence[DecodeInstance],
        sendable: Sequence[int] | None = None,
    ) -> Decision | Rejection:
        if not prefill:
            return Rejection(Reason.NO_INSTANCE)
        decoded = decodings(request, prefill, decode, self._estimators.decode)
        among = list(decoded)
        p = among[self._choose(request, [matches[n] for n in among], [prefill[n] for n in among])]
        queue_s, prefill_s = prefill[p].queue_s, self._prefill_s(request, matches[p])
        decoding = decoded[p]
        if isinstance(decoding, Rejection):
            return decoding
        rejection = broken_slo(request.slo, ttft_s=queue_s + prefill_s, tbt_s=decoding.tbt_s)
        if rejection is not None:
            return rejection
        return Decision(
            prefill=p,
            decode=decoding.instance,
            prefix_blocks=matches[p],
            transfer_from=None,
            transfer_blocks=0,
            transfer_s=0.0,
            queue_s=queue_s,
            prefill_s=prefill_s,
            tbt_s=decoding.tbt_s,
        )

    @abstractmethod
    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        """The index of a prefill instance; there is at least one."""

    def _prefill_s(self, request: ScheduleRequest, blocks: int) -> float:
        return self._estimators.prefill.prefill_s(request.input_tokens, request.prefix_tokens(blocks))

    def _soonest(
        self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance], candidates: Iterable[int]
    ) -> int:
        """Which of them makes the first token soonest with what it has itself; ties: the first of them."""
        foreseen: dict[int, float] = {}
        best, best_s = -1, float("inf")
        for number in candidates:
            blocks = matches[number]
            if blocks not in foreseen:
                foreseen[blocks] = self._prefill_s(request, blocks)
            ttft_s = prefill[number].queue_s + foreseen[blocks]
            if best < 0 or ttft_s < best_s:
                best, best_s = number, ttft_s
        return best


class RandomChoice(Baseline):
    """Any instance, all alike."""

    name = "random"

    def __init__(self, estimators: Estimators, *, rng: random.Random) -> None:
        super().__init__(estimators)
        self._rng = rng

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return self._rng.randrange(len(prefill))


class RoundRobin(Baseline):
    """One after the other, rejected requests counted."""

    name = "round_robin"

    def __init__(self, estimators: Estimators) -> None:
        super().__init__(estimators)
        self._turn = -1

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        self._turn = (self._turn + 1) % len(prefill)
        return self._turn


class LoadBalancing(Baseline):
    """The shortest queue in seconds, whatever it has in its cache; ties: the first."""

    name = "load_balancing"

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return min(range(len(prefill)), key=lambda number: prefill[number].queue_s)


class LocalCacheAware(Baseline):
    """The first token soonest, each instance with its own cache: Algorithm 1 without transfers."""

    name = "local_cache_aware"

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return self._soonest(request, matches, prefill, range(len(prefill)))


class PowerOfTwo(Baseline):
    """The better of two instances chosen at random, as LocalCacheAware compares them."""

    name = "power_of_two"

    def __init__(self, estimators: Estimators, *, rng: random.Random) -> None:
        super().__init__(estimators)
        self._rng = rng

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return self._soonest(request, matches, prefill, self._rng.sample(range(len(prefill)), min(2, len(prefill))))


DISPATCHERS: Final[tuple[str, ...]] = tuple(
    kind.name for kind in (KVCacheCentric, LocalCacheAware, PowerOfTwo, LoadBalancing, RoundRobin, RandomChoice)
)
"""The names that make_dispatcher knows."""


def make_dispatcher(name: str, estimators: Estimators, *, threshold: float = DEFAULT_BALANCING_THRESHOLD, seed: int = 0) -> Dispatcher:
    """A new dispatcher of this name. `threshold` is kvcache_centric's, `seed` is for those that draw.

    Raises:
        ConfigError: there is none of this name; the message lists those there are.
        InvalidArgument: the threshold is below 1.
    """
    match name:
        case KVCacheCentric.name:
            return KVCacheCentric(estimators, kvcache_balancing_threshold=threshold)
        case LocalCacheAware.name:
            return LocalCacheAware(estimators)
        case PowerOfTwo.name:
            return PowerOfTwo(estimators, rng=random.Random(seed))
        case LoadBalancing.name:
            return LoadBalancing(estimators)
        case RoundRobin.name:
            return RoundRobin(estimators)
        case RandomChoice.name:
            return RandomChoice(estimators, rng=random.Random(seed))
    raise ConfigError(f"no scheduling policy is named {name!r}: take one of {', '.join(DISPATCHERS)}")
