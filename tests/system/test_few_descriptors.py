"""A node that may have few files open, and more clients than it has descriptors for: each is refused with the cause, and at once."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.cli.tools import cluster_checks
from kvstore.cli.tools.transport_checks import CheckVerdict
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.protocol.errors import TooManyConnections
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from tests.store.daemons import master_flags, node_flags, running, status

OPEN_FILES = 200
CLIENTS = 100
FEW = ["sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh"]


@pytest.mark.promise("failures-typed")
def test_clients_beyond_descriptors_are_refused_with_cause(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    with running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master, ExitStack() as opened:
        address = master.facts["listen"]
        node = opened.enter_context(running("node", *node_flags(tmp_path, address), log=log, prefix=FEW))
        assert node.line()["event"] == "ready"
        refused: list[str] = []
        for number in range(CLIENTS):
            client = opened.enter_context(Client(address, deadline_s=PATIENCE_S))
            try:
                client.put(b"%d" % number, b"value")
                assert client.get(b"%d" % number) == b"value"
            except TooManyConnections as error:
                refused.append(str(error))
        assert 0 < len(refused) < CLIENTS
        assert all(f"{OPEN_FILES} open files that this process may have: raise ulimit -n" in text for text in refused)
        assert 0 < log.read_text().count("refusing connections") < len(refused) / 4, "a line a minute and reason"
        eventually(lambda: status(master).nodes[0].counters["refused_connections"] > 0, "the node has told the master")
        found = {check.name: check for check in cluster_checks.checks(ClientSettings(master=address, deadline_s=PATIENCE_S))}
    assert found["connections"].verdict is CheckVerdict.WARNING
    assert f"may have {OPEN_FILES} files open" in found["connections"].found
    assert "LimitNOFILE=65536" in found["connections"].advice
