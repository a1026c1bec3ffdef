"""Promises of daemon.py, in a process of its own."""

import json
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os
from kvstore.rpc.daemon import begin_logging, say, serve, stop_on_signals
from kvstore.rpc.reactor import Reactor
begin_logging()
reactor = Reactor()
stop_on_signals(reactor)
say("ready", {"pid": os.getpid()})
serve(reactor)
reactor.close()
say("over", {})
"""


def start() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_every_line_is_json(number: signal.Signals) -> None:
    process = start()
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "ready", "pid": process.pid}
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out), errors) == (0, {"event": "over"}, "")


def test_a_starter_that_no_longer_listens_is_no_reason_to_stop() -> None:
    process = start()
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    with process.stderr as errors:
        assert "nobody reads standard output any more" in errors.read()
