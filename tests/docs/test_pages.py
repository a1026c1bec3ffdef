"""Programs and commands of README.md and the pages run as printed, but for addresses, folders, sizes and placeholders.

docs/operations.md, docs/security.md, docs/transfer.md and docs/topology.md have tests of their own beside this one.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from tests.client.embedded import embedded
from tests.credentials import JOIN, tokens_file
from tests.docs.programs import MODULES
from tests.docs.shell_blocks import PAGES, ROOT, SHELL, all_commands, blocks, code, commands
from tests.forked import Forked
from tests.namespaces import TwoHosts, two_hosts
from tests.telemetry.tracing.collector import collecting

pytestmark = pytest.mark.slow

PATIENCE_S = 240
MASTER = "127.0.0.1:7440"
"""Master address that the pages use."""
COLLECTOR = "http://127.0.0.1:4318/v1/traces"
"""Endpoint of the trace collector that the pages use."""
OF_THEIR_OWN = ("security.md",)
"""Pages whose commands follow one another: a test of their own runs them in their order."""
NODES = dict.fromkeys(("NODE", "n1", "n2"), "node-0")
"""Names that pages use for a node, and the node's real name."""
OF_OTHERS = (
    ("weights", "retire"),
    ("namespaces", "show"),
    ("namespaces", "diff"),
    ("sessions", "--end"),
    ("audit", "--since"),
    ("slow", "--of-tenant"),
)
"""Commands about engines, sessions and operators that this cluster does not have: tests/client/cli has tests of each."""
TRACE = "".join(
    json.dumps({"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 4, "hash_ids": ids}) + "\n"
    for at, ids in enumerate([[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]])
)


def programs(page: Path) -> list[str]:
    """A page's programs but for clusters with TLS, whose certificates they would need."""
    return [program for program in code(page, "python") if "tls_ca=" not in program]


LINES: dict[tuple[str, ...], str] = {}
"""Each command of ours, and the first page on which it is printed."""
for printed in all_commands():
    if printed.words[0] in MODULES and printed.block.page.name not in OF_THEIR_OWN:
        LINES.setdefault(printed.words, printed.block.page.name)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with embedded(ClusterPlan(dram="192MiB", is_private=True)) as cluster:
        with Client(cluster.address) as client:
            client.put(b"key", b"value")  # for those commands that list
            client.flush()
        yield cluster.address


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with collecting() as collector:
        yield collector.endpoint


@pytest.mark.parametrize(
    ("page", "program"),
    [pytest.param(page, program, id=f"{page.name}-{at}") for page in PAGES for at, program in enumerate(programs(page))],
)
def test_a_program_runs_as_printed(page: Path, program: str, address: str, endpoint: str, tmp_path: Path) -> None:
    here = program.replace(MASTER, address).replace(COLLECTOR, endpoint)
    with (tmp_path / "errors").open("w") as errors:
        done = Forked("tests.docs.program", [here], environment=os.environ, stderr=errors, options=("-W", "error"))
    assert done.stdout is not None
    with done.stdout:
        said = done.stdout.read()
    assert (done.wait(PATIENCE_S), (tmp_path / "errors").read_text()) == (0, "")
    assert "False" not in said, "a program of the page says that it found something wrong"
    assert said


def test_the_level_of_a_log_is_changed_as_printed(address: str) -> None:
    [line] = [line for block in code(ROOT / "docs" / "operations.md", SHELL) for line in block.splitlines() if line.startswith("curl ")]
    with Control.find(ClientSettings(master=address)) as control:
        command = line.replace("ADDRESS", control.status().nodes[0].http)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["kvstore.store"] == "debug"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{page}-{shlex.join(words)[:60]}")
        for words, page in LINES.items()
        if words[0] == "kvstore" and words[1] not in ("up", "top", "record", "drain", "console") and words[1:3] not in OF_OTHERS
    ],
)
def test_a_command_that_ends_runs_as_printed(words: tuple[str, ...], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however many pages print it. On a short trace, against a small cluster. `up` and `drain` are below; `top`, `record` and
    `console` go on until they are stopped: their own tests."""
    for name in ("TRACE", "trace.jsonl"):
        (tmp_path / name).write_text(TRACE)
    (tmp_path / "FILE").write_bytes(b"value")
    monkeypatch.chdir(tmp_path)
    here = [re.sub(r"^master-\d:\d+(,master-\d:\d+)*$", address, NODES.get(word, word)) for word in words[1:]]
    done = CliRunner(env={"KVSTORE_CLIENT_MASTER": address}).invoke(kvstore, here, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert done.stdout or Path(words[-1]).stat().st_size  # what it drew


def test_drains_run_as_printed() -> None:
    """Of a node that has nothing; one that has: tests/system/test_leaving.py."""
    drains = [words for words in LINES if words[:2] == ("kvstore", "drain")]
    assert drains
    with embedded() as cluster:
        for words in drains:
            named = [NODES.get(word, word) for word in words[1:]]
            assert "node-0" in named
            done = CliRunner(env={"KVSTORE_CLIENT_MASTER": cluster.address}).invoke(kvstore, named, catch_exceptions=False)
            assert done.exit_code == 0, done.stderr


def small(words: tuple[str, ...], folder: Path) -> list[str]:
    """A daemon's command line on this machine: its places are loopback's and the test's folder, its tiers small, its catalog in memory."""
    line = shlex.join(words)
    tokens_file(folder)
    (folder / "join-token").write_text(JOIN)
    for shown, here in (
        (r"etcd://\S+", "memory:"),
        (r"\b(master|node)-(host|\d)\b", "127.0.0.1"),
        (r"--nvme \S+:\S+", f"--nvme {folder}/nvme:64MiB"),
        (r"--dram \S+", "--dram 16MiB"),
        (r"/etc/kvstore/", f"{folder}/"),
    ):
        line = re.sub(shown, here, line)
    return [sys.executable, "-m", MODULES[words[0]], *shlex.split(line)[1:]]


def start(hosts: TwoHosts, command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "KVSTORE_RUN_DIR": str(folder)}
    return hosts.start(0, command, stdout=subprocess.PIPE, env=environment, text=True)


def events(process: "subprocess.Popen[str] | Forked", last: str) -> dict[str, object]:
    """Read a daemon's events up to `last`, and return that one. The daemon is killed if it does not report it in time."""
    assert process.stdout is not None
    overdue = threading.Timer(PATIENCE_S, process.kill)
    overdue.start()
    try:
        for line in process.stdout:
            facts: dict[str, object] = json.loads(line)
            if facts["event"] == last:
                return facts
    finally:
        overdue.cancel()
    raise AssertionError(f"it ended before it said {last}")


def test_the_daemons_of_run_it_for_real_go_together_on_one_host(tmp_path: Path) -> None:
    """With the ports as printed, in a network of their own. A node tells the place that it advertises."""
    master, node = (words for words, page in LINES.items() if page == "README.md" and words[0] in ("kvstore-master", "kvstore-node"))
    with two_hosts(0) as hosts:
        events(start(hosts, small(master, tmp_path), tmp_path), "ready")
        assert events(start(hosts, small(node, tmp_path), tmp_path), "ready")["listen"] == "127.0.0.1:7450"


def test_getting_started_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its cluster, programs and commands, in their order, with the ports as printed, in a network of their own.

    tests/packages installs the wheel, tests/engines/live runs what needs an engine.
    """
    environment = os.environ | {"KVSTORE_MASTER": MASTER}
    said = []
    with two_hosts(0) as hosts:
        for block in blocks(ROOT / "docs" / "getting-started.md"):
            if block.code in programs(block.page):
                said.append(run(hosts, "tests.docs.program", [block.code], tmp_path, environment))
                continue
            for command in commands(block) if block.code.startswith("kvstore") else ():
                words = command.words
                if words[1] == "up":
                    assert events(start(hosts, [*small(words, tmp_path), "--json"], tmp_path), "ready")["master"] == MASTER
                else:
                    said.append(run(hosts, MODULES[words[0]], list(words[1:]), tmp_path, environment))
    assert all(said)
    assert "1 of 1 alive" in "".join(said)


def run(hosts: TwoHosts, module: str, arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return the standard output of a program on the daemons' host; assert that it exits with 0."""
    done = Forked(module, arguments, environment=environment, stderr=sys.__stderr__, host=hosts.names[0], folder=folder)
    assert done.stdout is not None
    with done.stdout:
        said = done.stdout.read()
    assert done.wait(PATIENCE_S) == 0, said
    return said


def test_the_router_is_tried_as_its_page_says(tmp_path: Path) -> None:
    """The block as printed, by bash, in a network of its own."""
    block = next(block for block in code(ROOT / "docs" / "router.md", SHELL) if "kvstore-router" in block)
    functions = "".join(f'{name}() {{ "$PYTHON" -m {module} "$@"; }}\n' for name, module in MODULES.items())
    script = 'exec 9>"$STEPS"; BASH_XTRACEFD=9; set -eux\n' + functions + 'python() { "$PYTHON" "$@"; }\n' + block
    steps = tmp_path / "steps"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "STEPS": str(steps),
    }
    with two_hosts(0) as hosts, (tmp_path / "said").open("w+b") as said:
        bash = hosts.start(0, ["bash", "-c", script], stdout=said, stderr=said, env=environment, start_new_session=True)
        ended = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = bash.wait(PATIENCE_S)
        finally:
            os.killpg(bash.pid, signal.SIGKILL)
        said.seek(0)
        text = said.read().decode()
    assert ended == 0, f"{text}\nat this step:\n{steps.read_text()[-500:]}"
    assert text.count("200 OK") == 3, text
    assert text.lower().count("x-kvstore-decision: {") == 3
