"""Baselines of Algorithm 1: dispatchers that use less information and never fetch a prefix; and the table of all
dispatchers by name.

They share the choice of the decode instance and the SLO check (dispatcher.py), so that they differ only in the prefill
instance. An instance still uses its own cached prefix: a baseline chooses worse, it does not compute worse.

Source: the first four are compared in Qin et al., Mooncake, FAST 2025, section 5; two choices: Mitzenmacher, "The Power
of Two Choices in Randomized Load Balancing", IEEE TPDS 12 (2001).
"""

import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.dispatcher import Dispatcher, Estimators, check_slo, decode_choices
from kvstore.scheduler.kvcache_centric import DEFAULT_BALANCING_THRESHOLD, KVCacheCentric
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest


class Baseline(Dispatcher):
    """Dispatcher without the choice of the prefill instance."""

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
        decoded = decode_choices(request, prefill, decode, self._estimators.decode)
        among = list(decoded)
        p = among[self._choose(request, [matches[n] for n in among], [prefill[n] for n in among])]
        queue_s, prefill_s = prefill[p].queue_s, self._prefill_s(request, matches[p])
        decoding = decoded[p]
        if isinstance(decoding, Rejection):
            return decoding
        rejection = check_slo(request.slo, ttft_s=queue_s + prefill_s, tbt_s=decoding.tbt_s)
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
        """Index of a prefill instance; there is at least one."""

    def _prefill_s(self, request: ScheduleRequest, blocks: int) -> float:
        return self._estimators.prefill.prefill_s(request.input_tokens, request.prefix_tokens(blocks))

    def _soonest(
        self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance], candidates: Iterable[int]
    ) -> int:
        """The candidate with the least predicted TTFT from its own cache; ties: the first."""
        predicted: dict[int, float] = {}
        best, best_s = -1, float("inf")
        for number in candidates:
            blocks = matches[number]
            if blocks not in predicted:
                predicted[blocks] = self._prefill_s(request, blocks)
            ttft_s = prefill[number].queue_s + predicted[blocks]
            if best < 0 or ttft_s < best_s:
                best, best_s = number, ttft_s
        return best


class RandomChoice(Baseline):
    """Uniformly random instance."""

    name = "random"

    def __init__(self, estimators: Estimators, *, rng: random.Random) -> None:
        super().__init__(estimators)
        self._rng = rng

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return self._rng.randrange(len(prefill))


class RoundRobin(Baseline):
    """Instances in turn; rejected requests count."""

    name = "round_robin"

    def __init__(self, estimators: Estimators) -> None:
        super().__init__(estimators)
        self._last = -1

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        self._last = (self._last + 1) % len(prefill)
        return self._last


class LoadBalancing(Baseline):
    """Shortest queue in seconds, regardless of caches; ties: the first."""

    name = "load_balancing"

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return min(range(len(prefill)), key=lambda number: prefill[number].queue_s)


class LocalCacheAware(Baseline):
    """Least predicted TTFT, each instance with its own cache: Algorithm 1 without transfers."""

    name = "local_cache_aware"

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return self._soonest(request, matches, prefill, range(len(prefill)))


class PowerOfTwo(Baseline):
    """The better of two random instances, compared as by LocalCacheAware."""

    name = "power_of_two"

    def __init__(self, estimators: Estimators, *, rng: random.Random) -> None:
        super().__init__(estimators)
        self._rng = rng

    def _choose(self, request: ScheduleRequest, matches: Sequence[int], prefill: Sequence[PrefillInstance]) -> int:
        return self._soonest(request, matches, prefill, self._rng.sample(range(len(prefill)), min(2, len(prefill))))


DISPATCHERS: Final[tuple[str, ...]] = tuple(
    kind.name for kind in (KVCacheCentric, LocalCacheAware, PowerOfTwo, LoadBalancing, RoundRobin, RandomChoice)
)
"""Names accepted by `make_dispatcher`."""


def make_dispatcher(name: str, estimators: Estimators, *, threshold: float = DEFAULT_BALANCING_THRESHOLD, seed: int = 0) -> Dispatcher:
    """A new dispatcher of this name. `threshold` is for kvcache_centric, `seed` for random choices.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
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
