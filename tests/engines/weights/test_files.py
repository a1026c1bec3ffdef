"""Weight files of a folder, and the local folder of a hub name."""

from pathlib import Path

import pytest

from kvstore.engines.weights.files import find_checkpoint, hub_commit, list_files
from kvstore.protocol.errors import ConfigError
from tests.engines.weights.checkpoints import write_snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_list_files_of_folder(tmp_path: Path) -> None:
    """Formats that engines load, by name; neither configurations nor what a trainer left, nor folders."""
    for name in ("b.safetensors", "a.BIN", "model.gguf", "config.json", "tokenizer.json", "optimizer.pt", "training_args.bin"):
        (tmp_path / name).write_bytes(b"x" * len(name))
    (tmp_path / "original.pth").mkdir()
    found = list_files(tmp_path)
    assert [(file.name, file.size_bytes) for file in found] == [("a.BIN", 5), ("b.safetensors", 13), ("model.gguf", 10)]
    assert not any(file.is_hub_link for file in found)
    stat = (tmp_path / "a.BIN").stat()
    assert found[0].stat_text == f"a.BIN {stat.st_ino} 5 {stat.st_mtime_ns} {stat.st_ctime_ns}\n"


def test_list_files_of_file(tmp_path: Path) -> None:
    """A single file goes by its suffix: a copy may have another name."""
    (tmp_path / "model-q4.gguf").write_bytes(b"gguf")
    assert [file.name for file in list_files(tmp_path / "model-q4.gguf")] == [".gguf"]


def test_list_files_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*: No such file or directory; name its weights by the setting `revision`"):
        list_files(tmp_path / "nowhere")


def test_find_checkpoint_local(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) == tmp_path
    assert find_checkpoint(str(tmp_path / "no" / "such" / "path"), environ={}) is None


def test_find_checkpoint_in_hub_cache(tmp_path: Path) -> None:
    """By the reference of its revision, `main` without one, or by a commit; in the folder that an argument or the environment names."""
    snapshot = write_snapshot(tmp_path / "hub", "org/model", COMMIT, {"model.safetensors": b"x"})
    for environ in ({"HF_HUB_CACHE": str(tmp_path / "hub")}, {"HUGGINGFACE_HUB_CACHE": str(tmp_path / "hub")}, {"HF_HOME": str(tmp_path)}):
        assert find_checkpoint("org/model", environ=environ) == snapshot
    assert find_checkpoint("org/model", hub_cache=tmp_path / "hub") == snapshot
    assert find_checkpoint("org/model", revision=COMMIT, hub_cache=tmp_path / "hub") == snapshot
    assert find_checkpoint("org/model", revision="v2", hub_cache=tmp_path / "hub") is None
    assert find_checkpoint("org/model", revision="f" * 40, hub_cache=tmp_path / "hub") is None
    assert find_checkpoint("org/other", hub_cache=tmp_path / "hub") is None
    xdg = write_snapshot(tmp_path / "huggingface" / "hub", "gpt2", COMMIT, {"model.safetensors": b"x"})
    assert find_checkpoint("gpt2", environ={"XDG_CACHE_HOME": str(tmp_path)}) == xdg


def test_find_checkpoint_damaged_reference(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, "org/model", COMMIT, {"model.safetensors": b"x"})
    (snapshot.parent.parent / "refs" / "main").write_text("../../..")
    assert find_checkpoint("org/model", hub_cache=tmp_path) is None


def test_hub_commit_of_links_only(tmp_path: Path) -> None:
    """A snapshot with a file of its own may have been changed: it is no commit's."""
    snapshot = write_snapshot(tmp_path, "org/model", COMMIT, {"model.safetensors": b"x"})
    assert hub_commit(snapshot, list_files(snapshot)) == COMMIT
    one = snapshot / "model.safetensors"
    assert hub_commit(one, list_files(one)) == COMMIT
    (snapshot / "more.safetensors").write_bytes(b"own")
    assert hub_commit(snapshot, list_files(snapshot)) == ""
    assert hub_commit(tmp_path, []) == ""
