"""The file of fingerprints: shared, bounded, and never in the way."""

from pathlib import Path

import pytest

from kvstore.engines.weights.remembered import DEFAULT, MAX_ENTRIES, Remembered


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
