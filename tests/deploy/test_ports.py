"""The ports of deploy/ and of the documentation are those of protocol/ports.py."""

import re
from pathlib import Path

import pytest

from kvstore.master.config import MasterSettings
from kvstore.protocol.ports import CONTROL, MASTER, PORTS, ROUTER
from kvstore.router.config import RouterSettings
from tests.deploy.rendering import DEPLOY

OURS = re.compile(r"(?<![\d.])(7[45]\d\d|8000)(?!\d)")
A_HOST_MORE = 100
"""Of compose, where all daemons are of one host: ports of the second master are so much higher, of the third twice as much."""
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix in (".yaml", ".yml", ".toml", ".service", ".md", "")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_port_in_deploy_is_one_of_ours(path: Path) -> None:
    of_others = range(0, 3 * A_HOST_MORE if path.name == "compose.yaml" else 1, A_HOST_MORE)
    assert {int(found) for found in OURS.findall(path.read_text())} <= {port.number + more for port in PORTS for more in of_others}


def test_the_documentation_lists_them() -> None:
    rows = "".join(f"| {port.number} | `{port.daemon}` | {port.what} |\n" for port in PORTS)
    assert f"| port | daemon | what for |\n|---|---|---|\n{rows}" in (DEPLOY.parent / "docs" / "operations.md").read_text()


def test_defaults_are_these_ports() -> None:
    """The control plane's port is always the one after that of `listen`."""
    assert MasterSettings().listen == f"127.0.0.1:{MASTER.number}"
    assert (MasterSettings().control, MASTER.number + 1) == ("", CONTROL.number)
    assert RouterSettings().listen == f"127.0.0.1:{ROUTER.number}"
    assert len({port.number for port in PORTS}) == len(PORTS)
