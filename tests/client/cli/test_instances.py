"""Promises of instances.py, through the command, against a real master."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvstore.client.cli.instances import instances, instances_view
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, Role, SchedulerClient
from kvstore.protocol import control_pb2 as pb
from tests.master.running import master_in_thread


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    with master_in_thread(tmp_path, instance_ttl_s=60.0) as places, SchedulerClient(ClientSettings(master=places.listen)) as client:
        client.report(InstanceReport(name="d", role=Role.DECODE, address="http://d", batch=3, context_tokens=12_345))
        client.report(InstanceReport(name="p", role=Role.PREFILL, address="http://p", node="node-0", queue_s=2.0))
        client.schedule([], block_tokens=1, input_tokens=10_000)
        yield places.listen


def output(master: str, *arguments: str) -> str:
    result = CliRunner().invoke(instances, [*arguments, "--master", master], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_has_everything_the_master_says(master: str) -> None:
    found = json.loads(output(master, "--json"))
    assert found["dispatcher"] == "kvcache_centric"
    assert found["counters"] == {"scheduled": 1, "transfers": 0, "transfer_blocks": 0}
    prefill = {each["report"]["name"]: each for each in found["instances"]}["p"]
    assert (prefill["unseen_requests"], prefill["unseen_s"], prefill["scheduled"], prefill["report"]["node"]) == (1, 1.0, 1, "node-0")


def test_the_table_tells_who_waits_and_who_decodes(master: str) -> None:
    text = output(master)
    assert "http://p" in text
    assert "1 scheduled, 0 rejected; 0 transfers of 0 blocks" in text


def test_a_row_is_an_instance_prefill_first() -> None:
    found = pb.InstancesReply(
        dispatcher="kvcache_centric",
        estimators="in words",
        counters={"scheduled": 1200, "rejected_ttft": 3, "rejected_tbt": 1, "transfers": 2, "transfer_blocks": 50},
        instances=[
            pb.InstanceStatus(report=pb.ReportRequest(name="d", role=pb.ROLE_DECODE, address="A", batch=3, context_tokens=12_345)),
            pb.InstanceStatus(
                report=pb.ReportRequest(name="p", role=pb.ROLE_PREFILL, address="B", node="n", queue_s=2),
                unseen_requests=2,
                unseen_s=1.5,
                scheduled=7,
                engine_blocks=1500,
                report_age_s=0.3,
            ),
        ],
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(instances_view(found))
    header, first, second, _, decided, words = [line.split() for line in console.export_text().splitlines()]
    assert header[:4] == ["instance", "role", "address", "node"]
    assert first == ["p", "prefill", "B", "n", "3.50", "s", "-", "1,500", "7", "0.3", "s", "ago"]
    assert second == ["d", "decode", "A", "-", "-", "3", "-", "0", "0.0", "s", "ago"]
    assert " ".join(decided) == "1,200 scheduled, 4 rejected (1 tbt, 3 ttft); 2 transfers of 50 blocks"
    assert " ".join(words) == "kvcache_centric; in words"
