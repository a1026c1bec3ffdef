"""The ports of deploy/ and of the documentation are those of protocol/ports.py."""

import re
from pathlib import Path

import pytest

from kvstore.protocol.ports import PORTS, ports_table
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
    assert ports_table() in (DEPLOY.parent / "docs" / "operations.md").read_text()
