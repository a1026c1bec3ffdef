"""A mutant: a seeded bug as a text replacement in one file, and the tests that must detect it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PATCHES: Final = Path(__file__).parent / "patches"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A seeded bug. `breaks` describes its effect on a user; `file` and `tests` are relative to the project's root."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def patched(self, source: str) -> str:
        """Return the source with the bug. Raises ValueError unless the old text occurs exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}, not once: update the patch")
        return source.replace(self.old, self.new)


def read(path: Path) -> Mutant:
    """Read a mutant from its file, whose stem is its name."""
    fields = tomllib.loads(path.read_text())
    return Mutant(path.stem, fields["breaks"], fields["file"], fields["old"], fields["new"], tuple(fields["tests"]))


def read_all(folder: Path = PATCHES) -> list[Mutant]:
    """Read all mutants of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.toml"))]
