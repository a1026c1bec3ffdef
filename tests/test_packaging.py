"""The package is complete: it contains every folder of code, and its requirements are those of the generated code."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.protocol.version import VERSION
from tests.pythons import supported

ROOT = Path(__file__).resolve().parent.parent


def test_every_room_is_packaged() -> None:
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = set()
    for name, folder in packaging["package-dir"].items():
        for found in (ROOT / folder).rglob("__init__.py"):
            if any((parent / "pyproject.toml").exists() for parent in found.parents if parent != ROOT and ROOT in parent.parents):
                continue  # a distribution of its own
            rooms.add(".".join([name, *found.parent.relative_to(ROOT / folder).parts]))
    assert set(packaging["packages"]) == rooms


def test_the_package_itself_has_the_clients_and_its_version() -> None:
    """In a checkout the package is a name space; what is installed has this file (tests/packages)."""
    spec = importlib.util.spec_from_file_location("package", ROOT / "package" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    assert (package.Client, package.AsyncClient, package.__version__) == (Client, AsyncClient, VERSION)
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'"):
        _ = package.Clinet


def test_the_grpc_code_runs_with_the_oldest_versions_allowed() -> None:
    """Generated code refuses a protobuf or a grpcio older than its generator's."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    messages, services = ((ROOT / "protocol" / name).read_text() for name in ("control_pb2.py", "control_pb2_grpc.py"))
    for package, source, pattern in (
        ("protobuf", messages, r"Protobuf Python Version: ([\d.]+)"),
        ("grpcio", services, r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
    ):
        (generated,) = re.findall(pattern, source)
        (oldest,) = re.findall(rf"^{package}>=([\d.]+)", "\n".join(required), re.MULTILINE)
        assert _numbers(generated) <= _numbers(oldest), package


def _numbers(version: str) -> list[int]:
    numbers = [int(part) for part in version.split(".")]
    return numbers + [0] * (3 - len(numbers))


def test_supported_pythons_are_told_alike() -> None:
    """The classifiers, by which `make test-pythons` goes, README.md, docs/getting-started.md and the Makefile."""
    releases = supported()
    assert releases == [f"3.{minor}" for minor in range(int(releases[0][2:]), int(releases[-1][2:]) + 1)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={releases[0]}"
    told = f"Python {', '.join(releases[:-1])} or {releases[-1]}"
    assert all(told in (ROOT / page).read_text() for page in ("README.md", "docs/getting-started.md"))
    assert f"each Python from {releases[0]} to {releases[-1]}" in (ROOT / "Makefile").read_text()
