"""Promise of demo.py."""

from functools import partial

import click
import pytest
from click.testing import CliRunner

from kvstore.client.cli import demo as cli_demo
from kvstore.client.cli.main import kvstore
from kvstore.client.tools import demo
from kvstore.client.tools.cluster import Cluster
from tests.forked import Forked

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemons are forked: to start them as programs is for the tests of Cluster."""
    monkeypatch.setattr(demo, "Cluster", partial(Cluster, start=Forked))


def test_it_needs_no_arguments_but_takes_a_number_of_prompts() -> None:
    result = CliRunner().invoke(kvstore, ["demo", "--requests", "1000"])
    assert result.exit_code == 0, result.output
    assert "All of it held, in " in result.output


def test_a_cluster_that_cannot_show_it_is_status_1_with_the_log() -> None:
    """All of so few prompts fit in DRAM: the crash leaves nothing to find."""
    assert cli_demo.demo.callback is not None
    result = CliRunner().invoke(click.Command("demo", callback=partial(cli_demo.demo.callback, requests=30)))
    assert result.exit_code == 1
    assert "Not all of it held" in result.output
    assert "node-0 | " in result.output
