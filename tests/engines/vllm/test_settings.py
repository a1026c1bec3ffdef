"""Settings of jobs, and whether an engine's store answers, in its log: with a real master that asks for a token, or for TLS."""

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore.engines.reachability import ReachabilityCheck
from kvstore.engines.vllm.counters import LOG
from kvstore.engines.vllm.settings import VllmSettings, connect
from kvstore.testing.transfer.awaited import eventually, within
from tests.client.processes import cluster
from tests.credentials import tokens_file
from tests.security.tls.certified import flags, shared


def test_jobs_have_the_connector_s_deadlines_and_bounds() -> None:
    jobs = VllmSettings(lookup_deadline_s=1, load_deadline_s=2).jobs()
    assert (jobs.lookup_deadline_s, jobs.load_deadline_s, jobs.queue_bytes, jobs.read_workers) == (1, 2, 512 << 20, 1)


def first_line(caplog: pytest.LogCaptureFixture, master: str, **settings: Any) -> tuple[str, str]:
    """Level and text of the first line of an engine that starts, which comes within 5 s."""
    caplog.clear()
    caplog.set_level(logging.INFO, LOG.name)
    chosen = VllmSettings(master=master, **settings)
    with within(5):
        client = connect(chosen)
        check = ReachabilityCheck(client, chosen.master, LOG)
        eventually(lambda: bool(caplog.records), "a line")
    check.close()
    client.close()
    (record,) = caplog.records
    return record.levelname, record.getMessage()


def test_store_that_answers_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(tmp_path, "--tokens", tokens_file(tmp_path)) as started:
        assert first_line(caplog, started.address, tenant="red", token="secret") == (
            "INFO",
            f"kvstore: the store at {started.address} answers",
        )
        level, text = first_line(caplog, started.address, tenant="red", token="wrong")
        assert level == "WARNING"
        assert "refuses this engine (set `tenant` and `token`)" in text


def test_missing_tls_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(tmp_path, *flags(shared().master())) as started:
        level, text = first_line(caplog, started.address)
        assert level == "WARNING"
        assert "`tls_ca`" in text
