"""The units: systemd understands them, they give up what they do not need, and a daemon has the time to stop that its settings want.

Needs systemd's own tools (Debian: systemd); `make test` installs them.
"""

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.master.config import MasterSettings
from kvstore.protocol.settings import load_settings
from kvstore.router.config import RouterSettings, check_settings
from kvstore.store.config import NodeSettings
from kvstore.store.storage import SHUTDOWN_TIMEOUT_S, check
from kvstore.transfer.config import TransferSettings
from tests.deploy.rendering import DEPLOY

pytestmark = pytest.mark.slow

FOLDER = DEPLOY / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
MAX_EXPOSURE = 2.5
"""Of 10, as `systemd-analyze security` measures it; below 3 it calls a unit OK. A unit without any of this has 9.6."""


def ran(*command: str | Path) -> str:
    """Run a command that must succeed, and return its output on both streams."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def service(name: str) -> dict[str, str]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / f"kvstore-{name}.service")
    return dict(unit["Service"])


def settings(kind: Any, section: str, **flags: Any) -> Any:
    return load_settings(kind, section, flags=flags, environ={}, config=str(FOLDER / "kvstore.toml"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_understands_every_line(unit: Path, tmp_path: Path) -> None:
    """With a program that is there: the one of the unit is installed where it runs."""
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", unit.read_text()))
    assert ran("systemd-analyze", "verify", "--man=no", copy) == ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_gives_up_what_it_does_not_need(unit: Path) -> None:
    said = ran("systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSURE * 10:.0f}", unit)
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert float(exposure) <= MAX_EXPOSURE


def test_a_daemon_has_the_time_to_stop_that_its_settings_want() -> None:
    node, router = settings(NodeSettings, "node"), settings(RouterSettings, "router")
    assert int(service("node")["TimeoutStopSec"]) >= node.drain_s + SHUTDOWN_TIMEOUT_S + 10
    assert int(service("router")["TimeoutStopSec"]) >= router.drain_s + 10


def test_the_settings_are_settings() -> None:
    node = settings(NodeSettings, "node")
    check(settings(NodeSettings, "node", socket_group=""))  # the group is made where it runs
    check_settings(settings(RouterSettings, "router"))
    assert settings(MasterSettings, "master").run_dir == node.run_dir == "/run/kvstore"
    assert settings(TransferSettings, "transfer").listen_port


def test_what_a_unit_writes_to_is_made_for_its_user(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    ran("systemd-sysusers", f"--root={tmp_path}", FOLDER / "kvstore.sysusers.conf")
    assert re.search(r"^kvstore:", (tmp_path / "etc" / "passwd").read_text(), re.MULTILINE)
    made = {line.split()[1] for line in (FOLDER / "kvstore.tmpfiles.conf").read_text().splitlines() if line.startswith("d ")}
    ran("systemd-tmpfiles", "--create", "--prefix=/run", "--prefix=/var", f"--root={tmp_path}", FOLDER / "kvstore.tmpfiles.conf")
    for name in ("master", "node"):
        assert set(service(name)["ReadWritePaths"].split()) == made
    assert all(Path(tmp_path, folder.removeprefix("/")).is_dir() for folder in made)
    uid = re.search(r"^kvstore:x:(\d+):", (tmp_path / "etc" / "passwd").read_text(), re.MULTILINE)
    assert uid is not None
    assert (tmp_path / "run" / "kvstore").stat().st_uid == int(uid[1])
