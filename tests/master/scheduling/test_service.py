"""Tests of service.py, over real gRPC, with a master whose nodes are played by the test."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import CopyBlocks
from kvstore.protocol.control_pb2_grpc import SchedulerStub
from kvstore.security.grpc_metadata import as_metadata
from tests.master.blocks import Event
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread
from tests.master.scheduling.reports import decode, prefill

KEYS = [b"%d" % number for number in range(10)]


class Asked:
    """The service, as its callers have it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = SchedulerStub(channel)  # type: ignore[no-untyped-call]

    def report(self, *reports: pb.ReportRequest) -> pb.ReportReply:
        replies: list[pb.ReportReply] = [self._stub.Report(report, timeout=TIMEOUT_S) for report in reports]
        return replies[-1]

    def schedule(self, *, token: str = "", **fields: object) -> pb.ScheduleReply:
        request = pb.ScheduleRequest(tenant="red", keys=KEYS, block_tokens=1000, input_tokens=10_000)
        request.MergeFrom(pb.ScheduleRequest(**fields))  # type: ignore[arg-type]
        credentials = as_metadata(request.tenant, token) if token else ()
        reply: pb.ScheduleReply = self._stub.Schedule(request, timeout=TIMEOUT_S, metadata=credentials)
        return reply

    def leave(self, name: str) -> None:
        self._stub.Leave(pb.LeaveRequest(name=name), timeout=TIMEOUT_S)

    def instances(self) -> pb.InstancesReply:
        reply: pb.InstancesReply = self._stub.Instances(pb.InstancesRequest(), timeout=TIMEOUT_S)
        return reply


@contextlib.contextmanager
def asked(places: Places) -> Iterator[Asked]:
    with grpc.insecure_channel(places.control) as channel:
        yield Asked(channel)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, node_ttl_s=60.0, instance_ttl_s=60.0, report_interval_s=0.125) as found:
        yield found


@pytest.fixture
def service(places: Places) -> Iterator[Asked]:
    with asked(places) as found:
        yield found


def test_schedule_places_by_prefix_and_orders_the_transfer(places: Places, service: Asked) -> None:
    one, two = NodeSide(places, "one", 1), NodeSide(places, "two", 2)
    one.sync(*(Event(key) for key in KEYS[:8]))
    two.sync(*(Event(key) for key in KEYS[:3]))
    service.report(prefill("p1", node="one"), prefill("p2", node="two"), decode("d"))
    reply = service.schedule()
    assert (reply.prefill, reply.decode, reply.prefix_blocks, reply.transfer_from) == ("p1", "d", 8, "")
    service.report(prefill("p1", node="one", queue_s=30.0))
    reply = service.schedule()
    assert (reply.prefill, reply.prefix_blocks, reply.transfer_from, reply.transfer_blocks) == ("p2", 8, "p1", 5)
    header, body = two.read()
    assert header.type == CopyBlocks.TYPE
    assert CopyBlocks.unpack(memoryview(body)).keys == KEYS[3:8]
    one.close()
    two.close()


def test_a_report_is_answered_with_the_interval_and_shown(service: Asked, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstore.master")
    assert service.report(prefill("p", queue_s=2.5), prefill("p", queue_s=3.5)).report_interval_s == 0.125
    (shown,) = service.instances().instances
    assert shown.report == prefill("p", queue_s=3.5)
    assert 0 <= shown.report_age_s < TIMEOUT_S
    assert [message for message in caplog.messages if "joined" in message] == ["instance p (ROLE_PREFILL) has joined, at http://p"]
    service.leave("p")
    service.leave("p")
    assert not service.instances().instances


def test_two_engines_of_one_name_are_a_line_in_the_log(service: Asked, caplog: pytest.LogCaptureFixture) -> None:
    for place in "xyxyxy":
        service.report(prefill("p", address=f"http://{place}"))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "two engines have the name p, at http://y and at http://x: each replaces the other; give them different names"
    ]


def test_an_slo_of_zero_is_none_and_a_negative_one_is_refused(service: Asked) -> None:
    service.report(prefill("p", queue_s=100.0), decode("d"))
    assert service.schedule(ttft_slo_s=0.0).prefill == "p"
    assert service.schedule(ttft_slo_s=50.0).rejected == "ttft"
    wrong: dict[str, Any]
    for field in ("ttft_slo_s", "tbt_slo_s"):
        wrong = {field: -1.0}
        with pytest.raises(grpc.RpcError) as refused:
            service.schedule(**wrong)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field.replace("_slo", "") in str(refused.value.details())


def test_errors_become_the_status_of_their_branch(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, max_instances=1) as places, asked(places) as service:
        with pytest.raises(grpc.RpcError) as nameless:
            service.report(prefill(""))
        service.report(prefill("p"))
        with pytest.raises(grpc.RpcError) as full:
            service.report(decode("d"))
        with pytest.raises(grpc.RpcError) as odd:
            service.schedule(input_tokens=9_999)
    assert nameless.value.code() == odd.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_silent_instance_leaves_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with master_in_thread(tmp_path, instance_ttl_s=0.02, report_interval_s=0.01) as places, asked(places) as service:
        service.report(prefill("p"))
        while service.instances().instances:
            pass
    assert "instance p is silent for 0.02 s and gets no more requests" in caplog.messages
