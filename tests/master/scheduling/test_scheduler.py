"""Tests of scheduler.py, on a directory with blocks in it, and with no clock but the test's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvstore.master.config import MasterSettings
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.scheduling.scheduler import MAX_PROMPT_BLOCKS, MAX_TOKENS, UNKNOWN_OUTPUT_TOKENS, ClusterScheduler, ScheduledPrompt
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import EVENT_MOVED
from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.protocol.message import TIER_BITS
from kvstore.scheduler.request import Slo
from tests.master.blocks import TENANT, Event, Master, S
from tests.master.scheduling.reports import both, decode, prefill

KEYS = [b"%04d" % number for number in range(100)]
PROMPT = ScheduledPrompt(tenant=TENANT, keys=KEYS, block_tokens=100, input_tokens=10_050, output_tokens=100, slo=Slo())
"""A prefill of 1.005 s by the guess, 0.01 s a block."""


class Scheduled:
    """A directory, nodes a, b and c, and the scheduling before it. Prefill instance pX has its blocks at node X."""

    def __init__(self, dispatcher: str = "kvcache_centric", *, admission: str = "all", max_instances: int = 100) -> None:
        self.master = Master()
        self.nodes: dict[str, NodeMember] = {name: self.master.register(name, number) for number, name in enumerate("abc", start=1)}
        self.copies: list[tuple[str, list[bytes], int, int]] = []
        self.now_ns = 0
        settings = MasterSettings(dispatcher=dispatcher, admission=admission, max_instances=max_instances, decision_ttl_s=3.0)
        self.promotions: list[tuple[str, list[bytes], int]] = []
        self.scheduling = ClusterScheduler(
            settings, self.master.directory, replicate=self._replicate, promote=self._promote, wall_ns=1_000_000
        )

    def _promote(self, tenant: str, keys: Sequence[bytes], *, node_id: int) -> int:
        cold = self.master.directory.queries.outside_dram(tenant, keys, node_id)
        self.promotions.append((tenant, cold, node_id))
        return len(cold)

    def _replicate(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int) -> int:
        replication = self.master.directory.replication
        orders = replication.plan(tenant, keys, node_id=node_id, source_node_id=source_node_id, now_ns=self.now_ns)
        self.copies += [(tenant, order.keys, node_id, source_node_id) for order in orders]
        return sum(len(order.keys) for order in orders)

    def hold(self, name: str, count: int, *, size: int = 1000) -> None:
        self.master.sync(self.nodes[name], *(Event(key, size=size) for key in KEYS[:count]))

    def report(self, *reports: pb.ReportRequest) -> None:
        for report in reports:
            self.scheduling.report(report, self.now_ns)

    def ask(self, prompt: ScheduledPrompt = PROMPT) -> pb.ScheduleReply:
        return self.scheduling.schedule(prompt, self.now_ns)

    def shown(self) -> dict[str, pb.InstanceStatus]:
        return {each.report.name: each for each in self.scheduling.show(self.now_ns).instances}


@pytest.fixture
def live() -> Scheduled:
    """pa has 80 blocks, pb 20, pc none; one decode instance."""
    scheduled = Scheduled()
    scheduled.hold("a", 80)
    scheduled.hold("b", 20)
    scheduled.report(prefill("pa", node="a"), prefill("pb", node="b"), prefill("pc", node="c"), decode("d"))
    return scheduled


def test_a_request_goes_where_its_longest_prefix_is(live: Scheduled) -> None:
    reply = live.ask()
    assert (reply.prefill, reply.decode, reply.prefill_address, reply.decode_address) == ("pa", "d", "http://pa", "http://d")
    assert (reply.prefix_blocks, reply.transfer_from, reply.transfer_blocks) == (80, "", 0)
    assert reply.prefill_s == pytest.approx(0.205)
    assert live.copies == []
    assert (reply.request_id, live.ask().request_id) == (1000, 1001)


def test_where_the_holder_is_busy_its_blocks_are_sent_to_another(live: Scheduled) -> None:
    live.report(prefill("pa", node="a", queue_s=20.0, send_bytes_per_s=1e6, send_backlog_bytes=20_000))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from, reply.transfer_blocks) == ("pb", 80, "pa", 60)
    assert reply.transfer_s == pytest.approx(60 * 1000 / 1e6 + 0.02)
    assert live.copies == [(TENANT, KEYS[20:80], live.nodes["b"].node_id, live.nodes["a"].node_id)]
    counters = live.scheduling.show(0).counters
    assert (counters["scheduled"], counters["transfers"], counters["transfer_blocks"]) == (1, 1, 60)
    assert live.ask().transfer_s > reply.transfer_s, "what was ordered first is sent first"


def test_transfer_under_way_is_counted_once(live: Scheduled) -> None:
    live.report(prefill("pa", node="a", queue_s=20.0, send_bytes_per_s=1e6))
    replies = [live.ask() for _ in range(4)]
    to_b = [reply for reply in replies if reply.prefill == "pb"]
    assert [(reply.transfer_from, reply.transfer_blocks) for reply in to_b] == [("pa", 60)] * len(to_b)
    assert len(to_b) > 1
    assert [copy[1:] for copy in live.copies].count((KEYS[20:80], live.nodes["b"].node_id, live.nodes["a"].node_id)) == 1
    counters = live.scheduling.show(0).counters
    assert counters["transfers"] == len(live.copies)
    assert counters["transfer_blocks"] == sum(len(keys) for _tenant, keys, _to, _from in live.copies)
    sent = live.scheduling.instances.prefill["pa"].view(0).send_backlog_bytes
    assert sent == pytest.approx(1000 * counters["transfer_blocks"], abs=1)


def test_slow_rate_selects_computing_or_another_source(live: Scheduled) -> None:
    """As the nodes measured, as long as that counts: here 60 s."""
    live.report(prefill("pa", node="a", queue_s=20.0))
    assert live.ask().transfer_from == "pa"
    for name in "bc":
        node = live.nodes[name]
        slow = pb.PeerRate(node_id=live.nodes["a"].node_id, bytes_per_s=1000.0, basis_bytes=1 << 20)
        live.master.directory.set_rates(node.node_id, node.epoch, [slow], live.now_ns)
    reply = live.ask()
    assert (reply.transfer_from, reply.transfer_blocks) == ("", 0), "60 s or more, and computed in less than one"
    live.now_ns = 60 * S
    live.report(prefill("pa", node="a", queue_s=20.0), prefill("pb", node="b"), prefill("pc", node="c"), decode("d"))
    assert live.ask().transfer_from == "pa", "what was measured a minute ago counts no more"


def test_instance_without_a_live_node_computes() -> None:
    live = Scheduled()
    live.hold("a", 80)
    live.report(prefill("pa", node="a", queue_s=20.0), prefill("px", node="unheard of"), prefill("py"), decode("d"))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from, reply.transfer_s) == ("px", 0, "", 0)
    assert reply.prefill_s == pytest.approx(1.005)
    assert live.copies == []
    late = live.ask(replace(PROMPT, slo=Slo(ttft_s=0.5)))
    assert (late.rejected, late.rejected_limit) == ("ttft", 0.5)


def test_the_blocks_of_a_node_that_died_are_nobodys(live: Scheduled) -> None:
    node = live.nodes["a"]
    live.master.directory.disconnected(node.node_id, node.epoch, 0)
    live.report(prefill("pb", node="b", queue_s=0.1), prefill("pc", node="c", queue_s=0.15))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from) == ("pb", 20, ""), "idle, but nothing can be sent to pa"
    live.report(prefill("pb", node="b", queue_s=0.3))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from) == ("pc", 20, "pb")
    live.report(prefill("pb", node="b", queue_s=0.3), prefill("pc", node="c", queue_s=0.3))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from) == ("pa", 0, "")


def test_a_burst_is_spread_before_anyone_has_reported_it() -> None:
    live = Scheduled()
    live.report(*(prefill(f"p{number}", node="c") for number in range(4)), decode("d0"), decode("d1"))
    replies = [live.ask() for _ in range(8)]
    assert sorted(reply.prefill for reply in replies) == sorted(["p0", "p1", "p2", "p3"] * 2)
    assert [reply.decode for reply in replies].count("d0") == 4
    assert [reply.queue_s for reply in replies] == pytest.approx([0.0] * 4 + [1.005] * 4)


def test_what_an_instance_has_seen_it_counts_itself(live: Scheduled) -> None:
    reply = live.ask()
    assert (live.shown()["pa"].unseen_requests, live.shown()["d"].unseen_requests) == (1, 1)
    assert live.shown()["pa"].unseen_s == pytest.approx(reply.prefill_s)
    live.report(prefill("pa", node="a", seen_request_ids=[reply.request_id]), decode("d", seen_request_ids=[reply.request_id]))
    assert (live.shown()["pa"].unseen_requests, live.shown()["d"].unseen_requests) == (0, 0)
    assert live.shown()["pa"].scheduled == 1


def test_decode_instance_may_report_until_first_token(live: Scheduled) -> None:
    live.report(*(prefill(name, node="c", queue_s=4.0) for name in ("pa", "pb", "pc")))
    live.ask()
    live.now_ns = int(4.9 * S)
    assert live.shown()["d"].unseen_requests == 1
    assert sum(each.unseen_requests for each in live.shown().values()) == 1, "the prefill instance should have had it at once"
    live.now_ns = int(8.1 * S)
    assert live.shown()["d"].unseen_requests == 0


def test_without_instances_of_either_role_it_goes_nowhere() -> None:
    live = Scheduled()
    assert live.ask().rejected == "no_instance"
    live.report(prefill("p"))
    assert live.ask().rejected == "no_instance"
    live.scheduling.instances.leave("p")
    live.report(decode("d"))
    reply = live.ask()
    assert (reply.rejected, reply.request_id, reply.prefill) == ("no_instance", 0, "")
    assert live.scheduling.show(0).counters["rejected_no_instance"] == 3


def test_broken_slo_is_a_rejection_with_its_figures(live: Scheduled) -> None:
    reply = live.ask(replace(PROMPT, slo=Slo(ttft_s=0.1)))
    assert (reply.rejected, reply.rejected_limit) == ("ttft", 0.1)
    assert reply.rejected_value == pytest.approx(0.205)
    assert live.ask(replace(PROMPT, slo=Slo(tbt_s=0.001))).rejected == "tbt"
    assert all(each.unseen_requests == 0 for each in live.shown().values()), "nothing was promised"


def test_early_admission_uses_the_reported_decode_load() -> None:
    live = Scheduled(admission="early")
    live.report(prefill("p"), decode("d", batch=100, context_tokens=4_000_000))
    slo = Slo(tbt_s=0.05)
    reply = live.ask(replace(PROMPT, slo=slo))
    assert (reply.rejected, reply.rejected_limit) == ("decode_load", 0.05)
    assert reply.rejected_value > 0.1
    live.report(decode("d", batch=1, context_tokens=100))
    assert live.ask(replace(PROMPT, slo=slo)).prefill == "p"


def test_predicted_admission_does_not_count_what_will_have_ended() -> None:
    live = Scheduled(admission="predicted")
    slo = Slo(tbt_s=0.05)
    live.report(prefill("p"), decode("d", batch=100, context_tokens=4_000_000))
    assert live.ask(replace(PROMPT, slo=slo)).rejected == "decode_load", "as long as nobody knows how long they take, none will have ended"
    short = replace(PROMPT, output_tokens=1)
    assert live.ask(short).prefill == "p"
    live.report(
        prefill("p", seen_request_ids=[1000], queue_s=5.0), decode("d", batch=100, context_tokens=4_000_000, seen_request_ids=[1000])
    )
    assert live.ask(replace(short, slo=slo)).prefill == "p"


def test_unknown_output_length_uses_the_default(live: Scheduled) -> None:
    room = PROMPT.input_tokens + UNKNOWN_OUTPUT_TOKENS
    live.report(decode("d", capacity_tokens=room - 1))
    assert live.ask(replace(PROMPT, output_tokens=0)).rejected == "capacity"
    live.report(decode("d", capacity_tokens=room))
    assert live.ask(replace(PROMPT, output_tokens=0)).decode == "d"


def test_the_dispatcher_is_a_choice() -> None:
    live = Scheduled("round_robin")
    live.hold("a", 80)
    live.report(prefill("pa", node="a"), prefill("pb", node="b"), decode("d"))
    assert [live.ask().prefill for _ in range(4)] == ["pa", "pb", "pa", "pb"]
    assert live.scheduling.show(0).dispatcher == "round_robin"


def test_plausible_measurements_are_learned() -> None:
    live = Scheduled(max_instances=1)
    samples = [pb.PrefillSample(input_tokens=100 * n, duration_s=n) for n in range(1, 33)]
    with pytest.raises(InvalidArgument):
        live.report(prefill("p", prefill_samples=[*samples, pb.PrefillSample(input_tokens=1, prefix_tokens=2, duration_s=1)]))
    assert live.shown() == {}
    live.report(decode("d"))
    with pytest.raises(Full):
        live.report(prefill("p", prefill_samples=samples))
    assert live.scheduling.show(0).estimators == "prefill: a linear guess; decode: a linear guess"
    live.report(decode("d", prefill_samples=samples))
    assert live.scheduling.show(0).estimators.startswith("prefill: fitted to 32 samples")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input_tokens": 0, "keys": []}, "input_tokens is 0"),
        ({"input_tokens": MAX_TOKENS + 1}, "input_tokens is"),
        ({"output_tokens": MAX_TOKENS + 1}, "output_tokens is"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"input_tokens": 9_999}, "100 keys of blocks of 100 tokens for a prompt of 9999"),
        ({"keys": [b"k"] * (MAX_PROMPT_BLOCKS + 1), "block_tokens": 1, "input_tokens": MAX_TOKENS}, "at most 65536"),
        ({"keys": [b"a", b""]}, "1 to 255 bytes"),
        ({"keys": [b"a" * 256]}, "1 to 255 bytes"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        replace(PROMPT, **changes)  # type: ignore[arg-type]


def test_blocks_in_nvme_are_brought_up_for_the_decision(live: Scheduled) -> None:
    node = live.nodes["a"]
    live.master.publish(node, *(Event(key, kind=EVENT_MOVED, size=1000, tiers=TIER_BITS["nvme"]) for key in KEYS[20:30]))
    assert live.ask().prefill == "pa"
    assert live.promotions == [], "a node without NVMe, as far as is known"
    node.tiers = [pb.TierStatus(name="dram"), pb.TierStatus(name="nvme")]
    for has, expected in ((0, KEYS[20:30]), (25, KEYS[25:30])):
        live.scheduling.leave("pa")
        live.report(prefill("pa", node="a", engine_cache=engine_cache(has)))
        assert live.ask().prefill == "pa"
        assert live.promotions.pop() == (TENANT, expected, node.node_id)
    assert live.scheduling.show(0).counters["promoted_blocks"] == 15


def engine_cache(count: int) -> pb.EngineCache:
    return pb.EngineCache(tenant=TENANT, version=1, key_bytes=4, added=b"".join(KEYS[:count]))


def test_engine_cache_is_neither_computed_nor_fetched(live: Scheduled) -> None:
    live.report(prefill("pc", node="c", engine_cache=engine_cache(90)))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from) == ("pc", 90, "")
    live.report(prefill("pa", node="a", queue_s=20.0), prefill("pc", node="c", queue_s=20.0))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from) == ("pb", 80, "pa"), "others have it from nodes only"
    live.scheduling.leave("pc")
    live.report(prefill("pc", node="c"))
    assert live.ask().prefix_blocks == 80


def test_engine_without_a_node_computes_its_misses() -> None:
    live = Scheduled()
    live.hold("a", 80)
    live.report(prefill("pa", node="a", queue_s=20.0), prefill("px", engine_cache=engine_cache(40)), decode("d"))
    reply = live.ask()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from) == ("px", 40, "")
    assert reply.prefill_s == pytest.approx(0.605)


def test_an_engine_that_is_silent_is_forgotten_with_its_cache(live: Scheduled) -> None:
    live.report(prefill("pc", node="c", engine_cache=engine_cache(90)))
    assert sorted(live.scheduling.run_due(5 * S)) == ["d", "pa", "pb", "pc"]
    assert live.scheduling.engine_caches.version("pc") == 0


def test_a_report_with_an_impossible_cache_changes_nothing(live: Scheduled) -> None:
    with pytest.raises(InvalidArgument, match="whole keys"):
        live.report(prefill("new", engine_cache=pb.EngineCache(version=1, key_bytes=3, added=b"1234")))
    assert live.scheduling.instances.get("new") is None


def test_one_that_does_both_decodes_what_it_prefills() -> None:
    live = Scheduled()
    live.hold("a", 80)
    live.report(both("b0", node="b"), both("b1", node="a"), decode("d"))
    reply = live.ask()
    assert (reply.prefill, reply.decode) == ("b1", "b1")
    assert live.shown()["b1"].unseen_requests == 1
    live.report(both("b1", node="a", capacity_tokens=1))
    reply = live.ask()
    assert (reply.prefill, reply.decode, reply.transfer_from) == ("b0", "b0", "b1")


def test_what_waits_in_an_engine_that_does_both_is_counted_once() -> None:
    """Its figures have a request from when it was sent; its first token is foreseen much later."""

    def told(**load: float) -> pb.ReportRequest:
        return both("b", queue_s=20.0, capacity_tokens=45_000, seen_after_s=1.0, **load)

    live = Scheduled()
    live.report(told())
    member = live.scheduling.instances.decode["b"]
    assert [live.ask().decode, live.ask().decode] == ["b", "b"]
    assert (member.unseen_requests, member.view(live.now_ns).context_tokens) == (2, 20_100)
    live.now_ns = S
    live.report(told(batch=2, context_tokens=20_100))
    assert (member.unseen_requests, member.view(live.now_ns).context_tokens) == (0, 20_100)
    assert live.ask().decode == "b", "there is room for a third"
    live.now_ns = 2 * S - 1
    live.report(told(batch=2, context_tokens=20_100))
    assert (member.unseen_requests, member.view(live.now_ns).batch) == (1, 3), "which was sent less than a second ago"
