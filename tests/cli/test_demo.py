"""Promise of demo.py."""

from functools import partial

import click
import pytest
from click.testing import CliRunner

from kvstore.cli import demo as cli_demo
from kvstore.cli.demo import best_prefix_hits
from kvstore.cli.main import kvstore
from kvstore.cli.tools.cluster import LocalCluster
from kvstore.kvcache.traces.mooncake import TraceRequest
from tests.forked import Forked

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemons are forked: to start them as programs is for the tests of Cluster."""
    monkeypatch.setattr(cli_demo, "LocalCluster", partial(LocalCluster, start=Forked))


@pytest.mark.slow
def test_it_needs_no_arguments_but_takes_a_number_of_prompts() -> None:
    result = CliRunner().invoke(kvstore, ["demo", "--requests", "1000"])
    assert result.exit_code == 0, result.output
    for text in ("All claims held, in ", "kill -9 of the node", "served again"):
        assert text in result.output
    assert "NOT SO" not in result.output


def test_a_cluster_that_cannot_show_it_is_status_1_with_the_log() -> None:
    """All of so few prompts fit in DRAM: the crash leaves nothing to find."""
    assert cli_demo.demo.callback is not None
    result = CliRunner().invoke(click.Command("demo", callback=partial(cli_demo.demo.callback, requests=30)))
    assert result.exit_code == 1
    assert "Some claims failed" in result.output
    assert "node-0 | " in result.output


def test_best_prefix_hits_are_those_of_an_unbounded_store() -> None:
    requests = [TraceRequest(0, 0, 0, ids) for ids in ((1, 2), (1, 2, 3), (9, 1), (1, 3))]
    known = {9}
    assert best_prefix_hits(requests, known) == 0 + 2 + 2 + 2
    assert known == {1, 2, 3, 9}
