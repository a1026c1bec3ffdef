"""What is installed is what there is: every folder of code is among the packages, and its requirements are those of the generated code."""

import re
import tomllib
from pathlib import Path

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
