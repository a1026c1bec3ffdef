"""One seeded bug: which text of which file becomes which other, and which tests have to notice."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PATCHES: Final = Path(__file__).parent / "patches"


@dataclass(frozen=True, slots=True)
class Mutant:
    """See the module. `breaks` says in a sentence what goes wrong for a user; `file` and `tests` are relative to the project's root."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def patched(self, source: str) -> str:
        """The source with the bug in it. Raises ValueError: the text stands there not once, so that the patch has to be written anew."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}, not once; write the patch anew")
        return source.replace(self.old, self.new)


def read(path: Path) -> Mutant:
    """A mutant of its file, which is named as it is."""
    fields = tomllib.loads(path.read_text())
    return Mutant(path.stem, fields["breaks"], fields["file"], fields["old"], fields["new"], tuple(fields["tests"]))


def read_all(folder: Path = PATCHES) -> list[Mutant]:
    """All of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.toml"))]
