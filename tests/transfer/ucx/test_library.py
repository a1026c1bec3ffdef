"""Choice of the UCX library: in processes of their own, for a process loads one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.transfer.ucx import library as ucx_library

libucx = pytest.importorskip("libucx")
WHEEL = Path(libucx.__file__).resolve().parent / "lib"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A directory that looks like a system UCX with verbs: the wheel's libraries, and a module of that name."""
    for name in [*ucx_library.LIBRARIES, "libucm.so.0"]:
        (tmp_path / name).write_bytes((WHEEL / name).read_bytes())
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    return tmp_path


def loaded_in_new_process(**environment: str) -> str:
    """Output of `loaded` there."""
    code = "from kvstore.transfer.ucx import library; print(library.loaded())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120, text=True, check=True)
    return done.stdout


def test_a_system_ucx_with_verbs_is_preferred(system: Path) -> None:
    said = loaded_in_new_process(LD_LIBRARY_PATH=str(system))
    assert str(system) in said
    assert "has_verbs=True" in said


def test_the_preference_is_told_to_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ucx_library.PREFER_SYSTEM, "")
    monkeypatch.delenv(ucx_library.PREFER_SYSTEM)  # restored at the end
    loader = sys.modules["libucx.load"]
    monkeypatch.setattr(loader, "UCX_LIBRARIES", [])
    monkeypatch.setattr(ucx_library, "system_library", lambda: WHEEL)  # loaded already: loading it again changes nothing
    ucx_library._prefer_system_library()
    assert loader.UCX_LIBRARIES == list(ucx_library.LIBRARIES)
    assert ucx_library.PREFER_SYSTEM in os.environ


def test_a_system_ucx_needs_verbs_and_a_recent_version(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ucx_library.system_library([str(system)]) == system
    assert ucx_library.system_library(["/nowhere", str(WHEEL)]) is None
    monkeypatch.setattr(ucx_library, "MIN_VERSION", (99,))
    assert ucx_library.system_library([str(system)]) is None
    monkeypatch.undo()
    (system / "libucp.so.0").write_bytes(b"broken")
    assert ucx_library.version_of(system) == ()
    assert ucx_library.system_library([str(system)]) is None


def test_a_missing_ucxx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(ConfigError, match=r"\.\[ucx\]"):
        ucx_library.bindings.__wrapped__()
