"""Promises of engine.py as a program; what it does with requests is in test_standin_*.py and tests/system/test_router.py."""

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from kvstore.protocol import control_pb2 as pb
from kvstore.router.fake_engine import engine as standin
from tests.client.processes import Process
from tests.router.scripted import following
from tests.system.running import until


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--role", "both"], "--role: 'both' is not one of prefill, decode"),
        (["--model", "no-such-model"], ""),
        (["--gpu", "no-such-gpu"], ""),
        (["--model", "llama3-405b", "--gpu", "L4"], ""),
        (["--listen", "nowhere"], "'nowhere' is not an address"),
    ],
)
def test_engine_invalid_settings_are_one_line_and_status_2(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(standin.main, flags)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"kvstore-fake-engine: error: {message}")


def test_without_a_master_it_serves_and_ends_with_a_signal(tmp_path: Path) -> None:
    flags = ("--role", "prefill", "--node", "node-0", "--master", "127.0.0.1:1", "--speedup", "1000")
    engine = Process("kvstore.router.fake_engine.engine", *flags, log=tmp_path / "log")
    try:
        assert engine.ready["name"] == f"prefill-{engine.ready['listen']}"
        body = {"prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": {}}
        request = urllib.request.Request(f"http://{engine.ready['listen']}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["choices"][0]["token_ids"] == following([1, 2], 1)
    finally:
        status = engine.stop(signal.SIGTERM)
    assert status == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_its_reports_say_what_it_is(two_nodes: LocalCluster, tmp_path: Path) -> None:
    flags = ("--role", "decode", "--node", "node-1", "--name", "told")
    engine = Process("kvstore.router.fake_engine.engine", *flags, "--master", two_nodes.address, log=tmp_path / "log")
    try:
        with SchedulerClient(ClientSettings(master=two_nodes.address)) as scheduler:

            def reports() -> list[pb.ReportRequest]:
                return [status.report for status in scheduler.instances().instances if status.report.name == "told"]

            until(lambda: bool(reports()), "its first report")
            [report] = reports()
            assert (report.role, report.address, report.node) == (pb.ROLE_DECODE, f"http://{engine.ready['listen']}", "node-1")
            assert report.capacity_tokens > 0
            assert engine.stop(signal.SIGTERM) == 0
            assert reports() == []
    finally:
        engine.stop()
