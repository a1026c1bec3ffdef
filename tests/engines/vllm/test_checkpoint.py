"""Files that an engine's weights came from, on a real disk: identified once, and watched.

Samples of weights in memory: equal for equal weights, other ones after a small step of training.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.engines.vllm.checkpoint import WatchedCheckpoint, WeightFiles, WeightsSource, sample_weights
from kvstore.engines.weights.identity import WeightsIdentity
from kvstore.protocol.errors import ConfigError
from kvstore.testing.transfer.awaited import eventually
from tests.engines.weights.checkpoints import safetensors, write_snapshot

WATCH_S = 0.01
START_S = 60


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", b"a")


def write(folder: Path, value: bytes) -> Path:
    """A checkpoint of one tensor, or another one over it."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors({"weight": value}))
    return folder


def source(*folders: Path, choice: str = "sampled", revision: str = "") -> WeightsSource:
    return WeightsSource(tuple(WeightFiles(str(folder)) for folder in folders), choice, revision)


@contextlib.contextmanager
def watched(source: WeightsSource, *, loaded_since_ns: int | None = None) -> Iterator[WatchedCheckpoint]:
    since_ns = time.time_ns() if loaded_since_ns is None else loaded_since_ns
    checkpoint = WatchedCheckpoint(source, loaded_since_ns=since_ns, watch_s=WATCH_S)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


@contextlib.contextmanager
def known(source: WeightsSource, **how: int) -> Iterator[WatchedCheckpoint]:
    with watched(source, **how) as checkpoint:
        checkpoint.wait(START_S)
        yield checkpoint


def identity(source: WeightsSource) -> WeightsIdentity:
    with known(source) as checkpoint:
        found = checkpoint.identity()
        assert found is not None
        return found


def test_identity_is_that_of_the_bytes(folder: Path, tmp_path: Path) -> None:
    copy, other = write(tmp_path / "copy", b"a"), write(tmp_path / "other", b"b")
    found = [identity(source(one)).text for one in (folder, copy, other)]
    assert found[0] == found[1] != found[2]
    assert identity(source(folder, choice="full")).text.startswith("full-")


def test_identity_has_the_draft_model(folder: Path, tmp_path: Path) -> None:
    drafts = [write(tmp_path / "one", b"d"), write(tmp_path / "two", b"e")]
    assert len({identity(source(folder, *more)).text for more in ([], drafts[:1], drafts[1:])}) == 3


def test_identity_of_a_revision_reads_nothing(tmp_path: Path) -> None:
    files = WeightFiles(str(tmp_path / "missing"), name="some@model")
    assert identity(WeightsSource((files,), revision="r1")) == WeightsIdentity("r1 of some%40model")


@pytest.mark.parametrize("choice", ["sampled", "off"])
def test_identity_of_what_no_bytes_identify_is_the_model_s_name(tmp_path: Path, folder: Path, choice: str) -> None:
    files = WeightFiles(str(folder if choice == "off" else tmp_path / "missing"), hub_revision="main")
    assert identity(WeightsSource((files,), choice)) == WeightsIdentity(f"main of {files.model}")


def test_identity_of_no_files_is_their_text() -> None:
    assert identity(WeightsSource((), text="random, seed 0")) == WeightsIdentity("random, seed 0")
    assert identity(WeightsSource((), text="random, seed 0", revision="r1")) == WeightsIdentity("r1 random, seed 0")


def test_identity_of_a_hub_s_model_is_its_commit(tmp_path: Path) -> None:
    commit = "0" * 40
    write_snapshot(tmp_path, "some/model", commit, {"model.safetensors": safetensors({"weight": b"a"})})
    files = WeightFiles("some/model", hub_cache=tmp_path)
    assert files.identity("sampled").text.startswith(f"hub-{commit}")
    assert files.stamp()
    assert files.changed_ns() == 0


def test_wait_raises_for_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no header")
    with watched(source(folder)) as checkpoint, pytest.raises(ConfigError, match=r"model\.safetensors"):
        checkpoint.wait(START_S)


def test_wait_ends_at_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A read of a pipe without a writer never returns, like a read of a file on a hung server."""
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with watched(WeightsSource((_Hanging(pipe),))) as checkpoint:
        checkpoint.wait(0.05)
        assert checkpoint.identity() is None
        assert "takes longer than 0.05 s" in caplog.text
        pipe.open("wb").close()
        eventually(lambda: checkpoint.identity() is not None, "it is known")


@dataclasses.dataclass(frozen=True)
class _Hanging(WeightFiles):
    """A named pipe, which is read to its end."""

    model: Any = ""  # a Path

    def identity(self, choice: str) -> WeightsIdentity:
        return WeightsIdentity(f"read {len(Path(self.model).read_bytes())}")

    def stamp(self) -> bytes:
        return b""

    def changed_ns(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class _Counted(WeightFiles):
    """Says how often it was looked at."""

    looks: list[bytes] = dataclasses.field(default_factory=list)

    def stamp(self) -> bytes:
        self.looks.append(super().stamp())
        return self.looks[-1]


def test_files_are_looked_at_while_the_engine_runs(folder: Path) -> None:
    files = _Counted(str(folder))
    with watched(WeightsSource((files,))) as checkpoint:
        eventually(lambda: len(files.looks) > 3, "it looks again")
        assert not checkpoint.has_changed()


def test_has_changed_once_a_file_was_overwritten(folder: Path) -> None:
    with known(source(folder)) as checkpoint:
        assert not checkpoint.has_changed()
        write(folder, b"b")
        eventually(checkpoint.has_changed, "it is noticed")


def test_has_changed_where_files_are_younger_than_the_engine(folder: Path) -> None:
    """Overwritten while it started: it may have loaded those before."""
    with known(source(folder), loaded_since_ns=0) as checkpoint:
        assert checkpoint.has_changed()


def test_files_that_are_gone_have_not_changed(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", b"o")
    with known(source(folder, other)) as checkpoint:
        (folder / "model.safetensors").unlink()
        assert not checkpoint.has_changed()
        write(other, b"p")
        eventually(checkpoint.has_changed, "the other one's change is noticed, and a look at both was over")


def test_end_reload_of_unchanged_files_is_what_it_was(folder: Path) -> None:
    with known(source(folder)) as checkpoint:
        checkpoint.begin_reload(None)
        assert checkpoint.end_reload() == checkpoint.identity()


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_end_reload_of_other_files_reads_them(folder: Path, tmp_path: Path, *, is_elsewhere: bool) -> None:
    with known(source(folder)) as checkpoint:
        before = checkpoint.identity()
        written = write(tmp_path / "other" if is_elsewhere else folder, b"b")
        checkpoint.begin_reload(str(written) if is_elsewhere else None)
        assert checkpoint.end_reload() == checkpoint.identity() == identity(source(written)) != before
        assert not checkpoint.has_changed()


def test_end_reload_of_files_that_changed_meanwhile_is_unknown(folder: Path) -> None:
    with known(source(folder)) as checkpoint:
        checkpoint.begin_reload(None)
        write(folder, b"b")
        with pytest.raises(ConfigError, match="changed while the engine loaded them"):
            checkpoint.end_reload()


def test_end_reload_of_other_files_has_not_the_revision(folder: Path) -> None:
    with known(source(folder, revision="r1")) as checkpoint:
        checkpoint.begin_reload(None)
        assert checkpoint.end_reload() == WeightsIdentity(f"r1 of {folder}")
        write(folder, b"b")
        checkpoint.begin_reload(None)
        with pytest.raises(ConfigError, match="revision 'r1' names the files from before"):
            checkpoint.end_reload()


def model(seed: int = 0, layers: int = 40) -> torch.nn.Module:
    numbers = torch.Generator().manual_seed(seed)
    made = torch.nn.Module()
    for layer in range(layers):
        made.register_parameter(f"layer{layer}", torch.nn.Parameter(torch.randn(64, 96, generator=numbers) * 0.02))
    made.register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
    return made


def sample(of: torch.nn.Module, draft: Any = None) -> str:
    drafter = SimpleNamespace(model=draft)
    return sample_weights(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: of, drafter=drafter)))


def test_sample_is_that_of_the_weights() -> None:
    assert sample(model()) == sample(model()) != sample(model(1))
    assert sample_weights(SimpleNamespace(model_runner=SimpleNamespace(get_model=model))) == sample(model())


def test_sample_has_the_draft_model() -> None:
    assert len({sample(model()), sample(model(), model(1)), sample(model(), model(2))}) == 3
    assert sample(model(), "a drafter without weights") == sample(model())


def test_sample_sees_a_small_step_of_training() -> None:
    """In bfloat16, of weights that a trainer has in float32."""
    trained, after = model(layers=600), model(layers=600)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.add_(1e-6 * torch.sign(parameter))
    assert sample(trained.bfloat16()) != sample(after.bfloat16())


def test_sample_of_many_parameters_is_of_some_of_each_part() -> None:
    many = model(layers=1500)
    before = sample(many)
    with torch.no_grad():
        many.get_parameter("layer1498").add_(1.0)
    assert sample(many) != before
