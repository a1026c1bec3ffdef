"""Promises of the distribution: what it is called, what it has, and that what documents and messages name can be installed."""

import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvstore.protocol.version import VERSION
from tests.packages.installed import ROOT, copied, installed, ran

pytestmark = pytest.mark.slow

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names_in_wheel(dist: Path) -> list[str]:
    (wheel,) = dist.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_and_sdist_have_free_name_and_pass_twine(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == [f"kvstore_llm-{VERSION}-py3-none-any.whl", f"kvstore_llm-{VERSION}.tar.gz"]
    said = ran(sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    assert said.count("PASSED") == 2, said


def test_wheel_has_exactly_the_package_files(dist: Path) -> None:
    packaging = PYPROJECT["tool"]["setuptools"]
    expected = set()
    for package in packaging["packages"]:
        top = max((name for name in packaging["package-dir"] if package == name or package.startswith(f"{name}.")), key=len)
        folder = ROOT / packaging["package-dir"][top] / Path(*package.removeprefix(top).split("."))
        for suffix in (".py", ".pyi", ".proto", ".json"):
            expected |= {f"{package.replace('.', '/')}/{path.name}" for path in folder.glob(f"*{suffix}")}
        if (folder / "py.typed").exists():
            expected.add(f"{package.replace('.', '/')}/py.typed")
    console = ROOT / "console"
    expected |= {f"kvstore/console/{path.relative_to(console)}" for path in (console / "page").rglob("*") if path.is_file()}
    found = {name for name in names_in_wheel(dist) if ".dist-info/" not in name}
    assert expected - found == set()
    assert {name for name in found - expected if name.endswith(".py")} == set()
    assert "kvstore/py.typed" in found


def test_the_sdist_has_what_the_wheel_is_made_of(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    for name in ("pyproject.toml", "README.md", "LICENSE", "package/__init__.py", "protocol/control.proto"):
        assert f"kvstore_llm-{VERSION}/{name}" in names


def test_wheel_clients_import_in_an_empty_environment(commands: Path) -> None:
    program = "import kvstore; from kvstore import Client, AsyncClient; print(kvstore.__version__, Client.__name__, kvstore.__file__)"
    version, name, file = ran(str(commands / "python"), "-I", "-c", program).split()
    assert (version, name) == (VERSION, "Client")
    assert Path(file).is_relative_to(commands.parent)


@pytest.mark.parametrize("command", sorted(PYPROJECT["project"]["scripts"]))
def test_every_command_is_there_and_explains_itself(commands: Path, command: str) -> None:
    assert "--help" in ran(str(commands / command), "--help")


@pytest.fixture(scope="module")
def types_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of mypy's cache for the other packages, which are the same in each environment. mypy locates kvstore in every run."""
    return tmp_path_factory.mktemp("types")


def revealed(python: Path, folder: Path, cache: Path) -> str:
    """Return mypy's output for a program that uses both clients."""
    program = folder / "program.py"
    program.write_text("from kvstore import AsyncClient, Client\n\nreveal_type(Client().get(b'key'))\nreveal_type(AsyncClient().ping)\n")
    mypy = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache))
    return ran(*mypy, "--python-executable", str(python), str(program), cwd=folder)


def test_a_type_checker_sees_the_types_of_what_is_installed(commands: Path, types_cache: Path, tmp_path: Path) -> None:
    said = revealed(commands / "python", tmp_path, types_cache)
    assert "bytes | None" in said
    assert "Coroutine[Any, Any, float]" in said


def test_editable_installation_has_types(types_cache: Path, tmp_path: Path) -> None:
    """As ARCHITECTURE.md says: a strict one is a folder of links, which they follow; what setuptools makes by default they cannot."""
    sources = copied(tmp_path / "sources")
    environment = installed(tmp_path / "env", "--config-settings", "editable_mode=strict", "--editable", str(sources))
    assert "bytes | None" in revealed(environment / "python", tmp_path, types_cache)
