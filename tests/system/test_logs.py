"""Promises of the logs: daemons log events by name, as JSON if configured, and no secrets at any level."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.protocol.errors import Unauthorized
from kvstore.testing.transfer.awaited import eventually
from tests.store.daemons import Daemon, master_flags, node_flags, running
from tests.telemetry.http.asking import ask

SECRETS = {"tenant": "tenants-secret", "operator": "operators-secret", "node": "nodes-secret", "wrong": "guessed-secret"}
KEY = b"a-key-of-a-block"
JSON = ("--log-format", "json", "--log-level", "debug")


def events(daemon: Daemon) -> list[dict[str, Any]]:
    """The lines of its log that are events."""
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    return [line for line in lines if line["event"]]


@pytest.mark.promise("tracing-free")
def test_events_have_names_and_nothing_secret_is_told(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[tenants]\nred = "{SECRETS["tenant"]}"\n[admins]\nboss = "{SECRETS["operator"]}"\n[nodes]\n"*" = "{SECRETS["node"]}"\n'
    )
    of_master = (*master_flags(tmp_path), "--tokens", str(tokens), "--node-ttl-s", "1", "--heartbeat-interval-s", "0.1", *JSON)
    with running("master", *of_master, log=tmp_path / "master.log") as master:
        of_node = (*node_flags(tmp_path, master.facts["listen"]), "--dram", "1MiB", "--join-token", SECRETS["node"], *JSON)
        with running("node", *of_node, log=tmp_path / "node.log") as node:
            node.line()
            with Client(master.facts["listen"], tenant="red", token=SECRETS["tenant"]) as client:
                for number in range(512):
                    client.put(KEY + b" %d" % number, bytes(4096))
                client.flush()
            with Client(master.facts["listen"], tenant="red", token=SECRETS["wrong"]) as client, pytest.raises(Unauthorized):
                client.get(KEY)
            headers = {"Authorization": f"Bearer {SECRETS['operator']}"}
            body = json.dumps({"level": "info"}).encode()
            assert ask(master.facts["http"], "/debug/log-level", method="POST", headers=headers, body=body).status == 200
            eventually(lambda: any(line["event"] == "blocks_evicted" for line in events(node)), "a line about evictions")
            node.stop(signal.SIGTERM)
        eventually(lambda: any(line["event"] == "node_stopped" for line in events(master)), "a node that stopped")
        master.stop(signal.SIGTERM)
    told = {"master": events(master), "node": events(node)}
    events_of_master = {line["event"] for line in told["master"]}
    assert {"owner_elected", "node_registered", "node_stopped", "audit", "log_level", "daemon_stops"} <= events_of_master
    assert {"registered", "blocks_evicted", "node_ends", "daemon_stops"} <= {line["event"] for line in told["node"]}
    [stops] = [line for line in told["node"] if line["event"] == "daemon_stops"]
    assert stops["why"] == "SIGTERM"
    [stopped] = [line for line in told["master"] if line["event"] == "node_stopped"]
    assert (stopped["level"], stopped["node"]) == ("info", "n0")
    text = (tmp_path / "master.log").read_text() + (tmp_path / "node.log").read_text()
    for secret in (*SECRETS.values(), KEY.decode(), KEY.hex()):
        assert secret not in text, secret
