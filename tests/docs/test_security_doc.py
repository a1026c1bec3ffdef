"""The commands of docs/security.md, in their order, in a network of their own."""

import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from kvstore.security.credentials import read_credentials
from kvstore.security.quotas.limits import in_force, read_tables
from kvstore.security.quotas.quota import NAMES
from tests.docs.programs import MODULES
from tests.docs.shell_blocks import ROOT, SHELL, code
from tests.docs.test_pages import PATIENCE_S, events
from tests.forked import Forked
from tests.namespaces import two_hosts

PAGE = ROOT / "docs" / "security.md"


def test_its_commands_do_what_the_page_says(tmp_path: Path) -> None:
    lines = [line for block in code(PAGE, SHELL) for line in block.splitlines() if line.startswith(("export ", "kvstore"))]
    environment = {**os.environ, **{f"KVSTORE_{name}_RUN_DIR": str(tmp_path) for name in ("MASTER", "NODE")}}
    said = ""
    with two_hosts(0) as hosts, ExitStack() as running:
        for line in lines:
            words = shlex.split(line)
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                environment[name] = value
                continue
            arguments = [word for word in words[1:] if word != "&"]
            where = hosts.names[0]
            started = Forked(MODULES[words[0]], arguments, environment=environment, stderr=sys.__stderr__, host=where, folder=tmp_path)
            assert started.stdout is not None
            running.enter_context(started.stdout)
            running.callback(started.wait)
            running.callback(started.kill)
            if words[0] != "kvstore":
                events(started, "ready")
                continue
            said += started.stdout.read()
            assert started.wait(PATIENCE_S) == 0, line
    assert "1 of 1 alive" in said
    assert said.count("token: ") == 3
    assert len(lines) == 15


TOKENS, QUOTAS = code(PAGE, "toml")


def test_the_tokens_file_is_one_that_a_master_reads(tmp_path: Path) -> None:
    numbers = iter(range(100))
    (tmp_path / "tokens.toml").write_text(re.sub(r"TOKEN\b", lambda _: f"token {next(numbers)}", TOKENS))
    assert len(read_credentials(str(tmp_path / "tokens.toml"))) == 6


def test_the_quotas_file_is_one_that_a_master_reads(tmp_path: Path) -> None:
    (tmp_path / "quotas.toml").write_text(QUOTAS)
    quotas = in_force(read_tables(str(tmp_path / "quotas.toml")), {})
    assert quotas.of("my-team").limits() == {"dram_bytes": 64 << 30, "nvme_bytes": 2 << 40}
    assert quotas.of("another").limits() == {"dram_bytes": 8 << 30}
    names = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8").partition("## Quotas")[2]))
    assert set(NAMES) <= names, "the page has each key"
