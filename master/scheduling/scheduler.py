"""Scheduler of inference requests: gives instance reports and prefix lookups to a dispatcher, and carries out its
decision.

Sans-I/O and one thread: `now_ns` is passed in, and transfers are started by an injected function. A dispatcher
decides (scheduler/kvcache_centric.py). A lookup here is no access to a block: reads touch it later."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from kvstore.kvcache.models.named import find_model
from kvstore.master.config import MasterSettings
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.index.queries import PrefixMatches
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.scheduling.engine_caches import EngineCaches, check_change
from kvstore.master.scheduling.estimators import LiveEstimators, samples_of
from kvstore.master.scheduling.instances import NS_PER_S, DecodeMember, Instance, Instances, PrefillMember, PromisedWork
from kvstore.master.scheduling.pool_load import DecodeDuration, pool_load
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.scheduler.admission import AdmitAll, make_admission
from kvstore.scheduler.baselines import make_dispatcher
from kvstore.scheduler.dispatcher import check_slo
from kvstore.scheduler.estimators.analytic import AnalyticModel, find_gpu
from kvstore.scheduler.request import Decision, Rejection, ScheduleRequest, Slo

NS_PER_US: Final = 1000
ADMISSION_LOAD_LIMIT: Final = 1.0
"""Share of an SLO up to which early and predicted admission load a pool."""
MAX_ENGINE_BLOCKS: Final = 1 << 20
"""Known blocks of an instance's own memory; further ones are ignored."""

MAX_PROMPT_BLOCKS: Final = 65_536
MAX_TOKENS: Final = 1 << 27
"""Of a prompt or an output: far above any model's, with finite estimates."""
UNKNOWN_OUTPUT_TOKENS: Final = 182
"""Default output length: the mean of the traces of Qin et al., Mooncake (arXiv:2407.00079), section 4."""


class ReplicateCall(Protocol):
    """Have node `node_id` copy those of the blocks that it lacks from the source. Returns the number of newly
    ordered blocks at once; never raises."""

    def __call__(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int) -> int: ...


class PromoteCall(Protocol):
    """Have node `node_id` copy those of its blocks into DRAM that are below it. Returns the number of blocks that it was
    sent, at once; never raises."""

    def __call__(self, tenant: str, keys: Sequence[bytes], *, node_id: int) -> int: ...


FindPrefixes = Callable[[str, Sequence[bytes]], PrefixMatches]
"""Returns each node's prefix of a tenant's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledPrompt:
    """An admitted request to place. `keys` are those of its full blocks; `output_tokens` is 0 if unknown."""

    tenant: str
    keys: Sequence[bytes]
    block_tokens: int
    input_tokens: int
    output_tokens: int
    slo: Slo

    def __post_init__(self) -> None:
        """Raises InvalidArgument, which names the field that is out of range."""
        count, lengths = len(self.keys), set(map(len, self.keys))
        for name, value, least in (("input_tokens", self.input_tokens, 1), ("output_tokens", self.output_tokens, 0)):
            if not least <= value <= MAX_TOKENS:
                raise InvalidArgument(f"{name} is {value}: it must be in [{least}, {MAX_TOKENS}]")
        if self.block_tokens < 1:
            raise InvalidArgument("block_tokens is 0: give the number of tokens of a block")
        if count > MAX_PROMPT_BLOCKS or count * self.block_tokens > self.input_tokens:
            raise InvalidArgument(
                f"{count} keys of blocks of {self.block_tokens} tokens for a prompt of {self.input_tokens}:"
                f" give one for each full block, at most {MAX_PROMPT_BLOCKS}"
            )
        if count and not 1 <= min(lengths) <= max(lengths) <= MAX_KEY_BYTES:
            raise InvalidArgument(f"a key is 1 to {MAX_KEY_BYTES} bytes long")


class _Pool(NamedTuple):
    """Instances of one decision, in a fixed order; `nodes` are the prefill instances' live nodes, or None.

    Each node has the leading `fetchable` blocks of the prompt, which others can fetch. Each prefill instance has
    `matches`, including its engine's own cache, which has `in_engines`."""

    prefill: list[PrefillMember]
    decode: list[DecodeMember]
    nodes: list[NodeMember | None]
    matches: list[int]
    fetchable: list[int]
    in_engines: list[int]


class ClusterScheduler:
    """Owns the instances and dispatches requests. Not thread-safe: the master's loop is the only caller."""

    def __init__(
        self,
        settings: MasterSettings,
        directory: Directory,
        *,
        replicate: ReplicateCall,
        promote: PromoteCall,
        wall_ns: int,
        prefixes: FindPrefixes | None = None,
    ) -> None:
        """Request ids count from the microseconds of `wall_ns`, the wall clock: a restarted master repeats none, and
        they fit JSON numbers. `prefixes` covers all partitions; None for the directory's. Raises ConfigError, as
        `make_estimators`."""
        self.instances = Instances(instance_ttl_s=settings.instance_ttl_s, max_instances=settings.max_instances)
        self.engine_caches = EngineCaches(max_blocks=MAX_ENGINE_BLOCKS)
        self.estimators = make_estimators(settings)
        self.counters = Counter(dict.fromkeys(("scheduled", "transfers", "transfer_blocks", "promoted_blocks"), 0))
        self._directory = directory
        self._dispatcher = make_dispatcher(
            settings.dispatcher, self.estimators.for_dispatcher(), threshold=settings.kvcache_balancing_threshold, seed=wall_ns
        )
        self._admission = make_admission(settings.admission, self.estimators, load_limit=ADMISSION_LOAD_LIMIT)
        self._replicate, self._promote = replicate, promote
        self._prefixes = prefixes or directory.queries.prefixes
        self._decision_ttl_ns = round(settings.decision_ttl_s * NS_PER_S)
        self._request_ids = itertools.count(wall_ns // NS_PER_US)
        self._decode_duration = DecodeDuration()

    def report(self, report: pb.ReportRequest, now_ns: int) -> str:
        """See Instances.report, also for the result; the estimators learn from its samples. Raises InvalidArgument,
        Full; nothing has changed then."""
        samples = samples_of(report)
        if report.HasField("engine_cache"):
            check_change(report.name, report.engine_cache)
        other = self.instances.report(report, now_ns)
        if report.HasField("engine_cache"):
            self.engine_caches.apply(report.name, report.engine_cache)
        self.estimators.learn(samples, now_ns)
        return other

    def leave(self, name: str) -> None:
        """Remove an instance. An unknown one is ignored."""
        self.instances.leave(name)
        self.engine_caches.leave(name)

    def run_due(self, now_ns: int) -> list[str]:
        """Remove silent instances; return their names."""
        silent = self.instances.expire(now_ns)
        for name in silent:
            self.engine_caches.leave(name)
        return silent

    def schedule(self, prompt: ScheduledPrompt, now_ns: int) -> pb.ScheduleReply:
        """Place the request, or reject it. A placed one is promised to both instances, and its transfer has been
        started."""
        pool = self._pool(prompt, now_ns)
        request = ScheduleRequest(
            prompt.keys, prompt.input_tokens, prompt.block_tokens, prompt.output_tokens or UNKNOWN_OUTPUT_TOKENS, prompt.slo
        )
        outcome = self._place(request, pool, now_ns)
        if isinstance(outcome, Rejection):
            self.counters[f"rejected_{outcome.reason.value}"] += 1
            return pb.ScheduleReply(rejected=outcome.reason.value, rejected_value=outcome.value, rejected_limit=outcome.limit)
        reply = self._reply(outcome, pool)
        self._promise(reply.request_id, outcome, request, pool, now_ns)
        self._decode_duration.add(outcome.tbt_s * request.output_tokens)
        if outcome.transfer_from is not None:
            self._start_transfer(prompt, outcome, outcome.transfer_from, pool, now_ns)
        self._start_promotion(prompt, outcome, pool)
        self.counters["scheduled"] += 1
        return reply

    def show(self, now_ns: int) -> pb.InstancesReply:
        """Return the state of all instances, for operators."""
        return pb.InstancesReply(
            dispatcher=self._dispatcher.name,
            instances=[_status(member, self.engine_caches.blocks(member.report.name), now_ns) for member in self.instances.each()],
            counters=self.counters,
            estimators=self.estimators.words,
        )

    def _pool(self, prompt: ScheduledPrompt, now_ns: int) -> _Pool:
        prefill, decode = list(self.instances.prefill.values()), list(self.instances.decode.values())
        nodes = [self._node(member) for member in prefill]
        if any(nodes):
            found = self._prefixes(prompt.tenant, prompt.keys)
            self.estimators.block_bytes = found.block_bytes
            fetchable = [0 if node is None else found.blocks.get(node.node_id, 0) for node in nodes]
            for member, node in zip(prefill, nodes, strict=True):
                member.at(*((node.node_id, node.rates.bytes_per_s(now_ns)) if node is not None else (None, {})))
        else:
            fetchable = [0] * len(nodes)
        in_engines = self.engine_caches.match(prompt.tenant, prompt.keys, list(self.instances.prefill))
        places = {name: index for index, name in enumerate(self.instances.decode)}
        for member in prefill:
            member.decodes_at(places.get(member.report.name))
        return _Pool(prefill, decode, nodes, list(map(max, fetchable, in_engines)), fetchable, in_engines)

    def _node(self, member: PrefillMember) -> NodeMember | None:
        node = self._directory.members.named(member.report.node)
        return node if node is not None and node.is_live else None

    def _place(self, request: ScheduleRequest, pool: _Pool, now_ns: int) -> Decision | Rejection:
        """Dispatch the request, subject to admission control."""
        lets_all_in = isinstance(self._admission, AdmitAll)
        tried = request if lets_all_in else replace(request, slo=Slo(request.slo.ttft_s))
        outcome = self._dispatch(tried, pool, range(len(pool.prefill)), now_ns)
        if isinstance(outcome, Decision):
            outcome = self._possible(outcome, tried, pool, now_ns)
        if lets_all_in or isinstance(outcome, Rejection):
            return outcome
        decode_s = self._decode_duration.seconds
        load = pool_load(pool.decode, decode_s=decode_s, input_tokens=request.input_tokens, now_ns=now_ns)
        return self._admission.on_arrival(load, request.slo, ttft_s=outcome.ttft_s) or outcome

    def _dispatch(self, request: ScheduleRequest, pool: _Pool, among: Sequence[int], now_ns: int) -> Decision | Rejection:
        """Return the dispatcher's choice among these prefill instances."""
        outcome = self._dispatcher.dispatch(
            request,
            [pool.matches[index] for index in among],
            [pool.prefill[index].view(now_ns) for index in among],
            [member.view(now_ns) for member in pool.decode],
            [pool.fetchable[index] for index in among],
        )
        if isinstance(outcome, Rejection):
            return outcome
        sender = None if outcome.transfer_from is None else among[outcome.transfer_from]
        return replace(outcome, prefill=among[outcome.prefill], transfer_from=sender)

    def _possible(self, decision: Decision, request: ScheduleRequest, pool: _Pool, now_ns: int) -> Decision | Rejection:
        """Correct a decision for an instance without a live node, which cannot receive a transfer as dispatchers
        assume: it computes all blocks that its engine lacks, unless another instance is faster."""
        if decision.transfer_from is None or pool.nodes[decision.prefill] is not None:
            return decision
        own = pool.matches[decision.prefill]
        prefill_s = self.estimators.prefill_s(request.input_tokens, request.prefix_tokens(own))
        computed = replace(decision, prefix_blocks=own, transfer_from=None, transfer_blocks=0, transfer_s=0.0, prefill_s=prefill_s)
        with_node = [index for index, node in enumerate(pool.nodes) if node is not None]
        other = self._dispatch(request, pool, with_node, now_ns)
        if isinstance(other, Decision) and other.ttft_s <= computed.ttft_s:
            return other
        return check_slo(request.slo, ttft_s=computed.ttft_s, tbt_s=computed.tbt_s) or computed

    def _reply(self, decision: Decision, pool: _Pool) -> pb.ScheduleReply:
        prefill, decode = pool.prefill[decision.prefill].report, pool.decode[decision.decode].report
        return pb.ScheduleReply(
            request_id=next(self._request_ids),
            prefill=prefill.name,
            decode=decode.name,
            prefill_address=prefill.address,
            decode_address=decode.address,
            prefix_blocks=decision.prefix_blocks,
            transfer_from="" if decision.transfer_from is None else pool.prefill[decision.transfer_from].report.name,
            transfer_blocks=decision.transfer_blocks,
            transfer_s=decision.transfer_s,
            queue_s=decision.queue_s,
            prefill_s=decision.prefill_s,
            tbt_s=decision.tbt_s,
        )

    def _promise(self, request_id: int, decision: Decision, request: ScheduleRequest, pool: _Pool, now_ns: int) -> None:
        """Promise the request to the prefill instance now, and to the decode instance after its first token. An
        instance with both roles has it, and may report it in its batch, from the beginning."""
        prefill, decode = pool.prefill[decision.prefill], pool.decode[decision.decode]
        prefill_ns, ttft_ns = round(decision.prefill_s * NS_PER_S), round(decision.ttft_s * NS_PER_S)
        at_prefill = PromisedWork(now_ns, now_ns + self._decision_ttl_ns, prefill_ns=prefill_ns)
        at_decode = PromisedWork(now_ns + ttft_ns, now_ns + ttft_ns + self._decision_ttl_ns, context_tokens=request.input_tokens)
        prefill.promise(request_id, at_prefill)
        decode.promise(request_id, at_decode._replace(sent_ns=now_ns) if decode.report.role == pb.ROLE_BOTH else at_decode)

    def _start_promotion(self, prompt: ScheduledPrompt, decision: Decision, pool: _Pool) -> None:
        """Have the chosen node read its blocks of the prompt from NVMe while the request waits in the engine's queue,
        except those that the engine has in its own memory."""
        node = pool.nodes[decision.prefill]
        keys = prompt.keys[pool.in_engines[decision.prefill] : pool.fetchable[decision.prefill]]
        if node is not None and keys and any(tier.name == "nvme" for tier in node.tiers):
            self.counters["promoted_blocks"] += self._promote(prompt.tenant, keys, node_id=node.node_id)

    def _start_transfer(self, prompt: ScheduledPrompt, decision: Decision, sender: int, pool: _Pool, now_ns: int) -> None:
        source, target = pool.nodes[sender], pool.nodes[decision.prefill]
        assert source is not None, "an instance without a node has no prefix to send"
        assert target is not None, "see _possible"
        end = decision.prefix_blocks
        keys = prompt.keys[end - decision.transfer_blocks : end]
        ordered = self._replicate(prompt.tenant, keys, node_id=target.node_id, source_node_id=source.node_id)
        if ordered:  # blocks under way for an earlier request are sent once
            pool.prefill[sender].send(ordered * self.estimators.block_bytes, now_ns)
            self.counters["transfers"] += 1
            self.counters["transfer_blocks"] += ordered


def _status(member: Instance, engine_blocks: int, now_ns: int) -> pb.InstanceStatus:
    member.forget_lost(now_ns)
    return pb.InstanceStatus(
        report=member.report,
        report_age_s=(now_ns - member.reported_ns) / NS_PER_S,
        unseen_requests=member.unseen_requests,
        unseen_s=member.unseen_s,
        scheduled=member.scheduled,
        engine_blocks=engine_blocks,
    )


def make_estimators(settings: MasterSettings) -> LiveEstimators:
    """Raises ConfigError: model or GPU is unknown, one is given without the other, or the model does not fit."""
    if bool(settings.scheduler_model) != bool(settings.scheduler_gpu):
        raise ConfigError("scheduler_model and scheduler_gpu go together: give both, or neither")
    if not settings.scheduler_model:
        return LiveEstimators(None)
    model, gpu = find_model(settings.scheduler_model), find_gpu(settings.scheduler_gpu)
    return LiveEstimators(AnalyticModel(model, gpu, gpus=settings.scheduler_gpus))
