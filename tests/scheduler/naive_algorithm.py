"""Algorithm 1 written down line by line, with nothing cached and nothing shared: what kvcache_centric.py must agree with.

Two things are ours: what an instance computes sooner than it fetches it, it computes; and a transfer takes place while the request waits.
"""

from collections.abc import Hashable, Sequence

from kvstore.scheduler.dispatcher import Estimators
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest

INF = float("inf")


def prefix_match(cache: set[Hashable], block_keys: Sequence[Hashable]) -> int:
    length = 0
    while length < len(block_keys) and block_keys[length] in cache:
        length += 1
    return length


def exceeds(best_len: int, prefix_len: int, threshold: float) -> bool:
    if prefix_len == 0:
        return best_len > 0 and INF > threshold
    return best_len / prefix_len > threshold


def algorithm_1(
    pool_p: Sequence[PrefillInstance],
    pool_d: Sequence[DecodeInstance],
    prefix_lens: Sequence[int],
    request: ScheduleRequest,
    estimators: Estimators,
    kvcache_balancing_threshold: float,
) -> Decision | Rejection:
    if not pool_p or not pool_d:
        return Rejection(Reason.NO_INSTANCE)

    def transfer_s(blocks: int, sender: int, receiver: int) -> float:
        instance = pool_p[sender]
        return estimators.transfer.transfer_s(
            blocks * estimators.block_bytes,
            backlog_bytes=instance.send_backlog_bytes,
            bytes_per_s=instance.send_bytes_per_s,
            measured_bytes_per_s=pool_p[receiver].received_bytes_per_s.get(instance.place),
        )

    ttft, p, parts = INF, -1, (0, 0.0, 0.0)
    best_len = max(prefix_lens)
    holders = [i for i in range(len(pool_p)) if prefix_lens[i] == best_len]
    senders = [min(holders, key=lambda h: (transfer_s(best_len, h, i) if best_len else 0.0, h)) for i in range(len(pool_p))]  # noqa: B023
    for i in range(len(pool_p)):
        prefix_len = prefix_lens[i]
        t_transfer, t_queue = 0.0, pool_p[i].queue_s
        t_prefill = estimators.prefill.prefill_s(request.input_tokens, request.prefix_tokens(prefix_len))
        if exceeds(best_len, prefix_lens[i], kvcache_balancing_threshold):
            t_fetch = transfer_s(best_len - prefix_lens[i], senders[i], i)
            t_rest = estimators.prefill.prefill_s(request.input_tokens, request.prefix_tokens(best_len))
            if max(t_fetch, t_queue) + t_rest < t_queue + t_prefill:
                prefix_len, t_transfer, t_prefill = best_len, t_fetch, t_rest
        if ttft > max(t_transfer, t_queue) + t_prefill:
            ttft = max(t_transfer, t_queue) + t_prefill
            p, parts = i, (prefix_len, t_transfer, t_prefill)
    room = [d for d in range(len(pool_d)) if needed(pool_d[d], request) <= pool_d[d].capacity_tokens]
    if not room:
        largest = max(instance.capacity_tokens - instance.context_tokens for instance in pool_d)
        return Rejection(Reason.CAPACITY, request.input_tokens + request.output_tokens, largest)
    tbts = [estimators.decode.tbt_s(d.batch + 1, d.context_tokens + request.input_tokens) for d in pool_d]
    d = min(room, key=lambda i: (tbts[i], pool_d[i].context_tokens, i))
    if ttft > request.slo.ttft_s:
        return Rejection(Reason.TTFT, ttft, request.slo.ttft_s)
    if tbts[d] > request.slo.tbt_s:
        return Rejection(Reason.TBT, tbts[d], request.slo.tbt_s)
    transfers = parts[0] > prefix_lens[p]
    return Decision(
        prefill=p,
        decode=d,
        prefix_blocks=parts[0],
        transfer_from=senders[p] if transfers else None,
        transfer_blocks=best_len - prefix_lens[p] if transfers else 0,
        transfer_s=parts[1],
        queue_s=pool_p[p].queue_s,
        prefill_s=parts[2],
        tbt_s=tbts[d],
    )


def needed(instance: DecodeInstance, request: ScheduleRequest) -> int:
    return instance.context_tokens + request.input_tokens + request.output_tokens
