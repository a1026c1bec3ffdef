"""Many threads and tasks of one client against a real node: each goes on, however few connections or descriptors there are."""

import asyncio
import resource
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from tests.system.running import PATIENT_S, System, heard, process, running_system

CALLERS: Final = 160
"""More than half of DESCRIPTORS."""
DESCRIPTORS: Final = 256
TIMES: Final = 2
SIZE: Final = 4096
FEW: Final = 4
"""Channels, of which the index of the node's host takes one."""
PATIENT: Final = ClientSettings(connect_timeout_s=PATIENT_S)
"""A node that has no processor for two seconds is no node to be passed over."""


class Race:
    """Callers put as fast as they can until each has done so TIMES: those that are quick never leave their place to the others."""

    def __init__(self) -> None:
        self.done = [0] * CALLERS
        self.errors: list[str] = []

    @property
    def is_over(self) -> bool:
        return bool(self.errors) or min(self.done) >= TIMES

    def key(self, number: int) -> bytes:
        return b"%d/%d" % (number, self.done[number])

    def put(self, client: Client, number: int) -> None:
        try:
            while not self.is_over:
                client.put(self.key(number), bytes(SIZE))
                self.done[number] += 1
        except Exception as error:
            self.errors.append(repr(error))

    async def put_async(self, client: AsyncClient, number: int) -> None:
        try:
            while not self.is_over:
                await client.put(self.key(number), bytes(SIZE))
                self.done[number] += 1
        except Exception as error:
            self.errors.append(repr(error))


def run_threads(client: Client) -> list[str]:
    race = Race()
    threads = [threading.Thread(target=race.put, args=(client, number)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return race.errors


def few_descriptors(connection: Connection, address: str) -> None:
    """Threads in a process that may not open as many connections as it has threads."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    with Client(address, deadline_s=PATIENT_S, settings=PATIENT) as client:
        connection.send(run_threads(client))


def no_descriptors(connection: Connection, address: str) -> None:
    """Threads in a process that has used up its descriptors since it made its client."""
    with Client(address, deadline_s=PATIENT_S, settings=PATIENT) as client:
        client.put(b"first", bytes(SIZE))
        client.get(b"first")
        with open("/dev/null") as last:
            limit = last.fileno() + FEW
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        connection.send(run_threads(client))


def few_descriptors_async(connection: Connection, address: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    async def main() -> list[str]:
        race = Race()
        async with AsyncClient(address, deadline_s=PATIENT_S, settings=PATIENT) as client:
            await asyncio.gather(*(race.put_async(client, number) for number in range(CALLERS)))
        return race.errors

    connection.send(asyncio.run(main()))


@pytest.mark.promise("resources-exhausted")
@pytest.mark.parametrize("run", [few_descriptors, no_descriptors, pytest.param(few_descriptors_async, marks=pytest.mark.slow)])
def test_few_descriptors_are_shared_in_turn(system: System, run: Callable[[Connection, str], None]) -> None:
    with process(run, system.address) as (_, connection):
        assert heard(connection) == []


@pytest.mark.promise("resources-exhausted")
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_few_channels_are_shared_in_turn(system: System, is_remote: bool) -> None:
    make = system.remote_client if is_remote else system.client
    with make(ack="node", settings=ClientSettings(max_channels=FEW)) as client:
        assert run_threads(client) == []


@pytest.mark.promise("resources-exhausted")
def test_a_node_with_few_connections_is_shared_in_turn(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The node refuses more than it takes, to a client that would open one a thread."""
    with running_system(tmp_path_factory.mktemp("few"), "--dram 64MiB --max-connections 16") as system:
        with system.client(ack="node") as client:
            assert run_threads(client) == []
