"""Fingerprints of checkpoints on the disk: what changes them, what does not, and what is remembered.

The file of fingerprints: shared, bounded, and never in the way.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from kvstore.engines.weights import fingerprint as fingerprints
from kvstore.engines.weights.files import list_files
from kvstore.engines.weights.fingerprint import (
    DEFAULT,
    MAX_ENTRIES,
    WHOLE_ADAPTER_BYTES,
    Mode,
    Remembered,
    adapter_fingerprint,
    fingerprint,
    stamp,
)
from kvstore.engines.weights.samples import Range, choose_samples, read_header
from kvstore.protocol.errors import ConfigError
from tests.engines.weights.checkpoints import safetensors, write_checkpoint, write_snapshot

MODES: list[Mode] = ["sampled", "full"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER_NS = 1 << 62
"""A clock by which any file has settled."""


def overwrite(path: Path, value: bytes, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(value)


@pytest.mark.parametrize("mode", MODES)
def test_fingerprint_ignores_path_and_configuration(tmp_path: Path, mode: Mode) -> None:
    first = fingerprint(write_checkpoint(tmp_path / "a"), mode=mode, cache=None)
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    (tmp_path / "elsewhere" / "b" / "tokenizer.json").write_text("{}")
    assert fingerprint(str(tmp_path / "elsewhere" / "b"), mode=mode, cache=None) == first
    assert first.startswith(mode + "-")
    assert len(first) <= 80
    assert "@" not in first


@pytest.mark.parametrize("mode", MODES)
def test_fingerprint_sees_each_kind_of_change(tmp_path: Path, mode: Mode) -> None:
    """A byte of each tensor, of a header, a name, a file more, the order of what two files hold."""
    seen = {fingerprint(write_checkpoint(tmp_path / "a"), mode=mode, cache=None)}
    path = tmp_path / "a" / "model-0.safetensors"
    raw = path.read_bytes()
    for at in (30, len(raw) - 1, len(raw) - 20_001, len(raw) - 40_001):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] if at > 30 else raw.replace(b"layers", b"layerz", 1))
        seen.add(fingerprint(tmp_path / "a", mode=mode, cache=None))
    path.write_bytes(raw)
    (tmp_path / "a" / "extra.bin").write_bytes(b"more")
    seen.add(fingerprint(tmp_path / "a", mode=mode, cache=None))
    (tmp_path / "a" / "extra.bin").rename(tmp_path / "a" / "other.bin")
    seen.add(fingerprint(tmp_path / "a", mode=mode, cache=None))
    assert len(seen) == 7


def test_fingerprint_samples_large_files(tmp_path: Path) -> None:
    """Of 64 MiB without a header each quarter is sampled, and the end; `full` sees any byte."""
    path = tmp_path / "model.bin"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    sampled, full = (fingerprint(tmp_path, mode=mode, cache=None) for mode in MODES)
    between = next(
        (before.end for before, after in itertools.pairwise(pieces) if 1 << 20 < before.end < after.start)
        for pieces in [choose_samples(read_header(list_files(tmp_path)[0], 0).tensors)]
    )
    overwrite(path, b"\1", next(iter(between)))
    assert fingerprint(tmp_path, cache=None) == sampled, "a sample is not all of it"
    assert fingerprint(tmp_path, mode="full", cache=None) != full
    for quarter in range(4):
        overwrite(path, b"\2" * (1 << 20), quarter * (16 << 20))
        assert fingerprint(tmp_path, cache=None) != sampled
        overwrite(path, b"\0" * (1 << 20), quarter * (16 << 20))
    overwrite(path, b"\1", 100)
    assert fingerprint(tmp_path, cache=None) != sampled
    overwrite(path, b"\0", 100)
    overwrite(path, b"\3", (64 << 20) - 1)
    assert fingerprint(tmp_path, cache=None) != sampled


def test_fingerprint_of_hub_snapshot_reads_nothing(tmp_path: Path) -> None:
    """Its commit, names and sizes; `full` reads, and so does what has files of its own."""
    files = {"a.safetensors": b"no header", "b.safetensors": b"none"}
    snapshot = write_snapshot(tmp_path, "org/model", COMMIT, files)
    found = fingerprint(snapshot, cache=None)
    assert found.startswith(f"hub-{COMMIT}-")
    (snapshot / "b.safetensors").unlink()
    assert fingerprint(snapshot, cache=None).startswith(f"hub-{COMMIT}-")
    assert fingerprint(snapshot, cache=None) != found
    assert fingerprint(snapshot, mode="full", cache=None).startswith("full-")
    (snapshot / "c.safetensors").write_bytes(b"own")
    with pytest.raises(ConfigError, match="no safetensors header"):
        fingerprint(snapshot, cache=None)


def test_fingerprint_remembered(tmp_path: Path) -> None:
    """The second one reads nothing: bytes that changed without a trace in the stat would not be seen. A change of stat is."""
    folder, cache = write_checkpoint(tmp_path / "a"), tmp_path / "cache.json"
    first = fingerprint(folder, cache=cache, now_ns=lambda: LATER_NS)
    kept = cache.read_text()
    assert first in kept
    cache.write_text(kept.replace(first, "sampled-remembered"))
    assert fingerprint(folder, cache=cache) == "sampled-remembered"
    assert fingerprint(folder, mode="full", cache=cache) != "sampled-remembered"
    os.utime(folder / "model-0.safetensors", ns=(1, 1))
    assert fingerprint(folder, cache=cache, now_ns=lambda: LATER_NS) == first


def test_fingerprint_of_fresh_files_not_remembered(tmp_path: Path) -> None:
    """They may change once more without a change of their times."""
    cache = tmp_path / "cache.json"
    fingerprint(write_checkpoint(tmp_path / "a"), cache=cache)
    assert not cache.exists()


def test_fingerprint_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no weight files \(.bin, .*\); name its weights by the setting `revision`"):
        fingerprint(tmp_path, cache=None)


def test_fingerprint_of_headers_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors({}, metadata={"a": "b"}))
    first = fingerprint(tmp_path, cache=None)
    (tmp_path / "model.safetensors").write_bytes(safetensors({}, metadata={"a": "c"}))
    assert fingerprint(tmp_path, cache=None) != first


def test_fingerprint_file_cut_or_gone_while_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    file = list_files(folder)[0]
    with pytest.raises(ConfigError, match="shrank below"):
        fingerprints._read_digests(file, [Range(0, file.size_bytes - 1, file.size_bytes + 1)])
    file.path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        fingerprints._read_digests(file, [Range(0, 0, 1)])


def test_stamp_changes_with_files(tmp_path: Path) -> None:
    """Also when one is replaced by another of equal size and times."""
    folder = write_checkpoint(tmp_path / "a")
    seen = [stamp(folder)]
    (folder / "config.json").write_text("{...}")
    assert stamp(folder) == seen[0]
    shutil.copy2(folder / "model-0.safetensors", tmp_path / "copy")
    (tmp_path / "copy").rename(folder / "model-0.safetensors")
    seen.append(stamp(folder))
    os.utime(folder / "model-1.safetensors", ns=(1, 1))
    seen.append(stamp(folder))
    assert len({*seen}) == 3
    for file in list_files(folder):
        file.path.unlink()
    assert stamp(folder) == b"" == stamp(tmp_path / "nowhere")


def test_adapter_fingerprint_by_content(tmp_path: Path) -> None:
    """The fingerprint covers weights and configuration, but neither the path nor the base's name."""

    def adapter(folder: str, weight: bytes, **config: object) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(safetensors({"lora_A": weight}))
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(config))
        return adapter_fingerprint(tmp_path / folder, cache=None)

    first = adapter("a", b"1" * 50_000, r=8, base_model_name_or_path="/models/a")
    assert adapter("b", b"1" * 50_000, r=8, base_model_name_or_path="/models/b") == first
    assert adapter("b", b"1" * 50_000, r=16) != first
    assert adapter("b", b"1" * 25_000 + b"2" + b"1" * 24_999, r=8) != first
    (tmp_path / "a" / "adapter_config.json").write_text("[no mapping]")
    assert adapter_fingerprint(tmp_path / "a", cache=None) != first
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert adapter_fingerprint(tmp_path / "a", cache=None) != first
    assert adapter_fingerprint(tmp_path / "a" / "adapter_model.safetensors", cache=None).startswith("full-")


def test_adapter_fingerprint_of_large_one_sampled(tmp_path: Path) -> None:
    with open(tmp_path / "adapter_model.bin", "wb") as file:
        file.truncate(WHOLE_ADAPTER_BYTES + 1)
    assert adapter_fingerprint(tmp_path, cache=None).startswith("sampled-")


def test_adapter_fingerprint_unreadable_configuration(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    (tmp_path / "adapter_config.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*adapter_config.json: Is a directory"):
        adapter_fingerprint(tmp_path, cache=None)


def test_remembered_by_other_processes(tmp_path: Path) -> None:
    Remembered(tmp_path / "new" / "file.json").put("a", "1")
    Remembered(tmp_path / "new" / "file.json").put("b", "2")
    assert [Remembered(tmp_path / "new" / "file.json").get(key) for key in "abc"] == ["1", "2", ""]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.json"], "no temporary file is left"


def test_remembered_drops_oldest(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{" + ",".join(f'"{index}": "x"' for index in range(MAX_ENTRIES)) + "}")
    remembered = Remembered(tmp_path / "file")
    remembered.put("0", "again")
    remembered.put("new", "y")
    assert [remembered.get(key) for key in ("0", "1", "2", "new")] == ["again", "", "x", "y"]


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"[]", b'{"a": 1}', b"{" * 100_000])
def test_remembered_ignores_damage(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "file").write_bytes(damaged)
    remembered = Remembered(tmp_path / "file")
    assert remembered.get("a") == ""
    remembered.put("a", "1")
    assert remembered.get("a") == "1"


def test_remembered_ignores_unwritable_folder(tmp_path: Path) -> None:
    """No file may lie below a file, and none can replace a folder."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "full").mkdir(parents=True)
    for path in (tmp_path / "file" / "cache.json", tmp_path / "folder"):
        Remembered(path).put("a", "1")
        assert Remembered(path).get("a") == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_remembered_nowhere() -> None:
    Remembered(None).put("a", "1")
    assert Remembered(None).get("a") == ""


def test_remembered_in_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Remembered(DEFAULT).put("a", "1")
    assert (tmp_path / "kvstore" / "fingerprints.json").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    Remembered(DEFAULT).put("b", "2")
    assert (tmp_path / ".cache" / "kvstore" / "fingerprints.json").exists()
