"""`make bench-security`: what TLS, tokens and checksums cost reads over TCP, and certificates cost lookups on a master's host. One run, one
machine, clusters of each kind side by side.

The clients take themselves to be on another host: batches of 1 MiB come by the transfer engine, values of 4 KiB along with the answer.
Rounds of all kinds alternate, and ratios are between their medians. Rows go to benchmarks/out/security.json.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from benchmarks.harness import run
from kvstore.cli.tools.bench import BenchRow
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.transfer.config import TransferSettings
from tests.credentials import tokens_file
from tests.security.tls.certified import Cluster, flags, given_to
from tests.system.running import System

OUT: Final = Path(__file__).parent / "out" / "security.json"
BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 32
SMALL_BYTES: Final = 4 << 10
SMALL_GETS: Final = 200
LOOKUPS: Final = 500
ROUNDS: Final = 9
DRAM: Final = "192MiB"
TENANT: Final = "red"
BY_TCP: Final = TransferSettings(transports="tcp")


class Kind:
    """One cluster and a client of it, and what its rounds took."""

    def __init__(self, name: str, folder: Path, opened: ExitStack, authority: Cluster, *, tls: bool, tokens: bool) -> None:
        folder.mkdir()
        self.name = name
        system = opened.enter_context(System(folder))
        settings = ClientSettings()
        master_flags, node_flags, token = [], [], ""
        if tls:
            master_flags, node_flags = flags(authority.master()), flags(authority.node("n0"))
            settings = given_to(settings, authority.client(TENANT))
            system.settings = given_to(system.settings, authority.client("*"))
        if tokens:
            token = "a token"
            master_flags += ["--tokens", tokens_file(folder, {TENANT: token})]
        system.start_master(0, *master_flags)
        system.start_node("n0", "--dram", DRAM, *node_flags)
        self.client: Client = opened.enter_context(system.remote_client(settings=settings, tenant=TENANT, token=token, transfer=BY_TCP))
        self.keys = [b"block-%d" % number for number in range(BLOCKS)]
        self.blocks = [os.urandom(BLOCK_BYTES) for _ in self.keys]
        self.client.put_batch(self.keys, self.blocks)
        self.client.put(b"small", os.urandom(SMALL_BYTES))
        self.room = [bytearray(BLOCK_BYTES) for _ in self.keys]
        self.batch_s: list[float] = []
        self.small_s: list[float] = []

    def read_batch(self) -> None:
        began_s = time.perf_counter()
        sizes = self.client.get_batch_into(self.keys, list(self.room))
        self.batch_s.append(time.perf_counter() - began_s)
        assert sizes == [BLOCK_BYTES] * BLOCKS

    def read_small(self) -> None:
        taken_s = []
        for _ in range(SMALL_GETS):
            began_s = time.perf_counter()
            assert self.client.get(b"small") is not None
            taken_s.append(time.perf_counter() - began_s)
        self.small_s.append(statistics.median(taken_s))


def reads() -> Iterator[BenchRow]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, ExitStack() as opened:
        authority = Cluster(Path(folder, "certs"))

        def kind(name: str, *, tls: bool, tokens: bool) -> Kind:
            return Kind(name, Path(folder, name.replace(" ", "-")), opened, authority, tls=tls, tokens=tokens)

        kinds = [
            kind("plain", tls=False, tokens=False),
            kind("tokens", tls=False, tokens=True),
            kind("TLS", tls=True, tokens=False),
            kind("TLS and tokens", tls=True, tokens=True),
        ]
        for one in kinds:  # connections, mappings and hints
            one.read_batch()
            one.read_small()
            one.batch_s.clear()
            one.small_s.clear()
        for _ in range(ROUNDS):
            for one in kinds:
                one.read_batch()
            for one in kinds:
                one.read_small()
        assert all(room == block for one in kinds for room, block in zip(one.room, one.blocks, strict=True))
        yield from figures(kinds)
        yield checksums(kinds[0])


def figures(kinds: list[Kind]) -> Iterator[BenchRow]:
    plain = kinds[0]
    for one in kinds:
        rate = BLOCKS * BLOCK_BYTES / statistics.median(one.batch_s) / 1e9
        yield BenchRow(f"batch gets of 1 MiB over TCP, {one.name}", rate, "GB/s")
        yield BenchRow(f"get of 4 KiB over TCP, {one.name}, p50", statistics.median(one.small_s) * 1e6, "us")
    for one in kinds[1:]:
        ratio = statistics.median(plain.batch_s) / statistics.median(one.batch_s)
        yield BenchRow(f"batch gets of 1 MiB, {one.name} / plain", ratio, "ratio")
        ratio = statistics.median(one.small_s) / statistics.median(plain.small_s)
        yield BenchRow(f"time of a get of 4 KiB, {one.name} / plain", ratio, "ratio")


def checksums(plain: Kind) -> BenchRow:
    """Every value that crossed a network is compared with its checksum: the share of a batch's time that this takes one thread."""
    began_s = time.perf_counter()
    for _ in range(ROUNDS):
        for room in plain.room:
            xxhash.xxh3_64_intdigest(room)
    taken_s = (time.perf_counter() - began_s) / ROUNDS
    return BenchRow("checksums of a batch of 1 MiB / its plain get", taken_s / statistics.median(plain.batch_s), "ratio")


def lookups() -> Iterator[BenchRow]:
    """On a master's host: a client with a certificate stays on TCP, one with a token takes the Unix socket."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, System(Path(folder)) as system:
        authority, token = Cluster(Path(folder, "certs")), "a token"
        system.start_master(0, *flags(authority.master()), "--tokens", tokens_file(Path(folder), {TENANT: token}))
        settings = ClientSettings(master=system.address, tenant=TENANT, is_loaded=True, use_index=False)
        [unix] = Path(folder, "m0").glob("*.sock")
        ways = {
            "certificate, TLS over the loopback": given_to(settings, authority.client(TENANT)),
            "token, Unix socket": replace(settings, master=f"unix:{unix}", token=token),
        }
        taken_us: dict[str, list[float]] = {way: [] for way in ways}
        with ExitStack() as opened:
            clients = {way: opened.enter_context(Client(settings=chosen)) for way, chosen in ways.items()}
            for number in range(ROUNDS + 1):
                for way, client in clients.items():
                    took_us = _lookup_us(client)
                    taken_us[way] += [took_us] if number else []  # the first one connects
        medians = {way: statistics.median(taken) for way, taken in taken_us.items()}
        for way, median in medians.items():
            yield BenchRow(f"lookup at a master of this host by {way}", median, "us")
        by_certificate, by_token = medians.values()
        yield BenchRow("lookup by certificate over the loopback / by token over the Unix socket", by_certificate / by_token, "ratio")


def _lookup_us(client: Client) -> float:
    began_s = time.perf_counter()
    for _ in range(LOOKUPS):
        client.exists(b"absent")
    return (time.perf_counter() - began_s) / LOOKUPS * 1e6


PARTS: Final[dict[str, Callable[[], Iterator[BenchRow]]]] = {"reads": reads, "lookups": lookups}

if __name__ == "__main__":
    sys.exit(run(PARTS, OUT))
