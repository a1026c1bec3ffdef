"""The image: linted, not root's, made of every package that there is, and its health is that of its daemon."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.ports import PORTS
from tests.deploy.rendering import DEPLOY
from tests.ports import free_ports

pytestmark = pytest.mark.slow

IMAGE = DEPLOY / "image"


def test_the_dockerfile_has_nothing_that_hadolint_would_change() -> None:
    done = subprocess.run([Path(sys.prefix, "bin", "hadolint"), IMAGE / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_nothing_runs_as_root() -> None:
    lines = (IMAGE / "Dockerfile").read_text().splitlines()
    last_stage = lines[max(index for index, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in last_stage


def test_every_package_is_sent_to_the_builder() -> None:
    packaging = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    sent = {line.removeprefix("!/") for line in (IMAGE / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!/")}
    assert set(packaging["package-dir"].values()) <= sent
    assert {"pyproject.toml", "README.md", "LICENSE"} <= sent


def test_it_names_every_port_and_checks_health() -> None:
    lines = (IMAGE / "Dockerfile").read_text().splitlines()
    (exposed,) = (line for line in lines if line.startswith("EXPOSE "))
    assert {int(port) for port in exposed.split()[1:]} == {port.number for port in PORTS}
    (check,) = (line for line in lines if line.startswith("HEALTHCHECK "))
    words = json.loads(check.partition(" CMD ")[2])
    (copied,) = (line.split()[1:] for line in lines if line.startswith("COPY deploy/"))
    assert (DEPLOY.parent / copied[0]).is_file()
    assert words == ["python", copied[1]]
    assert f"!/{copied[0]}" in (IMAGE / "Dockerfile.dockerignore").read_text().splitlines()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Process and HTTP port of a master that is started as the image starts it: by the name of its program."""
    folder = tmp_path_factory.mktemp("m")
    listen, control, http = free_ports(3)
    flags = ["--listen", f"127.0.0.1:{listen}", "--control", f"127.0.0.1:{control}", "--catalog", "memory:", "--run-dir", str(folder)]
    command = [str(Path(sys.prefix, "bin", "kvstore-master")), *flags, "--http", f"127.0.0.1:{http}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert '"ready"' in process.stdout.readline()
            yield process.pid, http
        finally:
            process.kill()


def checked(pid: int, **environment: str) -> tuple[int, str]:
    command = [sys.executable, str(IMAGE / "healthcheck.py"), str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_daemon_that_answers_is_healthy(master: tuple[int, int]) -> None:
    assert checked(master[0]) == (0, "")


def test_healthcheck_without_daemon_or_port_is_healthy() -> None:
    assert checked(os.getpid()) == (0, "")


@pytest.mark.parametrize("how", ["environment", "file", "flag", "flag="])
def test_where_a_daemon_answers_is_read_as_it_reads_it(tmp_path: Path, how: str) -> None:
    """Of a process that is called as a node, and answers nothing: the port that is asked is in the text."""
    (port,) = free_ports(1)
    file = tmp_path / "kvstore.toml"
    file.write_text(f'[node]\nhttp = "0.0.0.0:{port}"\n')
    given = {"environment": {"KVSTORE_NODE_HTTP": f"0.0.0.0:{port}"}, "file": {"KVSTORE_CONFIG": str(file)}}.get(how, {})
    flags = {"flag": ["--config", str(file)], "flag=": [f"--config={file}"]}.get(how, [])
    with subprocess.Popen([sys.executable, "-c", "input()", "kvstore-node", *flags], stdin=subprocess.PIPE) as process:
        status, text = checked(process.pid, **given)
        process.kill()
    assert (status, f"http://127.0.0.1:{port}/healthz" in text) == (1, True)
