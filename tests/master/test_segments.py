"""Nodes by name, as programs written for Mooncake ask for them."""

from pathlib import Path

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import cluster
from tests.telemetry.http.asking import ask


def test_segments_are_the_nodes_that_are_alive(tmp_path: Path) -> None:
    with cluster(tmp_path, "--http", "127.0.0.1:0") as started:
        http = started.master.ready["http"]
        assert ask(http, "/get_all_segments").text == ""
        for _ in range(2):
            started.start_node("--dram", "16MiB")
        eventually(lambda: ask(http, "/get_all_segments").text == "n0\nn1\n", "both nodes are alive")
        answer = ask(http, "/get_all_segments", headers={"Host": "elsewhere"})
        assert (answer.status, "n0" in answer.text) == (401, False)
