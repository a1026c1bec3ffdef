"""Settings that cannot be met: each program says so in one line and ends with code 2.

Ports in use are met by processes of their own; the rest, which is refused on the same way, in this one.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.main import kvstore
from kvstore.store.daemon import main as node
from tests.ports import free_ports
from tests.refusals import refused_here
from tests.system.running import System, refusal, until

MASTER, NODE, CLI = "kvstore.master.daemon", "kvstore.store.daemon", "kvstore.cli.main"
ANYWHERE = ("--listen", "127.0.0.1:0")


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as owner:
        yield f"127.0.0.1:{owner.getsockname()[1]}"


@pytest.fixture
def nowhere() -> str:
    """Return an address without a listener."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.promise("settings-checked")
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (MASTER, ["--control", "127.0.0.1:0", "--listen"]),
        (MASTER, [*ANYWHERE, "--control"]),
        (NODE, ["--dram", "1MiB", "--listen"]),
        (CLI, ["up", "--dram", "1MiB", "--listen"]),
    ],
)
def test_a_port_in_use_is_named(tmp_path: Path, taken: str, module: str, flags: list[str]) -> None:
    run_dir = () if module == CLI else ("--run-dir", str(tmp_path))
    line = refusal(module, *flags, taken, *run_dir)
    assert taken.rpartition(":")[2] in line
    assert "in use" in line


@pytest.fixture(params=["a file", "in a file", "in /sys"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a path at which even root can neither create a folder nor write."""
    place = tmp_path / "place"
    place.write_text("in the way")
    return {"a file": place, "in a file": place / "nvme", "in /sys": Path("/sys/kvstore")}[request.param]


@pytest.mark.promise("settings-checked")
def test_an_nvme_folder_that_cannot_be_written_is_named(tmp_path: Path, unwritable: Path) -> None:
    line = refused_here(node, *ANYWHERE, "--run-dir", str(tmp_path / "run"), "--dram", "1MiB", "--nvme", f"{unwritable}:16MiB")
    assert str(unwritable) in line


@pytest.mark.promise("settings-checked")
def test_a_capacity_of_nothing_or_beyond_the_machine_is_refused(tmp_path: Path) -> None:
    """DRAM of 0 is not: the node chooses."""
    for tier, size in (("nvme", "0"), *((tier, size) for tier in ("dram", "nvme") for size in ("-1", "1PiB", "a lot"))):
        place = f"{tmp_path / 'nvme'}:" if tier == "nvme" else ""
        line = refused_here(node, *ANYWHERE, "--run-dir", str(tmp_path / "run"), f"--{tier}={place}{size}")
        assert tier in line.lower()


@pytest.mark.promise("input-untrusted")
def test_an_unreachable_master_is_named_by_every_command(nowhere: str) -> None:
    for command in (["status"], ["get", "key"], ["put", "key", __file__], ["rm", "key"]):
        assert nowhere in refused_here(kvstore, *command, "--master", nowhere, "--deadline-s", "1")


@pytest.mark.slow
def test_second_node_of_a_live_name_exits_first_continues(system: System, tmp_path: Path) -> None:
    log = tmp_path / "second.log"
    flags = ["--master", system.address, *ANYWHERE, "--name", "n0", "--run-dir", str(tmp_path / "second"), "--dram", "1MiB"]
    with (
        log.open("wb") as errors,
        subprocess.Popen([sys.executable, "-m", NODE, *flags], stdout=subprocess.DEVNULL, stderr=errors) as second,
    ):
        try:
            until(lambda: "already has the name" in log.read_text(), "the second node hears why")
            assert second.wait(60) == 2
            told = log.read_text().splitlines()[-1]
            assert told.startswith("kvstore-node: error: a live node already has the name 'n0', at 127.0.0.1:"), told
            with system.client() as client:
                assert client.put(b"k", b"value")
                assert client.get(b"k") == b"value"
        finally:
            second.kill()
