"""Promises of scheduler.py, with the scheduler of a real master."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, Refusal, RequestPlacement, SchedulerClient
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument
from kvstore.router.proxy import AsyncScheduler
from kvstore.rpc.deadline import Deadline
from kvstore.scheduler.request import Reason, Slo
from tests.router.scripted import run

KEYS = Namespace(model="scheduling", dtype="bfloat16", block_tokens=4).block_keys(range(12))


def test_the_masters_answer_is_handed_on(two_nodes: LocalCluster) -> None:
    async def test(client: SchedulerClient, threads: ThreadPoolExecutor) -> None:
        scheduler = AsyncScheduler(client, threads, block_tokens=4)

        async def ask(slo: Slo) -> RequestPlacement | Refusal:
            return await scheduler.schedule(KEYS, input_tokens=14, output_tokens=5, slo=slo)

        nobody = await ask(Slo())
        assert isinstance(nobody, Refusal)
        assert nobody.reason is Reason.NO_INSTANCE
        for name, role in (("p", InstanceRole.PREFILL), ("d", InstanceRole.DECODE)):
            client.report(InstanceReport(name=name, role=role, address=f"http://{name}", node="node-0"))
        placed = await ask(Slo())
        assert isinstance(placed, RequestPlacement)
        assert (placed.prefill_address, placed.decode_address, placed.prefix_blocks) == ("http://p", "http://d", 0)
        late = await ask(Slo(ttft_s=1e-9))
        assert isinstance(late, Refusal)
        assert (late.reason, late.limit) == (Reason.TTFT, 1e-9)
        with pytest.raises(InvalidArgument):
            await scheduler.schedule(KEYS, input_tokens=1, output_tokens=5, slo=Slo())
        for name in "pd":
            client.leave(name)

    with SchedulerClient(ClientSettings(master=two_nodes.address)) as client, ThreadPoolExecutor(2) as threads:
        run(test(client, threads))


async def test_scheduler_call_past_its_deadline_is_not_sent() -> None:
    """Else one behind another would wait for a master that is silent, each for a deadline of its own."""

    asked = []
    master = await asyncio.start_server(lambda _reader, writer: asked.append(writer), "127.0.0.1", 0)
    settings = ClientSettings(master=f"127.0.0.1:{master.sockets[0].getsockname()[1]}", deadline_s=0.05)
    let_go = threading.Event()
    with SchedulerClient(settings) as client, ThreadPoolExecutor(1) as threads:
        threads.submit(let_go.wait)
        asking = asyncio.create_task(
            AsyncScheduler(client, threads, block_tokens=4).schedule(KEYS, input_tokens=14, output_tokens=5, slo=Slo())
        )
        await asyncio.sleep(0)  # it has begun, and waits
        its = Deadline(0.05)  # is over later than its own
        while its.up_to_s(1.0):
            await asyncio.sleep(0.01)
        let_go.set()
        with pytest.raises(DeadlineExceeded, match=r"no answer within the deadline of 0\.05 s"):
            await asking
    assert asked == []
    master.close()
