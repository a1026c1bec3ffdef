"""Every block of code in README.md and the pages of docs/ runs as it is printed, but for addresses, folders, sizes and placeholders.

docs/transfer.md and docs/topology.md have tests of their own: their blocks are indented.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.client import Client
from kvstore.client.cli.main import kvstore
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.tools.cluster import ClusterPlan
from kvstore.kvcache.models.named import find_model
from kvstore.protocol.settings import load_settings
from kvstore.telemetry.tracing.config import TracingSettings
from tests.client.embedded import embedded
from tests.credentials import JOIN, tokens_file
from tests.forked import Forked
from tests.namespaces import TwoHosts, two_hosts
from tests.telemetry.tracing.collector import collecting

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
PATIENCE_S = 240
MASTER = "127.0.0.1:7440"
"""Where the pages' cluster is."""
OWN_TESTS = ("security.md",)
"""Pages whose indented commands follow one another: a test of their own runs them in their order."""
COLLECTOR = "http://127.0.0.1:4318/v1/traces"
"""Where their collector of traces is."""
PROGRAMS = {
    "kvstore": "kvstore.client.cli.main",
    "kvstore-master": "kvstore.master.daemon",
    "kvstore-node": "kvstore.store.daemon",
    "kvstore-router": "kvstore.router.daemon",
}
ELSEWHERE = {
    "make": "a target of the Makefile",
    "pip": "tests/protocol/test_extras.py",
    "for": "docs/router.md: below",
    "done": "likewise",
    "curl": "likewise; operations.md: below",
    "python": "likewise; examples/README.md: tests/examples",
    "client": "a drawing",
    "│": "a drawing",
}
"""First words of lines that are no command of ours, and what holds them. Maps begin with a file or a folder."""
TRACE = "".join(
    json.dumps({"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 4, "hash_ids": ids}) + "\n"
    for at, ids in enumerate([[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]])
)


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [code for name, code in fenced if name == language]


def commands(page: Path) -> list[list[str]]:
    """The commands of ours in a page's blocks, fenced and indented, as words, without comments. Any other line between fences must be known
    to be something else."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    indented = [] if page.name in OWN_TESTS else re.findall(rf"^    (?:{'|'.join(PROGRAMS)}) .*$", text, re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in indented]
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            first = line.split(maxsplit=1)[:1]
            if first and first[0] in PROGRAMS:
                words = shlex.split(line, comments=True)
                found.append(words[:-1] if words[-1] == "&" else words)
            else:
                assert not first or first[0] in ELSEWHERE or first[0].endswith((".py", "/")), f"{page.name}: who tests this line? {line}"
    return found


LINES: dict[str, list[Path]] = {}
"""The pages on which each command of ours is printed."""
for printed, line in ((page, shlex.join(words)) for page in PAGES for words in commands(page)):
    LINES.setdefault(line, []).append(printed)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with embedded(ClusterPlan(dram="192MiB", is_private=True)) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with collecting() as collector:
        yield collector.endpoint


@pytest.mark.parametrize(
    ("page", "program"),
    [pytest.param(page, program, id=f"{page.name}-{at}") for page in PAGES for at, program in enumerate(blocks(page, "python"))],
)
def test_a_program_runs_as_printed(page: Path, program: str, address: str, endpoint: str, tmp_path: Path) -> None:
    code = program.replace(MASTER, address).replace(COLLECTOR, endpoint)
    with (tmp_path / "errors").open("w") as errors:
        done = Forked("tests.docs.program", [code], environment=os.environ, stderr=errors, options=("-W", "error"))
    assert done.stdout is not None
    with done.stdout:
        said = done.stdout.read()
    assert (done.wait(PATIENCE_S), (tmp_path / "errors").read_text()) == (0, "")
    assert "False" not in said, "a program of the page says that it found something wrong"
    assert said


class LosesBlock(Client):
    """A block of the prefix leaves between the question how long it is and the read. It notes the parents that it is told."""

    def __init__(self, address: str, lost: bytes) -> None:
        super().__init__(address)
        self._lost = lost
        self.parents: dict[bytes, bytes | None] = {}

    def get_batch_into(self, keys: Sequence[bytes], *arguments: Any, **named: Any) -> list[int | None]:
        self.remove([self._lost])
        return super().get_batch_into(keys, *arguments, **named)

    def put_batch(self, keys: Sequence[bytes], *arguments: Any, **named: Any) -> list[bool]:
        self.parents |= zip(keys, named["parents"], strict=True)
        return super().put_batch(keys, *arguments, **named)


def test_the_first_program_computes_what_it_has_lost_and_tells_parents(address: str) -> None:
    code, _, _ = blocks(PAGES[0], "python")[0].partition("\nwith Client(")
    program: dict[str, Any] = {}
    exec(code, program)
    tokens, block_tokens = list(range(500, 820)), program["BLOCK_TOKENS"]
    keys = program["NAMESPACE"].block_keys(tokens)
    computed = [program["compute"](tokens[at : at + block_tokens]).tobytes() for at in range(0, len(tokens), block_tokens)]
    client = LosesBlock(address, keys[7])
    with client:
        for cached, lost in ((0, keys[7]), (7, keys[0]), (0, b"none"), (len(keys), b"none")):
            found, pool = program["prefill"](client, tokens)
            assert found == cached
            assert [row.tobytes() for row in pool] == computed
            client._lost = lost
        assert client.parents == dict(zip(keys, [None, *keys], strict=False))


def test_the_settings_of_traces_are_settings(tmp_path: Path) -> None:
    [printed] = blocks(ROOT / "docs" / "tracing.md", "toml")
    (tmp_path / "kvstore.toml").write_text(printed)
    found = load_settings(TracingSettings, "tracing", flags={}, environ={}, config=str(tmp_path / "kvstore.toml"))
    assert found == TracingSettings(endpoint=COLLECTOR, sample_ratio=0.01)


def test_the_level_of_a_log_is_changed_as_printed(address: str) -> None:
    [line] = [line for block in blocks(ROOT / "docs" / "operations.md", "") for line in block.splitlines() if line.startswith("curl ")]
    with Control.find(ClientSettings(master=address)) as control:
        command = line.replace("ADDRESS", control.status().nodes[0].http)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["kvstore.store"] == "debug"


def test_there_are_programs_with_and_without_torch() -> None:
    assert sorted("import torch" in program for program in blocks(PAGES[0], "python")) == [False, True]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{pages[0].name}-{line[:60]}")
        for line, pages in LINES.items()
        if (words := shlex.split(line))[0] == "kvstore" and words[1] not in ("up", "top", "record", "drain", "console")
    ],
)
def test_a_command_that_ends_runs_as_printed(words: list[str], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however many pages print it. On a short trace, against a small cluster. `up` and `drain` are below; `top`, `record` and
    `console` go on until they are stopped: their own tests."""
    for name in ("TRACE", "trace.jsonl"):
        (tmp_path / name).write_text(TRACE)
    (tmp_path / "FILE").write_bytes(b"value")
    monkeypatch.chdir(tmp_path)
    here = [re.sub(r"^master-\d:\d+(,master-\d:\d+)*$", address, word) for word in words[1:]]
    done = CliRunner(env={"KVSTORE_CLIENT_MASTER": address}).invoke(kvstore, here, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert done.stdout or Path(words[-1]).stat().st_size  # what it drew


def test_drains_run_as_printed() -> None:
    """Of a node that has nothing; one that has: tests/system/test_leaving.py."""
    drains = [words for page in PAGES for words in commands(page) if words[:2] == ["kvstore", "drain"]]
    assert drains
    with embedded() as cluster:
        for words in drains:
            named = ["node-0" if word in ("NODE", "n1") else word for word in words[1:]]
            assert "node-0" in named
            done = CliRunner(env={"KVSTORE_CLIENT_MASTER": cluster.address}).invoke(kvstore, named, catch_exceptions=False)
            assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_models_are_called_as_they_are_known(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\bllama-?\d[\w-]*", text))
    assert all(find_model(name).name == name for name in names)


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"make (demo|test|lint|bench[a-z-]*|docs)\b", page.read_text(encoding="utf-8"))}
    assert {"demo", "test", "lint", "bench"} <= named <= targets


def small(words: list[str], folder: Path) -> list[str]:
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
    return [sys.executable, "-m", PROGRAMS[words[0]], *shlex.split(line)[1:]]


def start(hosts: TwoHosts, command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "KVSTORE_NODE_RUN_DIR": str(folder), "KVSTORE_MASTER_RUN_DIR": str(folder)}
    return hosts.start(0, command, stdout=subprocess.PIPE, env=environment, text=True)


def events(process: "subprocess.Popen[str] | Forked", last: str) -> dict[str, object]:
    """Reads a daemon's lines until the event `last`; its facts. One that does not come to say it is ended."""
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
    master, node = (words for words in commands(PAGES[0]) if words[0] in ("kvstore-master", "kvstore-node"))
    with two_hosts(0) as hosts:
        events(start(hosts, small(master, tmp_path), tmp_path), "ready")
        assert events(start(hosts, small(node, tmp_path), tmp_path), "ready")["listen"] == "127.0.0.1:7450"


def test_up_starts_the_cluster_that_the_programs_connect_to(tmp_path: Path) -> None:
    words = next(words for words in commands(PAGES[0]) if words[:2] == ["kvstore", "up"])
    program = blocks(PAGES[0], "python")[0]
    with two_hosts(0) as hosts:
        assert events(start(hosts, [*small(words, tmp_path), "--json"], tmp_path), "ready")["master"] == MASTER
        said = hosts.run(0, [sys.executable, "-c", program], timeout_s=PATIENCE_S)
    assert said.splitlines()[0] == "1000 tokens: 0 of 62 blocks were cached"


def test_the_router_is_tried_as_its_page_says(tmp_path: Path) -> None:
    """The lines as printed, by bash, in a network of their own; between them it waits until what was started has said that it is ready, and
    can be seen."""
    block = next(block for block in blocks(ROOT / "docs" / "router.md", "") if "kvstore-router" in block)
    functions = "".join(f'{name}() {{ "$PYTHON" -m {module} "$@"; }}\n' for name, module in PROGRAMS.items())
    script = 'exec 9>"$STEPS"; BASH_XTRACEFD=9; set -eux\n' + functions + 'python() { "$PYTHON" "$@"; }\n'
    instances = "kvstore instances --json 2>/dev/null | grep -o '\"name\"' | wc -l"
    for line in block.splitlines():
        script += line + "\n"
        if line.startswith("kvstore up"):
            script += "until grep -q '^ready: ' \"$SAID\"; do sleep 0.2; done\nkvstore status | grep '2 of 2 alive'\n"
        elif line.startswith("done"):
            script += 'until [ $(grep -c \'"ready"\' "$SAID") -ge 4 ]; do sleep 0.2; done\n'
            script += f"until [ $({instances}) -ge 4 ]; do sleep 0.2; done\n"
        elif line.startswith("kvstore-router"):
            script += "until curl -s http://127.0.0.1:8000/health >/dev/null; do sleep 0.2; done\n"
    steps = tmp_path / "steps"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "SAID": str(tmp_path / "said"),
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
    assert "200 OK" in text
    assert "x-kvstore-decision: {" in text.lower()
