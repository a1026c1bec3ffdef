"""Promises of replay_run.py, with a real cluster."""

import os
import signal
from collections.abc import Iterator

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.tools.cluster import Cluster
from kvstore.client.tools.replay_run import run
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import Broken, Unavailable
from tests.client.embedded import embedded


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as cluster:
        yield cluster


def prompts_with_a_murder(cluster: Cluster) -> Iterator[TraceRequest]:
    yield TraceRequest(0, 512, 1, (1, 2))
    os.kill(cluster.master_pid, signal.SIGKILL)
    yield TraceRequest(0, 512, 1, (3, 4))


def test_a_replay_reports_counts_and_the_clusters_change(cluster: Cluster) -> None:
    requests = [TraceRequest(0, 512, 1, (1, 2)), TraceRequest(0, 512, 1, (1, 3))]
    report = run(ClientSettings(master=cluster.address), requests, total=2, block_bytes=4096, cluster=cluster)
    assert (report.counts.blocks, report.counts.prefix_hits, report.hits_by_tier["dram"]) == (4, 1, 1)
    assert report.after.blocks - report.before.blocks == 3
    assert 0 < report.seconds < 60


def test_of_ones_own_cluster_the_daemon_that_died_is_the_reason_given(cluster: Cluster) -> None:
    settings = ClientSettings(master=cluster.address, deadline_s=5)
    with pytest.raises(Broken, match=r"master .* was ended by SIGKILL"):
        run(settings, prompts_with_a_murder(cluster), total=2, block_bytes=4096, cluster=cluster)


def test_of_another_cluster_it_is_what_the_client_saw(cluster: Cluster) -> None:
    with pytest.raises(Unavailable, match="no master can be reached"):
        run(ClientSettings(master=cluster.address, deadline_s=5), prompts_with_a_murder(cluster), total=2, block_bytes=4096)
