"""The compose file: as its schema wants it, its daemons' settings are settings, and a node has the time to drain."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.master.config import MasterSettings
from kvstore.protocol.ports import MASTER_HTTP, NODE_HTTP
from kvstore.protocol.settings import load_settings
from kvstore.security.credentials import read_credentials
from kvstore.security.identity import IdentityKind
from kvstore.store.config import NodeSettings
from kvstore.store.storage import SHUTDOWN_TIMEOUT_S, check
from kvstore.transfer.config import TransferSettings
from tests.deploy.rendering import DEPLOY

pytestmark = pytest.mark.slow

FILE = DEPLOY / "compose" / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]


def test_the_file_is_what_the_schema_of_compose_says() -> None:
    command = [str(Path(sys.prefix, "bin", "check-jsonschema")), "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("node")])
def test_compose_node_settings_are_valid_with_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    settings = load_settings(NodeSettings, "node", flags={}, environ=service["environment"])
    check(settings)
    port = settings.listen.rpartition(":")[2]
    transfer = load_settings(TransferSettings, "transfer", flags={}, environ=service["environment"])
    assert (settings.name, settings.advertise) == (name, f"{name}:{port}")
    assert published(service) == {port: port, str(transfer.listen_port): str(transfer.listen_port)}
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.drain_s + SHUTDOWN_TIMEOUT_S + 10
    assert f":{NODE_HTTP.number}/readyz" in service["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("master")])
def test_a_masters_settings_are_settings(name: str) -> None:
    service = SERVICES[name]
    assert service["command"] == ["kvstore-master", f"--advertise={name}"]
    settings = load_settings(MasterSettings, "master", flags={}, environ=service["environment"])
    assert settings.catalog.startswith("etcd://")
    listen, control = (address.rpartition(":")[2] for address in (settings.listen, settings.control))
    consoles = [port for port, inside in published(service).items() if inside == str(MASTER_HTTP.number)]
    assert published(service) == {listen: listen, control: control, consoles[0]: str(MASTER_HTTP.number)}
    assert f"{name}:{listen}" in service["environment"]["KVSTORE_MASTER"].split(",")
    assert f":{MASTER_HTTP.number}/readyz" in service["healthcheck"]["test"][-1]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def published(service: dict[str, Any]) -> dict[str, str]:
    """Ports of this machine's loopback, and the container's port behind each."""
    found = {}
    for line in service["ports"]:
        address, outside, inside = line.split(":")
        assert address == "127.0.0.1"
        found[outside] = inside
    return found


def test_who_comes_shows_a_token_that_the_masters_know() -> None:
    credentials = read_credentials(str(FILE.parent / "tokens.toml"))
    operator = SERVICES["master-1"]["environment"]["KVSTORE_CLIENT_TOKEN"]
    node = load_settings(NodeSettings, "node", flags={}, environ=SERVICES["node-1"]["environment"])
    scraped = yaml.safe_load((FILE.parent / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["authorization"]["credentials"] for job in scraped} == {operator}
    assert credentials.identify("", operator, now_s=0).kind is IdentityKind.OPERATOR
    assert credentials.identify("", node.join_token, now_s=0).kind is IdentityKind.NODE
