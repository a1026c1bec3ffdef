"""A new user's first ten minutes, with the installed wheel only and nothing of the checkout.

- the wheel in an empty environment
- a cluster by one command, and its console in a browser
- ten lines of Python, and the blocks that they stored
- a second node, and a Prometheus that scrapes both
- the death of that node, which raises an alarm and shows in the console

Needs Prometheus and Chromium (Debian: prometheus, chromium); `make test` installs them.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, expect

from kvstore.testing.transfer.awaited import eventually
from tests.console.browser import VIEWS, WAIT_MS, Watched, chromium
from tests.ports import free_ports

pytestmark = pytest.mark.slow

RULES = re.sub(r"for: \S+", "for: 0s", (Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml").read_text())
"""The deployed alert rules with every `for` set to 0 s: alerts fire at once."""
DOWN = "KvstoreDaemonDown"
PROGRAM = """
from kvstore import Client

with Client() as client:
    print(f"a master answers in {client.ping():.3f} s")
    client.put(b"first", b"a block of a prompt", namespace="minutes")
    print(client.get(b"first"), client.exists(b"second"))
    with client.view(b"first") as block:
        print(block.nbytes, "bytes without a copy")
    print(client.keys("minutes"), [node["name"] for node in client.status()["nodes"]])
    print(client.remove_all("minutes"), "removed")
"""


class NewUser:
    """The commands of an environment, and their environment variables."""

    def __init__(self, commands: Path, folder: Path, listen: str) -> None:
        self._commands = commands
        self.listen = listen
        self._environment = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "KVSTORE_MASTER": listen,
        }

    def output(self, program: str, *arguments: str, statuses: Container[int] = (0,)) -> str:
        command = [str(self._commands / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        assert done.returncode in statuses, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def runs(self, program: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        """Until the end of the block, or its own."""
        command = [str(self._commands / program), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()

    def status(self) -> Any:
        return json.loads(self.output("kvstore", "status", "--json", statuses=(0, 1)))  # 1: something is wrong


def await_line(process: "subprocess.Popen[str]", event: str) -> dict[str, Any]:
    """The JSON line of that event; the test's own timeout ends the wait."""
    assert process.stdout is not None
    for line in process.stdout:
        facts: dict[str, Any] = json.loads(line)
        if facts["event"] == event:
            return facts
    raise AssertionError(f"it ended before it was {event}")


@pytest.fixture
def user(commands: Path, tmp_path: Path) -> NewUser:
    return NewUser(commands, tmp_path, f"127.0.0.1:{free_ports(2)[0]}")


class Prometheus:
    """A real one that scrapes these daemons each second, and minds RULES."""

    def __init__(self, folder: Path, **daemons: list[str]) -> None:
        self._address = f"127.0.0.1:{free_ports(1)[0]}"
        folder.mkdir()
        (folder / "rules.yml").write_text(RULES)
        jobs = [{"job_name": f"kvstore-{kind}", "static_configs": [{"targets": targets}]} for kind, targets in daemons.items()]
        often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (folder / "prometheus.yml").write_text(json.dumps({"global": often, "rule_files": ["rules.yml"], "scrape_configs": jobs}))
        self._command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self._command += [f"--web.listen-address={self._address}"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)

    def values(self, query: str) -> list[float]:
        """Of each series now; none while Prometheus is starting."""
        return [float(series["value"][1]) for series in self._data(f"query?query={urllib.parse.quote(query)}").get("result", [])]

    def alarms(self) -> list[str]:
        """The daemons for which the alert fires that they are down."""
        found = self._data("alerts").get("alerts", [])
        return [alert["labels"]["instance"] for alert in found if alert["state"] == "firing" and alert["labels"]["alertname"] == DOWN]

    def _data(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}", timeout=30) as answered:
                data: dict[str, Any] = json.load(answered)["data"]
        except OSError:
            return {}
        return data


def answer(url: str) -> int:
    """Its status."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answered:
            return int(answered.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def look_around(browser: BrowserContext, console: str) -> None:
    """Each view of a new cluster in a browser: nothing breaks, and the only node is there."""
    with Watched(browser, console) as watched:
        for view in VIEWS:
            watched.show(view)
        page = watched.show()
        expect(page.locator(".tile", has_text="Nodes alive")).to_contain_text("1of 1", timeout=WAIT_MS)
        expect(page.get_by_role("list", name="State of the cluster")).to_contain_text("No problems", timeout=WAIT_MS)


def await_trouble(browser: BrowserContext, console: str, text: str) -> None:
    """Wait until the console's first page shows `text`."""
    with Watched(browser, console) as watched:
        expect(watched.show().get_by_role("list", name="State of the cluster")).to_contain_text(text, timeout=WAIT_MS)


@pytest.mark.promise("documented")
def test_first_ten_minutes_of_a_new_user(user: NewUser, tmp_path: Path) -> None:
    with chromium() as browser, user.runs("kvstore", "up", "--json", "--listen", user.listen, "--dram", "64MiB") as up:
        console = await_line(up, "ready")["console"].rstrip("/")
        look_around(browser, console)

        lines = user.output("python", "-c", PROGRAM).splitlines()
        assert lines[0].startswith("a master answers in ")
        assert lines[1:] == [
            "b'a block of a prompt' False",
            "19 bytes without a copy",
            "[b'first'] ['node-0']",
            "1 removed",
        ]
        assert "1 of 1 alive" in user.output("kvstore", "status")
        assert "catalog" in user.output("kvstore", "doctor")

        with user.runs("kvstore-node", "--name", "second", "--dram", "64MiB") as second:
            await_line(second, "ready")
            eventually(lambda: {node["state"] for node in user.status()["nodes"]} == {"alive"}, "both nodes are alive")
            status = user.status()
            nodes = {node["name"]: node["http"] for node in status["nodes"]}
            for http in (status["http"], *nodes.values()):
                assert answer(f"http://{http}/healthz") == answer(f"http://{http}/readyz") == 200

            prometheus = Prometheus(tmp_path / "prometheus", master=[status["http"]], node=list(nodes.values()))
            with prometheus.running():
                eventually(lambda: prometheus.values("kvstore_node_ready") == [1, 1], "both nodes are scraped")
                assert prometheus.alarms() == []
                os.kill(second.pid, signal.SIGKILL)
                eventually(lambda: prometheus.alarms() == [nodes["second"]], "the alert fires for the node that was killed")
            eventually(lambda: "dead" in {node["state"] for node in user.status()["nodes"]}, "the master knows that it is dead")
        await_trouble(browser, console, "second is dead")
        assert "1 of 2 alive" in user.output("kvstore", "status", statuses=(1,))
        user.output("kvstore", "forget", "second")
        assert "1 of 1 alive" in user.output("kvstore", "status")
