"""Weight files of a checkpoint, and the local path of a model that is given by its hub name."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.protocol.errors import ConfigError

SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".npy", ".tensors"})
"""Formats that engines load weights from."""
TRAINER_FILES: Final = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt", "rng_state.pth"}
)
"""Files with such a suffix that trainers write and no engine loads."""
ADAPTER_CONFIG: Final = "adapter_config.json"
REMEDY: Final = "name its weights by the setting `revision`, or set `fingerprint` to off"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of a checkpoint, with the stat fields that identify its contents."""

    name: str
    """File name in the folder. For a checkpoint of a single file, only the suffix, because copies may have other
    names."""
    path: Path
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    is_hub_link: bool
    """True if the file links to a blob of a Hugging Face cache."""

    @property
    def stat_text(self) -> str:
        return f"{self.name} {self.inode} {self.size_bytes} {self.mtime_ns} {self.ctime_ns}\n"


def list_files(path: Path) -> list[WeightFile]:
    """Return the weight files of a checkpoint by rising name: those directly in a folder, or the file itself.

    Raises:
        ConfigError: `path` does not exist, or cannot be read.
    """
    try:
        if not path.is_dir():
            return [_weight_file(path, path.suffix)]
        names = sorted(entry.name for entry in os.scandir(path) if _is_weight_file(entry))
        return [_weight_file(path / name, name) for name in names]
    except OSError as error:
        raise ConfigError(f"cannot read the checkpoint {path}: {error.strerror or error}; {REMEDY}") from error


def find_checkpoint(
    model: str | Path, *, revision: str = "", hub_cache: Path | None = None, environ: Mapping[str, str] | None = None
) -> Path | None:
    """Return the folder or file of `model`: a local path, or a hub name in the Hugging Face cache. None if neither
    exists.

    Does not access a hub. Without `revision`, a hub name means the commit that the cache has for `main`.

    Args:
        hub_cache: root of the cache, as an engine's `--download-dir`. None: from `environ`, as huggingface_hub does.
    """
    local = Path(model).expanduser()
    if local.exists():
        return local
    if not _HUB_NAME.fullmatch(str(model)):
        return None
    root = hub_cache if hub_cache is not None else _hub_cache(os.environ if environ is None else environ)
    folder = root / f"models--{str(model).replace('/', '--')}"
    commit = revision if _COMMIT.fullmatch(revision) else _read_reference(folder / "refs" / (revision or "main"))
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def hub_commit(path: Path, files: list[WeightFile]) -> str:
    """Return the commit of a snapshot in a Hugging Face cache, whose files link to blobs named by content. Otherwise
    an empty text."""
    folder = path if path.is_dir() else path.parent
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) and all(file.is_hub_link for file in files)
    return folder.name if is_snapshot else ""


def _is_weight_file(entry: os.DirEntry[str]) -> bool:
    return os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.name not in TRAINER_FILES and entry.is_file()


def _weight_file(path: Path, name: str) -> WeightFile:
    found = path.stat()
    is_hub_link = path.is_symlink() and Path(os.readlink(path)).parent.name == "blobs"
    return WeightFile(name, path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, is_hub_link)


def _hub_cache(environ: Mapping[str, str]) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _read_reference(path: Path) -> str:
    try:
        commit = path.read_text().strip()
    except (OSError, ValueError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""
