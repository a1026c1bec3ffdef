"""Algorithm 1: where a request makes its first token soonest, counting the KV cache that instances have and may fetch from one another.

Lines are those of the algorithm as published. Two printings of it differ in line 6. Here it is prefix_len <- best_len: with a transfer all
those blocks are there. The other, min(best_len, instance.prefix_len), would pay for the transfer and compute the blocks nevertheless.

Line 20 and 21 are the migration of hot blocks: a request that the holder's queue keeps away takes the prefix along, so what many ask for is
soon in many caches, and copies that nobody asks for any more leave by eviction. There is nothing else to migrate.

As published, line 5 looks at lengths only: over a slow way an idle instance fetches for longer than it would compute. Here it fetches what
it would not have sooner by computing it, and is foreseen with the sooner of the two. And line 14 adds up transfer and queue, though a
transfer begins with the decision, while the prompt waits for its turn: here the longer of the two counts.

The published estimate of a transfer knows its sender only. Here it knows the receiver, too, where a rate was measured between the two: so
who sends, of several with the longest prefix, may differ from receiver to receiver.

Source: Qin et al., Mooncake, FAST 2025, section 5, Algorithm 1.
"""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.dispatcher import Dispatcher, Estimators, broken_slo, decodings
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest

DEFAULT_BALANCING_THRESHOLD: Final = 1.0
"""kvcache_balancing_threshold, a ratio: the paper names no value. 1 fetches whatever another has more and is fetched sooner than computed;
more keeps nearly equal copies from travelling; infinity never fetches."""


class KVCacheCentric(Dispatcher):
    """Algorithm 1. A decision is O(prefill + decode instances + measured rates), and one estimate for each distinct length of prefix."""

    name = "kvcache_centric"

    def __init__(self, estimators: Estimators, *, kvcache_balancing_threshold: float = DEFAULT_BALANCING_THRESHOLD) -> None:
        """
        Raises:
            InvalidArgument: the threshold is below 1; no instance has more than the best one.
        """
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
        # Line 1, PrefixHash, is the caller's, and so is the matching of line 3: request.keys, and their runs at each instance.
        if not prefill:
            return Rejection(Reason.NO_INSTANCE)
        decoded = decodings(request, prefill, decode, self._estimators.decode)  # line 17, for each
        ttft_s, p = inf, next(iter(decoded))  # line 2
        if sendable is None:
            sendable = matches
        best_len = max(sendable)  # line 3
        senders = _Senders(best_len, sendable, prefill, self._estimators)
        # What the lines 5 to 11 and 13 say depends on the instance only by the blocks it has, but for measured rates: it is foreseen once
        # for each number of them, and only where an instance could be the soonest.
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
                continue  # whatever the transfer takes
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
        rejection = broken_slo(request.slo, ttft_s=ttft_s, tbt_s=decoding.tbt_s)  # lines 18 and 19
        if rejection is not None or ttft_s == inf:
            return rejection or Rejection(Reason.TTFT, ttft_s, request.slo.ttft_s)
        own = matches[p]
        blocks, sends = missing.get(own, 0), senders.to(prefill[p])
        transfer_s, queue_s = self._transfer_s(blocks, prefill[sends], prefill[p]), prefill[p].queue_s
        if transfer_s > queue_s and transfer_s + fetched_s >= queue_s + computed_s[own]:
            blocks, transfer_s = 0, 0.0
        return Decision(  # lines 20 to 22; the caller makes the transfer
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
        """The condition of the lines 5 and 20."""
        ratio = best_len / prefix_len if prefix_len else (inf if best_len else 0.0)
        return ratio > self._threshold

    def _transfer_s(self, blocks: int, sender: PrefillInstance, receiver: PrefillInstance | None = None) -> float:
        """Lines 7, 8 and 11: EstimateKVCacheTransferTime, and 0 of nothing. Without a receiver: to one of whom nothing was measured."""
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
    """What a function says of a number of blocks, which is asked for each once, when it is needed."""

    def __init__(self, ask: Callable[[int], float]) -> None:
        self._ask = ask

    def __missing__(self, blocks: int) -> float:
        found = self[blocks] = self._ask(blocks)
        return found


class _Senders:
    """The instances of FindBestPrefixMatch: of those with the longest prefix the one that would send all of it soonest, ties the first."""

    def __init__(self, best_len: int, matches: Sequence[int], prefill: Sequence[PrefillInstance], estimators: Estimators) -> None:
        self._size_bytes = best_len * estimators.block_bytes
        self._prefill = prefill
        self._estimator = estimators.transfer
        holders = [(0.0, number) for number, own in enumerate(matches) if own == best_len]
        if len(holders) > 1 and best_len:
            holders = sorted((self._takes_s(prefill[number]), number) for _, number in holders)
        self._holders = holders
        """Soonest first, by what senders say of themselves."""
        self._waits: dict[Hashable, tuple[float, int]] = {}
        """At each place how long it takes what the holder there has to send before; of several the one with the least."""
        self._at_one_byte_per_s = 0.0
        """How long the prefix alone would take at that rate: the estimator knows what it counts in."""

    @property
    def first(self) -> int:
        """Who sends to one that has measured nothing."""
        return self._holders[0][1]

    def to(self, receiver: PrefillInstance) -> int:
        """Who sends to this one. O(its measured rates): the estimator is asked for each holder once, not for each receiver."""
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
        """A way's rate counts for what is sent by it, and for nothing before that: see TransferTime."""
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
