"""Promises of daemon.py: kvstore-router as a process, and what it refuses to start with."""

import http.client
import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.router import daemon
from tests.client.processes import Process
from tests.telemetry.http.asking import ask

NO_MASTER = ("--master", "127.0.0.1:1")


def test_daemon_serves_without_master_until_a_signal(tmp_path: Path) -> None:
    flags = ("kvstore-router", "--listen", "127.0.0.1:0", "--model", "m", "--attempts", "1", "--log-format", "json", *NO_MASTER)
    router = Process("tests.tuned_daemon", *flags, log=tmp_path / "log")
    try:
        connection = http.client.HTTPConnection(router.ready["listen"], timeout=120)
        connection.request("GET", "/health")
        assert json.load(connection.getresponse()) == {"status": "ok"}
        connection.request("POST", "/v1/completions", json.dumps({"model": "m", "prompt": "x"}))
        response = connection.getresponse()
        assert response.status == 503
        assert "all 1 attempts failed; the last one: no master can be reached" in json.load(response)["error"]["message"]
        connection.close()
        port = router.ready["http"]
        assert [ask(port, path).status for path in ("/healthz", "/readyz", "/metrics")] == [200, 503, 200]
        assert "no scheduler: no master can be reached" in ask(port, "/readyz").text
        assert "kvstore_router_requests_total 1.0" in ask(port, "/metrics").text
    finally:
        status = router.stop(signal.SIGTERM)
    assert status == 0
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (last["event"], last["why"]) == ("daemon_stops", "SIGTERM")


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "model is not set: give --model NAME, the name in the engines' namespace"),
        (["--model", "m", "--listen", "nowhere"], "'nowhere' is not an address"),
        (["--model", "m", "--listen", "0.0.0.0:0"], "listen 0.0.0.0 is not loopback, and authentication is off"),
        (["--model", "m", "--master", "http://127.0.0.1:7440"], "'http://127.0.0.1:7440' is not an address: write HOST:PORT"),
        (["--model", "m", "--max-requests", "0"], "--max-requests: 0 is below the minimum of 1"),
    ],
)
def test_daemon_invalid_settings_are_one_line_and_status_2(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(daemon.main, flags)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"kvstore-router: error: {message}")
