"""Promises of bench.py and cli/bench.py: every figure is there, and what was put for it is gone afterwards. Speed is no promise here."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvstore.cli import bench as cli_bench
from kvstore.cli.main import kvstore
from kvstore.cli.tools import bench
from kvstore.cli.tools.bench import BenchRow, at_least, huge_pages, measure, table
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.protocol import control_pb2 as pb
from tests.client.embedded import embedded


def test_bench_huge_pages_row_has_reasons() -> None:
    def node(huge_bytes: int, reason: str) -> pb.NodeStatus:
        tiers = [
            pb.TierStatus(name="dram", capacity_bytes=4 << 20, huge_bytes=huge_bytes, not_huge_reason=reason),
            pb.TierStatus(name="nvme"),
        ]
        return pb.NodeStatus(tiers=tiers)

    status = pb.StatusReply(
        nodes=[node(4 << 20, ""), node(2 << 20, ""), node(0, "shmem_enabled is never"), node(0, "shmem_enabled is never")]
    )
    assert huge_pages(status) == BenchRow("DRAM in huge pages, shmem_enabled is never", 37.5, "%")
    assert huge_pages(pb.StatusReply()) == BenchRow("DRAM in huge pages", 0, "%")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls, fewer and on less memory."""
    figures = {"ROUNDS": 2, "BLOCKS": 4, "BLOCK_BYTES": 128 << 10, "CALLS": 5, "SMALL_BLOCKS": 16, "SMALL_ROUNDS": 2, "SLEEPS": 2}
    for name, value in figures.items():
        monkeypatch.setattr(bench, name, value)


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    """Each test leaves it as empty as it was."""
    with embedded(ClusterPlan(dram="16MiB", is_private=True)) as cluster:
        yield cluster


def test_every_figure_is_measured_and_nothing_is_left_behind(small: None, running: LocalCluster) -> None:
    with Client(running.address) as client, running.control() as control:
        *rows, pages = list(measure(client, control))
    assert len({row.name for row in rows}) == len(rows) > 20
    assert all(row.value > 0 for row in rows)
    assert pages.name.startswith("DRAM in huge pages")
    assert pages.unit == "%"
    with running.control() as control:
        assert control.status().blocks == 0


@pytest.mark.parametrize("within", ["copy_all", "microseconds", "after_sleep"], ids=["large batches", "small batches", "latency"])
def test_who_interrupts_it_leaves_nothing_behind(small: None, running: LocalCluster, monkeypatch: pytest.MonkeyPatch, within: str) -> None:
    def interrupted(*_of: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, within, interrupted)
    with Client(running.address) as client, running.control() as control, pytest.raises(KeyboardInterrupt):
        list(measure(client, control))
    with running.control() as control:
        assert control.status().blocks == 0


def test_the_command_measures_a_cluster_that_is_named(small: None, running: LocalCluster) -> None:
    result = CliRunner().invoke(kvstore, ["bench", "--json", "--master", running.address])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[-1]["name"].startswith("DRAM in huge pages")


def test_without_a_master_it_starts_a_cluster_of_its_own(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "NEEDED_DRAM_BYTES", 16 << 20)
    result = CliRunner().invoke(kvstore, ["bench", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)) > 20


def test_the_table_says_what_was_met_missed_or_had_no_aim() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table([at_least("fast", 3, "x", 2), at_least("slow", 1, "x", 2), BenchRow("plain", 41_234.5, "blocks/s")]))
    _title, fast, slow, plain = captured.get().splitlines()
    assert fast.rstrip().endswith("met")
    assert slow.rstrip().endswith("missed")
    assert "41,23" in plain
    assert plain.rstrip().endswith("blocks/s")
