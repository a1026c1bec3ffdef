"""Algorithm 1: place a request where its first token comes soonest, given the KV caches of instances and transfers
between them.

Line numbers are those of the published algorithm, with these differences:

- Line 6 exists in two printings. Here it is prefix_len <- best_len: after a transfer all these blocks are present. The
  other, min(best_len, instance.prefix_len), would pay for the transfer and compute the blocks nevertheless.
- Lines 20 and 21 migrate hot blocks: a request that is placed away from a long queue takes the prefix along. Popular
  prefixes thus spread, and unused copies are evicted. No other migration exists.
- Line 5 compares lengths only, so over a slow path an idle instance would fetch for longer than it computes. Here a
  prefix is fetched only if that is faster, and the prediction uses the faster of the two.
- Line 14 adds transfer and queue, although the transfer begins with the decision. Here the longer of the two counts.
- The published transfer estimate depends on the sender only. Here it also depends on the receiver, if the rate of the
  pair was measured. Among several instances with the longest prefix, the sender may therefore differ per receiver.

Source: Qin et al., Mooncake, FAST 2025, section 5, Algorithm 1.
"""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.dispatcher import Dispatcher, Estimators, check_slo, decode_choices
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest

DEFAULT_BALANCING_THRESHOLD: Final = 1.0
"""kvcache_balancing_threshold, a ratio; the paper gives no value. 1 fetches every prefix that is fetched faster than
computed; higher values skip transfers between nearly equal prefixes; infinity never fetches."""


class KVCacheCentric(Dispatcher):
    """Algorithm 1. O(prefill + decode instances + measured rates) per decision, with one estimate per distinct prefix
    length."""

    name = "kvcache_centric"

    def __init__(self, estimators: Estimators, *, kvcache_balancing_threshold: float = DEFAULT_BALANCING_THRESHOLD) -> None:
        """Raises:
        InvalidArgument: the threshold is below 1; no instance has more than the best one."""
        if not kvcache_balancing_threshold >= 1:
            raise InvalidArgument(f"kvcache_balancing_threshold is {kvcache_balancing_threshold:g}: it must be at least 1")
        self._estimators = estimators
        self._threshold = kvcache_balancing_threshold

    def dispatch(
        self,
        request: ScheduleRequest,
        matches: Sequence[int],
        prefill: Sequence[PrefillInstance],
        decode: Sequence[DecodeInstance],
        sendable: Sequence[int] | None = None,
    ) -> Decision | Rejection:
        # The caller has done line 1, PrefixHash (request.keys), and the matching of line 3 (matches).
        if not prefill:
            return Rejection(Reason.NO_INSTANCE)
        decoded = decode_choices(request, prefill, decode, self._estimators.decode)  # line 17, for each
        ttft_s, p = inf, next(iter(decoded))  # line 2
        if sendable is None:
            sendable = matches
        best_len = max(sendable)  # line 3
        senders = _Senders(best_len, sendable, prefill, self._estimators)
        # Lines 5 to 11 and 13 depend on an instance only by its prefix length and measured rates: predict them once
        # per length, and only if the instance could be the soonest.
        missing = {own: best_len - own for own in set(matches) if self._exceeds(best_len, own)}  # lines 5 and 7
        fetched_s = self._prefill_s(request, best_len) if missing else inf  # line 13 with line 6
        computed_s = _Memo(lambda own: self._prefill_s(request, own))  # line 13 with line 10
        sent_s = _Memo(lambda own: self._transfer_s(missing[own], prefill[senders.first]))  # lines 7 and 8
        for number in decoded:  # line 4
            instance, own = prefill[number], matches[number]
            queue_s = instance.queue_s  # line 12
            if own not in missing:
                total_s = queue_s + computed_s[own]
            elif ttft_s <= queue_s + fetched_s:
                continue  # not sooner, however fast the transfer
            else:
                sender = prefill[senders.to(instance)] if instance.received_bytes_per_s else None
                transfer_s = sent_s[own] if sender is None else self._transfer_s(missing[own], sender, instance)
                total_s = max(transfer_s, queue_s) + fetched_s  # the sum of line 14
                if transfer_s > queue_s:
                    total_s = min(total_s, queue_s + computed_s[own])
            if ttft_s > total_s:  # lines 14 to 16
                ttft_s, p = total_s, number
        decoding = decoded[p]
        if isinstance(decoding, Rejection):
            return decoding
        rejection = check_slo(request.slo, ttft_s=ttft_s, tbt_s=decoding.tbt_s)  # lines 18 and 19
        if rejection is not None or ttft_s == inf:
            return rejection or Rejection(Reason.TTFT, ttft_s, request.slo.ttft_s)
        own = matches[p]
        blocks, sends = missing.get(own, 0), senders.to(prefill[p])
        transfer_s, queue_s = self._transfer_s(blocks, prefill[sends], prefill[p]), prefill[p].queue_s
        if transfer_s > queue_s and transfer_s + fetched_s >= queue_s + computed_s[own]:
            blocks, transfer_s = 0, 0.0
        return Decision(  # lines 20 to 22; the caller starts the transfer
            prefill=p,
            decode=decoding.instance,
            prefix_blocks=own + blocks,
            transfer_from=sends if blocks else None,
            transfer_blocks=blocks,
            transfer_s=transfer_s,
            queue_s=queue_s,
            prefill_s=fetched_s if blocks else computed_s[own],
            tbt_s=decoding.tbt_s,
        )

    def _exceeds(self, best_len: int, prefix_len: int) -> bool:
        """Condition of lines 5 and 20."""
        ratio = best_len / prefix_len if prefix_len else (inf if best_len else 0.0)
        return ratio > self._threshold

    def _transfer_s(self, blocks: int, sender: PrefillInstance, receiver: PrefillInstance | None = None) -> float:
        """Lines 7, 8 and 11, EstimateKVCacheTransferTime; 0 without blocks. Without a receiver, for one without a
        measured rate."""
        if not blocks:
            return 0.0
        return self._estimators.transfer.transfer_s(
            blocks * self._estimators.block_bytes,
            backlog_bytes=sender.send_backlog_bytes,
            bytes_per_s=sender.send_bytes_per_s,
            measured_bytes_per_s=None if receiver is None else receiver.received_bytes_per_s.get(sender.place),
        )

    def _prefill_s(self, request: ScheduleRequest, prefix_len: int) -> float:
        """EstimatePrefillExecutionTime."""
        return self._estimators.prefill.prefill_s(request.input_tokens, request.prefix_tokens(prefix_len))


class _Memo(dict[int, float]):
    """Lazily computed function of a number of blocks, cached."""

    def __init__(self, compute: Callable[[int], float]) -> None:
        self._compute = compute

    def __missing__(self, blocks: int) -> float:
        found = self[blocks] = self._compute(blocks)
        return found


class _Senders:
    """FindBestPrefixMatch: among the instances with the longest prefix, the one that would send it soonest; ties: the
    first."""

    def __init__(self, best_len: int, matches: Sequence[int], prefill: Sequence[PrefillInstance], estimators: Estimators) -> None:
        self._size_bytes = best_len * estimators.block_bytes
        self._prefill = prefill
        self._estimator = estimators.transfer
        holders = [(0.0, number) for number, own in enumerate(matches) if own == best_len]
        if len(holders) > 1 and best_len:
            holders = sorted((self._takes_s(prefill[number]), number) for _, number in holders)
        self._holders = holders
        """(seconds, instance), soonest first, by the senders' own rates."""
        self._waits: dict[Hashable, tuple[float, int]] = {}
        """(wait, instance) by location: time for the backlog of the holder there; the least of several."""
        self._at_one_byte_per_s = 0.0
        """Time for the prefix alone at one byte per second, in the estimator's units."""

    @property
    def first(self) -> int:
        """Sender to an instance without measured rates."""
        return self._holders[0][1]

    def to(self, receiver: PrefillInstance) -> int:
        """Sender to this instance. O(its measured rates): the estimator runs once per holder, not per receiver."""
        measured = receiver.received_bytes_per_s
        if not measured or len(self._holders) == 1 or not self._size_bytes:
            return self.first
        if not self._waits:
            self._prepare()
        best_s, best = next((one for one in self._holders if self._prefill[one[1]].place not in measured), (inf, len(self._prefill)))
        waits, at_one_byte_per_s = self._waits, self._at_one_byte_per_s
        for place, bytes_per_s in measured.items():
            holder = waits.get(place)
            if holder is None:
                continue
            takes_s = holder[0] + at_one_byte_per_s / bytes_per_s if bytes_per_s > 0 else inf
            if takes_s <= best_s and (takes_s < best_s or holder[1] < best):
                best_s, best = takes_s, holder[1]
        return best

    def _prepare(self) -> None:
        """Separate the backlog from the transfer: a pair's rate applies to the transfer only, see TransferTime."""
        for wait_s, number in sorted((self._takes_s(self._prefill[number], inf), number) for _, number in self._holders):
            self._waits.setdefault(self._prefill[number].place, (wait_s, number))
        idle = PrefillInstance("")
        self._at_one_byte_per_s = self._takes_s(idle, 1.0) - self._takes_s(idle, inf)

    def _takes_s(self, sender: PrefillInstance, measured_bytes_per_s: float | None = None) -> float:
        return self._estimator.transfer_s(
            self._size_bytes,
            backlog_bytes=sender.send_backlog_bytes,
            bytes_per_s=sender.send_bytes_per_s,
            measured_bytes_per_s=measured_bytes_per_s,
        )
