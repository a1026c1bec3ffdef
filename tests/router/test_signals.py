"""Promises of signals.py: the exported metrics are the listed metrics, and a router with a hung loop is not live."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from kvstore.protocol.errors import Unavailable
from kvstore.router import metrics as signals
from kvstore.router.metrics import RouterCounters, add_router_signals, readings
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import ROUTER
from tests.credentials import tokens_file
from tests.master.running import master_in_thread
from tests.telemetry.http.asking import ask


class Scheduler:
    """Fake SchedulerClient with the one method that the signals call."""

    def __init__(self) -> None:
        self.is_there = True

    def check(self) -> None:
        if not self.is_there:
            raise Unavailable("no master can be reached")


async def test_router_ready_with_scheduler_alive_with_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, server = Scheduler(), HttpServer("127.0.0.1:0")
    add_router_signals(server, RouterCounters(), scheduler, asyncio.get_running_loop())  # type: ignore[arg-type]
    server.start()
    try:
        for is_there, status in ((True, 200), (False, 503)):
            scheduler.is_there = is_there
            assert (await asyncio.to_thread(ask, server.address, "/readyz")).status == status
        assert (await asyncio.to_thread(ask, server.address, "/healthz")).status == 200
        monkeypatch.setattr(signals, "ALIVE_S", 0.05)
        assert ask(server.address, "/healthz").status == 503, "this is the loop's own thread, which waits for the answer"
    finally:
        await asyncio.to_thread(server.close)


@pytest.mark.parametrize("role", ["read", "write", "admin"])
async def test_router_ready_needs_a_token_that_may_schedule(tmp_path: Path, role: str) -> None:
    tenants = tokens_file(tmp_path, {"blue": "other"}, f'[[tenants.red]]\ntoken = "secret"\nrole = "{role}"')

    with master_in_thread(tmp_path / "run", tokens=tenants) as places:
        for token, status in (("secret", 200), ("guess", 503)):
            server = HttpServer("127.0.0.1:0")
            with SchedulerClient(ClientSettings(master=places.listen, tenant="red", token=token)) as client:
                add_router_signals(server, RouterCounters(), client, asyncio.get_running_loop())
                server.start()
                try:
                    assert (await asyncio.to_thread(ask, server.address, "/readyz")).status == status
                finally:
                    await asyncio.to_thread(server.close)


def test_readings_are_the_listed_metrics() -> None:
    counters = RouterCounters(active=1, requests=5, disconnects=2)
    counters.rejected["busy"] += 3
    counters.routed_by_load["salt"] += 4
    counters.durations.observe(3_000_000_000, 1)
    found = readings(counters, {("exported",): 4})
    assert found.keys() == {metric.name for metric in ROUTER}
    assert found["kvstore_router_routed_by_load"] == {("salt",): 4}
    assert (found["kvstore_router_client_disconnects"], found["kvstore_router_rejections"]) == (2, {("busy",): 3})
    told = found["kvstore_router_request_duration_seconds"]
    assert isinstance(told, Mapping)
    assert told[()] == counters.durations.counts()
    assert found["kvstore_router_trace_spans"] == {("exported",): 4}
