"""What is installed is what there is: every folder of code is among the packages."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_room_is_packaged() -> None:
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = set()
    for name, folder in packaging["package-dir"].items():
        for found in (ROOT / folder).rglob("__init__.py"):
            rooms.add(".".join([name, *found.parent.relative_to(ROOT / folder).parts]))
    assert set(packaging["packages"]) == rooms
