"""Promises of instances.py, through the command, against a real master."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.instances import instances
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, SchedulerClient
from tests.master.running import master_in_thread


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    with master_in_thread(tmp_path, instance_ttl_s=60.0) as places, SchedulerClient(ClientSettings(master=places.listen)) as client:
        client.report(InstanceReport(name="d", role=InstanceRole.DECODE, address="http://d", batch=3, context_tokens=12_345))
        client.report(InstanceReport(name="p", role=InstanceRole.PREFILL, address="http://p", node="node-0", queue_s=2.0))
        client.schedule([], block_tokens=1, input_tokens=10_000)
        yield places.listen


def output(master: str, *arguments: str) -> str:
    result = CliRunner().invoke(instances, [*arguments, "--master", master], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_has_everything_the_master_says(master: str) -> None:
    found = json.loads(output(master, "--json"))
    assert found["dispatcher"] == "kvcache_centric"
    assert found["counters"] == {"scheduled": 1, "transfers": 0, "transfer_blocks": 0, "promoted_blocks": 0}
    prefill = {each["report"]["name"]: each for each in found["instances"]}["p"]
    assert (prefill["unseen_requests"], prefill["unseen_s"], prefill["scheduled"], prefill["report"]["node"]) == (1, 1.0, 1, "node-0")


def test_the_table_tells_who_waits_and_who_decodes(master: str) -> None:
    text = output(master)
    assert "http://p" in text
    assert "1 scheduled, 0 rejected; 0 transfers of 0 blocks, 0 blocks brought up from NVMe" in text
