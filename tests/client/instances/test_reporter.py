"""Promises of reporter.py, against real masters that come and go."""

import dataclasses
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.instances import reporter as module
from kvstore.client.instances.client import InstanceReport, InstanceReportReply, InstanceRole, RequestPlacement, SchedulerClient
from kvstore.client.instances.reporter import Reporter
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample
from tests.line_child import LineChild
from tests.master.running import Places, master_in_thread
from tests.ports import free_ports

PREFILL = InstanceReport(name="p", role=InstanceRole.PREFILL, address="http://p")
DECODE = InstanceReport(name="d", role=InstanceRole.DECODE, address="http://d")
TIMEOUT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again, of a master: each question takes its time."""
    deadline = Deadline(TIMEOUT_S)
    while not condition():
        deadline.left_s()


def connected(places: Places, *others: str, deadline_s: float = 10.0) -> SchedulerClient:
    return SchedulerClient(ClientSettings(master=",".join((places.listen, *others)), deadline_s=deadline_s))


def credentials(client: SchedulerClient) -> dict[str, pb.InstanceStatus]:
    try:
        return {each.report.name: each for each in client.instances().instances}
    except KVStoreError:
        return {}


def test_reporter_registers_and_removes_the_instance(tmp_path: Path) -> None:
    queue_s = [1.0]
    with master_in_thread(tmp_path, report_interval_s=0.01) as places, connected(places) as client:
        with Reporter(client, lambda: dataclasses.replace(PREFILL, queue_s=queue_s[0])) as reporter:
            until(lambda: "p" in credentials(client))
            queue_s[0] = 2.0
            until(lambda: credentials(client)["p"].report.queue_s == 2.0)
        assert credentials(client) == {}
        reporter.close()


def test_what_was_seen_and_measured_is_told_once(tmp_path: Path) -> None:
    told: list[InstanceReport] = []

    class Listening(SchedulerClient):
        def report(self, report: InstanceReport) -> InstanceReportReply:
            told.append(report)
            return super().report(report)

    with (
        master_in_thread(tmp_path, report_interval_s=0.01, instance_ttl_s=600.0) as places,
        Listening(ClientSettings(master=places.listen)) as client,
    ):
        client.report(DECODE)
        with Reporter(client, lambda: dataclasses.replace(PREFILL, seen_request_ids=[99])) as reporter:
            until(lambda: "p" in credentials(client))
            placed = client.schedule([], block_tokens=1, input_tokens=1000)
            assert isinstance(placed, RequestPlacement)
            assert credentials(client)["p"].unseen_requests == 1
            reporter.saw(placed.request_id)
            reporter.prefilled(input_tokens=10, prefix_tokens=5, duration_s=0.5)
            reporter.decoded(batch=2, context_tokens=30, duration_s=0.25)
            with pytest.raises(InvalidArgument):
                reporter.prefilled(input_tokens=10, prefix_tokens=50, duration_s=0.5)
            until(lambda: credentials(client)["p"].unseen_requests == 0)
            count = len(told)
            until(lambda: len(told) > count + 1)
    assert [number for report in told for number in report.seen_request_ids] == [placed.request_id]
    assert [sample for report in told for sample in report.prefill_samples] == [PrefillSample(10, 5, 0.5)]
    assert [sample for report in told for sample in report.decode_samples] == [DecodeSample(2, 30, 0.25)]


def test_reporter_resends_events_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "MAX_SAMPLES", 32)
    failures = threading.Semaphore(0)
    caplog.set_level("WARNING", logger="kvstore.client")
    port, control = free_ports(2)
    places = {"listen": f"127.0.0.1:{port}", "control": f"127.0.0.1:{control}", "report_interval_s": 0.01}

    class Counting(SchedulerClient):
        def report(self, report: InstanceReport) -> InstanceReportReply:
            try:
                return super().report(report)
            except KVStoreError:
                failures.release()
                raise

    with Counting(ClientSettings(master=str(places["listen"]))) as client:
        with Reporter(client, lambda: PREFILL) as reporter:
            for _ in range(3):
                assert failures.acquire(timeout=TIMEOUT_S)
            for number in range(1, 50):
                reporter.prefilled(input_tokens=100 * number, prefix_tokens=10, duration_s=float(number))
            for _ in range(3):
                assert failures.acquire(timeout=TIMEOUT_S)
            with master_in_thread(tmp_path / "one", **places):
                until(lambda: "p" in credentials(client))
                assert client.instances().estimators.startswith("prefill: fitted to 32 samples")
            with master_in_thread(tmp_path / "two", **places):
                until(lambda: "p" in credentials(client))
    told = ["again" if message == "instance p reports again" else message[:27] for message in caplog.messages]
    assert set(told) == {"the report of instance p fa", "again"}
    assert all(one != other for one, other in pairwise(caplog.messages)), "said once each time, and anew where the reason is another"


def test_close_is_bounded_while_a_report_hangs(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def state() -> InstanceReport:
        entered.set()
        assert release.wait(TIMEOUT_S)
        return PREFILL

    with master_in_thread(tmp_path) as places, connected(places, deadline_s=0.05) as client:
        reporter = Reporter(client, state)
        assert entered.wait(TIMEOUT_S)
        reporter.close()
        assert reporter._thread.is_alive()
        release.set()
        reporter._thread.join(TIMEOUT_S)
        assert not reporter._thread.is_alive()


def test_one_that_nobody_has_any_more_makes_no_further_report(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, report_interval_s=0.01) as places, connected(places) as client:
        reporter = Reporter(client, lambda: PREFILL)
        until(lambda: "p" in credentials(client))
        thread = reporter._thread
        del reporter
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_interrupted_start_leaves_no_thread() -> None:
    with LineChild("tests.client.instances.struck_reporter", "200") as child:
        assert child.answer()["struck"] > 0
