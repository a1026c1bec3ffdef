"""File of the user's cache folder that remembers fingerprints, so that each rank and each restart of an engine does not read them again."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

MAX_ENTRIES: Final = 1024
"""The oldest go first."""
MAX_FILE_BYTES: Final = 1 << 20
"""A larger file is not ours."""
DEFAULT: Final = Path("$XDG_CACHE_HOME/kvstore/fingerprints.json")
"""XDG_CACHE_HOME is looked up at each use, and is ~/.cache where it is not set."""


class Remembered:
    """Texts by key, in a file that processes share. A lost or damaged file costs time, nothing else: no method raises OSError.

    Processes that write at once may lose entries of each other.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = _expanded(path)

    def get(self, key: str) -> str:
        """Return the text, or an empty one."""
        return self._read().get(key, "")

    def put(self, key: str, text: str) -> None:
        """Replace the file by one with this entry."""
        if self._path is None:
            return
        entries = self._read()
        entries.pop(key, None)
        entries[key] = text
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._path, json.dumps(newest))

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            with open(self._path, "rb") as file:
                found = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
            return {}
        return found


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _expanded(path: Path | None) -> Path | None:
    if path is not DEFAULT:
        return path
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / DEFAULT.relative_to(DEFAULT.parts[0])
