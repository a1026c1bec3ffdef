"""The doctor's checks of transports, on fake machines made of files and on this machine."""

import importlib.metadata
import resource
import sys
from pathlib import Path

import pytest

from kvstore.cli.tools import transport_checks as doctor
from kvstore.cli.tools.transport_checks import Check, CheckVerdict
from kvstore.tiers.huge_pages import SHMEM_ENABLED
from kvstore.transfer.ucx import library as ucx_library


@pytest.fixture
def rdma_host(tmp_path: Path) -> Path:
    """A host with an active InfiniBand port, an NVIDIA driver, and its defaults."""
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "proc/modules": "nvidia 1 0 - Live 0x0\nib_core 1 0 - Live 0x0\n",
        "proc/meminfo": "MemTotal: 1 kB\nHugePages_Total:      10\nHugePages_Free:        4\nHugepagesize:       2048 kB\n",
        "proc/sys/kernel/yama/ptrace_scope": "1\n",
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    return tmp_path


@pytest.fixture
def no_ucxx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setattr(ucx_library, "bindings", ucx_library.bindings.__wrapped__)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_examine_has_finding_and_advice_on_this_machine() -> None:
    checks = doctor.examine()
    assert len({check.name for check in checks}) == len(checks) == 12
    assert all(check.found for check in checks)
    assert all(check.advice for check in checks if check.verdict is not CheckVerdict.OK)


def test_ucx_says_version_path_and_transports() -> None:
    pytest.importorskip("ucxx")
    assert doctor.ucxx().found.startswith("version ")
    assert "/libucp.so" in doctor.libucx(has_rdma=False).found
    assert "tcp/lo" in doctor.ucx_transports().found


@pytest.mark.usefixtures("no_ucxx")
def test_without_ucxx_it_says_what_to_install() -> None:
    for check in (doctor.ucxx(), doctor.libucx(has_rdma=True), doctor.ucx_transports()):
        assert (check.verdict, check.advice) == (CheckVerdict.MISSING, "pip install '.[ucx]' in the checkout of kvstore")


def test_libucx_without_verbs_warns_with_rdma_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_library, "loaded", lambda: ucx_library.LoadedUcx("1.21.0", "/lib/libucp.so", False))
    assert doctor.libucx(has_rdma=False).verdict is CheckVerdict.OK
    assert doctor.libucx(has_rdma=True).verdict is CheckVerdict.WARNING
    monkeypatch.setattr(ucx_library, "loaded", lambda: ucx_library.LoadedUcx("1.21.0", "/lib/libucp.so", True))
    assert "with verbs" in doctor.libucx(has_rdma=True).found


def test_nixl_needs_its_ucx_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name] if name == "nixl-cu13" else [])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.5 of {name}")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Path("lib/libplugin_UCX.so"), Path("nixl.py")])
    assert doctor.nixl() == Check("nixl", CheckVerdict.OK, "version 1.5 of nixl-cu13, plug-ins UCX")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    assert doctor.nixl().verdict is CheckVerdict.MISSING
    assert "plug-ins none" in doctor.nixl().found
    write(tmp_path / "libplugin_UCX.so", "")
    assert doctor.nixl().verdict is CheckVerdict.OK


def test_a_missing_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    assert doctor.nixl() == Check("nixl", CheckVerdict.MISSING, "not installed", "pip install '.[nixl]' in the checkout of kvstore")


def test_rdma_ports_show_state_rate_and_link_layer(rdma_host: Path) -> None:
    assert doctor.rdma(rdma_host) == Check("RDMA devices", CheckVerdict.OK, "mlx5_0:1 4: ACTIVE 400 Gb/sec (4X NDR) InfiniBand")
    write(rdma_host / "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    assert doctor.rdma(rdma_host).verdict is CheckVerdict.WARNING


def test_peermem_is_needed_where_an_nvidia_gpu_meets_rdma(rdma_host: Path) -> None:
    assert doctor.peermem(rdma_host, has_rdma=True).verdict is CheckVerdict.MISSING
    assert "no RDMA device" in doctor.peermem(rdma_host, has_rdma=False).found
    write(rdma_host / "proc/modules", "nvidia_peermem 1 0 - Live 0x0\nnvidia 1 0 - Live 0x0\n")
    assert doctor.peermem(rdma_host, has_rdma=True) == Check("nvidia_peermem", CheckVerdict.OK, "loaded")


def test_locked_memory_is_limited_where_rdma_locks_it() -> None:
    assert doctor.locked_memory(resource.RLIM_INFINITY, has_rdma=True) == Check("locked memory", CheckVerdict.OK, "unlimited")
    assert doctor.locked_memory(8 << 20, has_rdma=True).verdict is CheckVerdict.WARNING
    assert "8 MiB" in doctor.locked_memory(8 << 20, has_rdma=False).found


def test_huge_pages_check_names_the_setting_to_change(tmp_path: Path) -> None:
    write(tmp_path / SHMEM_ENABLED, "always within_size advise [never] deny force\n")
    refused = doctor.transparent_hugepages(tmp_path)
    assert (refused.verdict, refused.found) == (CheckVerdict.WARNING, "shmem_enabled is never")
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in refused.advice
    assert "`w /sys/kernel/mm/transparent_hugepage/shmem_enabled - - - - advise`" in refused.advice
    write(tmp_path / SHMEM_ENABLED, "always within_size [advise] never deny force\n")
    assert doctor.transparent_hugepages(tmp_path) == Check("shared huge pages", CheckVerdict.OK, "shmem_enabled is advise")


def test_a_small_shared_memory_is_a_warning() -> None:
    assert doctor.judge_shared_memory(64 << 20, 64 << 20).verdict is CheckVerdict.WARNING
    assert doctor.judge_shared_memory(1 << 30, 1 << 20) == Check("/dev/shm", CheckVerdict.OK, "1 MiB of 1 GiB free")
    assert doctor.shared_memory(Path("/")).found.endswith("free")


def test_few_open_files_are_a_warning() -> None:
    assert doctor.open_files(1024).verdict is CheckVerdict.WARNING
    assert doctor.open_files(20_000) == Check("open files", CheckVerdict.OK, "at most 20,000")
    assert doctor.open_files(resource.RLIM_INFINITY).found == "unlimited"
