"""Fingerprint of a checkpoint: a short text, equal for equal weights at any path, different for different weights.

- `sampled` hashes the headers of all safetensors files, names and sizes of all weight files, and at most 4,096 samples
  of 4 KiB of their tensors. Weights that differ only between samples have equal fingerprints: a few rows of an
  embedding, or one tensor of more than 4,096.
- `full` hashes all bytes.
- A snapshot in a Hugging Face cache is identified by its commit; only `full` reads it.

The hash is xxh3_128, which keeps up with a disk when `full` reads 100 GB; blake2b does not. It does not resist an
attacker who crafts weights with equal fingerprints: use tenants and salts to separate users who do not trust each
other.

Fingerprints are cached in a file of the user's cache folder, so that ranks and restarts do not read the weights again.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import xxhash

from kvstore.engines.weights.files import ADAPTER_CONFIG, REMEDY, SUFFIXES, WeightFile, hub_commit, list_files
from kvstore.engines.weights.samples import Range, choose_samples, edges, read_header
from kvstore.protocol.errors import ConfigError

MAX_ENTRIES: Final = 1024
"""The oldest entries are dropped first."""
MAX_FILE_BYTES: Final = 1 << 20
"""A larger file was not written by this module."""
DEFAULT: Final = Path("$XDG_CACHE_HOME/kvstore/fingerprints.json")
"""XDG_CACHE_HOME is read at each use; default ~/.cache."""


class Remembered:
    """Cache of texts by key, in a file that processes share. Never raises OSError: a lost or damaged file only costs
    time.

    Processes that write concurrently may lose each other's entries.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = _expanded(path)

    def get(self, key: str) -> str:
        """Return the text, or an empty one."""
        return self._read().get(key, "")

    def put(self, key: str, text: str) -> None:
        """Add the entry and replace the file."""
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


Mode = Literal["sampled", "full"]

THREADS: Final = 32
"""Concurrent reads: a network file system takes a millisecond or more for each."""
READS_A_TASK: Final = 64
"""Ranges that a thread reads per opened file."""
CHUNK_BYTES: Final = 8 << 20
"""Size of one read in mode `full`."""
WHOLE_ADAPTER_BYTES: Final = 64 << 20
"""Adapters up to this size are hashed whole."""
SETTLED_NS: Final = 2_000_000_000
"""Minimum age of a file's last change for its timestamps to be unique: some file systems have a resolution of
seconds."""
_FORMAT: Final = b"kvstore weights 1\n"


def fingerprint(path: Path | str, *, mode: Mode = "sampled", cache: Path | None = DEFAULT, now_ns: Callable[[], int] = time.time_ns) -> str:
    """Return the fingerprint of the checkpoint in the folder or file `path`: at most 80 ASCII characters without spaces
    or `@`.

    Args:
        cache: file that caches fingerprints by the files' stat; None: no cache. An unusable cache is ignored.

    Raises:
        ConfigError: no weight files, or an unreadable or truncated one, which the text names.
    """
    path = Path(path)
    return _remembered(path, list_files(path), mode, b"", cache, now_ns)


def adapter_fingerprint(
    path: Path | str, *, mode: Mode = "sampled", cache: Path | None = DEFAULT, now_ns: Callable[[], int] = time.time_ns
) -> str:
    """Return the fingerprint of a LoRA's folder: its weight files and adapter_config.json, without the name of its base
    model.

    Files of at most WHOLE_ADAPTER_BYTES in total are hashed whole. Arguments and errors are those of `fingerprint`.
    """
    path = Path(path)
    files = list_files(path)
    is_small = sum(file.size_bytes for file in files) <= WHOLE_ADAPTER_BYTES
    return _remembered(path, files, "full" if is_small else mode, _adapter_config(path), cache, now_ns)


def stamp(path: Path | str) -> bytes:
    """Return 16 bytes that change when a weight file in `path` changes, by stat alone. Empty: no weight files."""
    try:
        files = list_files(Path(path))
    except ConfigError:
        return b""
    return _stat_digest(files) if files else b""


def _remembered(path: Path, files: list[WeightFile], mode: Mode, config: bytes, cache: Path | None, now_ns: Callable[[], int]) -> str:
    if not files:
        raise ConfigError(f"{path} has no weight files ({', '.join(sorted(SUFFIXES))}); {REMEDY}")
    commit = hub_commit(path, files) if mode == "sampled" else ""
    if commit:
        return f"hub-{commit}-{xxhash.xxh3_64_hexdigest(config + _names(files))}"
    key = xxhash.xxh3_128_hexdigest(f"{mode}\n{path.resolve()}\n".encode() + config + _stat_digest(files))
    remembered = Remembered(cache)
    if known := remembered.get(key):
        return known
    newest_ns = max(max(file.mtime_ns, file.ctime_ns) for file in files)
    is_settled = newest_ns + SETTLED_NS < now_ns()
    computed = f"{mode}-{_content_digest(files, mode, config)}"
    if is_settled:
        remembered.put(key, computed)
    return computed


def _content_digest(files: list[WeightFile], mode: Mode, config: bytes) -> str:
    hasher = xxhash.xxh3_128(_FORMAT + config + _names(files))
    with ThreadPoolExecutor(min(THREADS, 4 * len(files) + 4), thread_name_prefix="kvstore-weights") as pool:
        if mode == "full":
            ranges = [
                Range(index, start, min(start + CHUNK_BYTES, file.size_bytes))
                for index, file in enumerate(files)
                for start in range(0, file.size_bytes, CHUNK_BYTES)
            ]
        else:
            headers = list(pool.map(read_header, files, range(len(files))))
            hasher.update(b"".join(header.digest for header in headers))
            ranges = choose_samples([tensor for header in headers for tensor in header.tensors])
            for index, header in enumerate(headers):
                if not header.digest:
                    ranges += edges(index, files[index].size_bytes)
        for digests in pool.map(lambda task: _read_digests(files[task[0].file], task), _tasks(ranges)):
            hasher.update(digests)
    return str(hasher.hexdigest())


def _tasks(ranges: Sequence[Range]) -> Iterable[list[Range]]:
    """Group the ranges into runs of one file, of at most READS_A_TASK."""
    task: list[Range] = []
    for piece in ranges:
        if task and (piece.file != task[0].file or len(task) == READS_A_TASK):
            yield task
            task = []
        task.append(piece)
    if task:
        yield task


def _read_digests(file: WeightFile, ranges: Sequence[Range]) -> bytes:
    """Return one digest per range. pread and hashes of large ranges release the GIL."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if len(ranges) > 1 and ranges[0].end - ranges[0].start < CHUNK_BYTES:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # else each sample reads 128 KiB ahead
            return b"".join(_read_digest(descriptor, piece, file) for piece in ranges)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"cannot read {file.path}: {error.strerror or error}") from error


def _read_digest(descriptor: int, piece: Range, file: WeightFile) -> bytes:
    hasher, start = xxhash.xxh3_128(), piece.start
    while start < piece.end:
        read = os.pread(descriptor, piece.end - start, start)
        if not read:
            raise ConfigError(f"{file.path} shrank below {piece.end} bytes while it was read: start again when it is completely written")
        hasher.update(read)
        start += len(read)
    return bytes(hasher.digest())


def _names(files: Iterable[WeightFile]) -> bytes:
    return "".join(f"{file.name}\0{file.size_bytes}\n" for file in files).encode("utf-8", "surrogateescape")


def _stat_digest(files: Iterable[WeightFile]) -> bytes:
    return bytes(xxhash.xxh3_128_digest("".join(file.stat_text for file in files).encode("utf-8", "surrogateescape")))


def _adapter_config(path: Path) -> bytes:
    """Return the LoRA's configuration in canonical form, without its base model's path. Empty without the file."""
    try:
        raw = (path / ADAPTER_CONFIG).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        raise ConfigError(f"cannot read {path / ADAPTER_CONFIG}: {error.strerror or error}") from error
    try:
        config = json.loads(raw)
        config.pop("base_model_name_or_path", None)
        return json.dumps(config, sort_keys=True).encode()
    except (ValueError, AttributeError, RecursionError):
        return raw
