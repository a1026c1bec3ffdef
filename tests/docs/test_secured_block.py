"""The Python of three pages that a client of a cluster with TLS is to paste: the same on each, and it works."""

import os
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from kvstore.cli.main import kvstore
from kvstore.security.tls.config import ServerTlsSettings
from tests.credentials import tokens_file
from tests.forked import Forked
from tests.security.tls.certified import flags
from tests.system.running import DEADLINE_S, PATIENT_S, System

pytestmark = pytest.mark.slow

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGES: Final = ("getting-started.md", "security.md", "how-to/engine-developer.md")
MASTER: Final = "127.0.0.1:7440"


def secured(page: str) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "tls_ca" in block]


def test_the_three_pages_print_the_same_program() -> None:
    [[program], *others] = [secured(page) for page in PAGES]
    assert others == [[program], [program]]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """A cluster whose certificates `kvstore certs` made, as the page does."""
    monkeypatch.chdir(tmp_path)
    own = ("--host", "127.0.0.1")
    for words in (["init", "certs"], ["master", "certs", *own], ["node", "certs", "n1", *own], ["client", "certs", "my-team"]):
        kvstore.main(["certs", *words], standalone_mode=False)
    return System(tmp_path)


def of(folder: Path, name: str) -> list[str]:
    certs = folder / "certs"
    return flags(ServerTlsSettings(tls_ca=f"{certs}/ca.pem", tls_cert=f"{certs}/{name}.pem", tls_key=f"{certs}/{name}.key"))


def test_it_puts_and_gets_with_a_certificate_alone(system: System, tmp_path: Path) -> None:
    """At a master with tokens, of which it has none."""
    with system:
        system.start_master(0, *of(tmp_path, "master-127.0.0.1"), "--tokens", tokens_file(tmp_path))
        system.start_node("n1", "--dram", "16MiB", *of(tmp_path, "node-n1"))
        code = secured(PAGES[0])[0].replace(MASTER, system.address)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        environment["KVSTORE_CLIENT_DEADLINE_S"] = str(PATIENT_S)  # a busy machine may need more than the default
        options = ("-W", "error")
        done = Forked("tests.docs.program", [code], environment=environment, stderr=sys.__stderr__, options=options, folder=tmp_path)
        assert done.stdout is not None
        with done.stdout:
            said = done.stdout.read()
        assert (done.wait(DEADLINE_S), said) == (0, "b'hello'\n")
