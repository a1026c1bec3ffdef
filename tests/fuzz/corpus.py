"""The kept inputs of a target: a file of base64 lines each, so that hundreds of them are one file."""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
MAX_INPUT_BYTES: Final = 4096


def path_of(target: str) -> Path:
    return CORPUS / f"{target}.txt"


def read(target: str) -> list[bytes]:
    """The inputs that are kept for a target; none for one that has no file."""
    path = path_of(target)
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(target: str, inputs: Iterable[bytes]) -> None:
    """Keep these, each once, shortest first."""
    kept = sorted(set(inputs), key=lambda data: (len(data), data))
    path_of(target).write_text("".join(base64.b64encode(data).decode() + "\n" for data in kept))


def unpack(target: str, folder: Path) -> None:
    """As files, as a fuzzer takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(read(target)):
        (folder / f"{number:06}").write_bytes(data)
