"""LoRAs by their contents: files of a test, which it changes below ids that an engine has loaded.

Weights of an engine through its life: which engines share, and that none shares what it may not.
"""

import itertools
import logging
from dataclasses import dataclass, field

import pytest

from kvstore.engines.vllm.identity import Variant
from kvstore.engines.vllm.variants import CHECK_S, MAX_ADAPTERS, Adapters, Variants
from kvstore.engines.weights.identity import WeightsIdentity
from kvstore.protocol.errors import ConfigError


@dataclass
class Lora:
    lora_int_id: int = 1
    lora_path: str = "lora"
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@dataclass
class Files:
    """By path the contents, which stand for their own stamp."""

    contents: dict[str, str] = field(default_factory=lambda: {"lora": "a"})
    reads: int = 0

    def fingerprint(self, path: str) -> str:
        self.reads += 1
        if path not in self.contents:
            raise ConfigError(f"{path} has no weight files")
        return f"of {self.contents[path]}"

    def stamp(self, path: str) -> bytes:
        return self.contents.get(path, "").encode()


@dataclass
class Request:
    lora_request: Lora | None = None


@dataclass
class Checkpoint:
    """Files whose identity a test gives."""

    base: str = "files"
    is_known: bool = True
    is_changed: bool = False
    path: str | None = ""
    error: str = ""
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True

    def identity(self) -> WeightsIdentity | None:
        return WeightsIdentity(self.base) if self.is_known else None

    def has_changed(self) -> bool:
        return self.is_changed

    def begin_reload(self, path: str | None) -> None:
        self.path = path

    def end_reload(self) -> WeightsIdentity:
        if self.error:
            raise ConfigError(self.error)
        return WeightsIdentity(self.path or self.base)


class Engine:
    """One whose connector has polled once."""

    def __init__(self, checkpoint: Checkpoint | None = None, *, keeps: bool = False) -> None:
        self.checkpoint = checkpoint or Checkpoint()
        self.files = Files()
        self.changes = 0
        self.adapters = Adapters(self.files, self.change)
        self.variants = Variants(
            self.checkpoint,
            self.adapters,
            nonce=map(str, itertools.count()).__next__,
            on_change=self.change,
            resets_keep_weights=keeps,
        )
        self.variants.poll((), 0.0)
        self.changes = 0

    def change(self) -> None:
        self.changes += 1

    @property
    def weights(self) -> str | None:
        """Identity of the weights for a request that begins now."""
        variant = self.variants.of(Request(), 0.0)
        return variant.weights if variant is not None else None

    @property
    def is_private(self) -> bool:
        """True if no other engine can use the identity of its weights."""
        return str(self.weights).startswith("files@~private-")


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_of_reads_an_adapter_once(engine: Engine) -> None:
    assert [engine.adapters.of(Lora(), now_s) for now_s in (0.0, 1.0, 2.0)] == ["of a"] * 3
    assert engine.adapters.of(Lora(is_3d_lora_weight=True), 3.0) == "of a 3d"
    assert (engine.files.reads, engine.changes) == (1, 0)
    engine.adapters.added(Lora(2), 4.0)
    assert engine.files.reads == 2, "one that is new"


def test_of_files_that_change_below_an_id_is_unknown(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.adapters.of(Lora(), 0.0)
    engine.files.contents["lora"] = "b"
    assert engine.adapters.of(Lora(), CHECK_S / 2) == "of a"
    assert [engine.adapters.of(Lora(), now_s) for now_s in (CHECK_S, 9.0)] == [None, None]
    assert engine.changes == 1
    (warned,) = caplog.records
    assert "changed after the engine loaded it" in warned.getMessage()


def test_added_in_place_reads_the_files_again(engine: Engine) -> None:
    engine.adapters.of(Lora(), 0.0)
    engine.files.contents["lora"] = "b"
    engine.adapters.added(Lora(), 0.0)
    assert engine.adapters.of(Lora(), 0.0) == "of a", "the engine has it, and did not read it"
    engine.adapters.added(Lora(load_inplace=True), 0.0)
    assert (engine.adapters.of(Lora(), 1.0), engine.changes) == ("of b", 1)
    engine.adapters.added(Lora(load_inplace=True), 0.0)
    assert engine.changes == 1, "nothing changed"


def test_of_another_path_under_a_live_id_is_unknown(engine: Engine) -> None:
    """The engine computes with the one that it has loaded."""
    engine.files.contents["other"] = "b"
    engine.adapters.of(Lora(), 0.0)
    assert engine.adapters.of(Lora(lora_path="other"), 0.0) is None
    assert engine.adapters.of(Lora(), 0.0) is None
    engine.adapters.removed(1)
    assert engine.adapters.of(Lora(lora_path="other"), 0.0) == "of b"
    engine.adapters.removed(2)


def test_missing_files_are_unknown_until_they_exist(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    request = Lora(lora_path="hub/lora")
    assert engine.adapters.of(request, 0.0) is engine.adapters.of(request, 1.0) is None
    assert "hub/lora has no weight files" in caplog.text
    engine.files.contents["hub/lora"] = "h"
    assert engine.adapters.of(request, 2.0) == "of h"


def test_of_many_adapters_forgets_the_oldest(engine: Engine) -> None:
    for number in range(MAX_ADAPTERS + 1):
        engine.adapters.of(Lora(number + 1), 0.0)
    assert engine.files.reads == MAX_ADAPTERS + 1
    engine.adapters.of(Lora(2), 0.0)
    assert engine.files.reads == MAX_ADAPTERS + 1
    engine.adapters.of(Lora(1), 0.0)
    assert engine.files.reads == MAX_ADAPTERS + 2


def test_of_an_engine_that_started_from_files(engine: Engine) -> None:
    assert engine.variants.of(Request(), 0.0) == Variant("files")
    assert engine.variants.of(Request(Lora()), 0.0) == Variant("files", "of a")
    assert engine.variants.of(Request(Lora(2, "missing")), 0.0) is None
    assert str(engine.variants.identity) == str(WeightsIdentity("files"))


def test_of_is_none_until_the_fingerprint_is_known() -> None:
    engine = Engine(Checkpoint(is_known=False))
    assert (engine.weights, engine.variants.identity) == (None, None)
    engine.checkpoint.is_known = True
    engine.variants.poll((), 0.0)
    known = engine.weights, engine.changes
    assert known == ("files", 1)


def test_version_named_before_the_fingerprint_is_known_stays() -> None:
    engine = Engine(Checkpoint(is_known=False))
    engine.variants.named("v1")
    assert engine.weights is None
    engine.checkpoint.is_known = True
    engine.variants.poll((), 0.0)
    assert engine.weights == "files@v1"


def test_reset_gives_a_private_version_once_the_engine_resumes(engine: Engine) -> None:
    assert engine.variants.is_shared
    engine.variants.reset()
    assert (engine.weights, engine.changes, engine.variants.is_shared) == (None, 1, False)
    engine.variants.resumed()
    assert engine.is_private
    first = engine.weights
    engine.variants.reset()
    engine.variants.resumed()
    assert engine.weights not in (first, "files")


def test_reset_keeps_weights_where_the_setting_says_so() -> None:
    engine = Engine(keeps=True)
    engine.variants.reset()
    assert (engine.weights, engine.changes) == ("files", 0)
    engine.variants.changing()
    assert engine.weights != "files"


def test_named_version_is_shared_whatever_came_before(engine: Engine) -> None:
    other = Engine()
    engine.variants.reset()
    engine.variants.changing()
    engine.variants.named("step-1")
    assert engine.weights is None, "it is paused"
    engine.variants.resumed()
    other.variants.changing()
    other.variants.changing()
    other.variants.named("step-1")
    assert engine.weights == other.weights == "files@step-1"


def test_named_as_it_is_called_changes_nothing(engine: Engine) -> None:
    for _ in range(2):
        engine.variants.named("v1")
    assert (engine.weights, engine.changes) == ("files@v1", 1)


@pytest.mark.parametrize("version", ["", "a@b", "~private-0"])
def test_named_with_what_is_no_name_changes_nothing(engine: Engine, caplog: pytest.LogCaptureFixture, version: str) -> None:
    engine.variants.named(version)
    assert (engine.weights, engine.changes) == ("files", 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_changing_is_logged_once_until_the_weights_have_a_name(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        engine.variants.changing()
    engine.variants.named("v1")
    assert [record.getMessage().partition("weights are ")[2][:14] for record in caplog.records] == ["files@~private", "files@v1"]


def test_files_changed_below_the_engine_are_unknown(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.checkpoint.is_changed = True
    for _ in range(2):
        engine.variants.poll((), 0.0)
    assert engine.is_private
    assert engine.changes == [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    engine.variants.named("v1")
    engine.variants.poll((), 0.0)
    assert engine.weights == "files@v1"


@pytest.mark.parametrize(("path", "base"), [(None, "files"), ("other", "other")])
def test_reloaded_weights_are_known_by_their_files(engine: Engine, path: str | None, base: str) -> None:
    engine.variants.named("v1")
    engine.variants.reloading(path)
    assert engine.is_private
    engine.variants.reloaded()
    assert engine.weights == base


def test_reloaded_from_unreadable_files_stays_unknown(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.checkpoint.error = "model.safetensors is truncated"
    engine.variants.reloading(None)
    engine.variants.reloaded()
    assert engine.is_private
    assert "model.safetensors is truncated" in caplog.text


def test_reload_tells_weights_whose_fingerprint_was_not_known() -> None:
    engine = Engine(Checkpoint(is_known=False))
    engine.variants.reloading(None)
    engine.variants.reloaded()
    assert engine.weights == "files"


def test_sleep_of_level_1_keeps_weights_whose_samples_are_equal(engine: Engine) -> None:
    engine.variants.sleeping(1, "sample")
    assert engine.variants.compares_on_wake
    engine.variants.reset()
    assert engine.weights == "files"
    engine.variants.awake("sample")
    assert (engine.weights, engine.changes, engine.variants.compares_on_wake) == ("files", 0, False)
    engine.variants.reset()
    assert engine.changes == 1


def test_name_given_during_sleep_stays(engine: Engine) -> None:
    engine.variants.sleeping(1, "sample")
    engine.variants.changing()
    engine.variants.named("v1")
    engine.variants.awake("another")
    assert engine.weights == "files@v1"


@pytest.mark.parametrize(
    ("level", "sample", "awake"), [(1, "sample", "another"), (1, "sample", None), (2, "sample", None), (1, None, None)]
)
def test_weights_that_differ_after_sleep_are_unknown(engine: Engine, level: int, sample: str | None, awake: str | None) -> None:
    """Changed by a program that holds the model itself, or lost; None: it did not fall asleep, and was reset."""
    engine.variants.sleeping(level, sample)
    assert engine.variants.compares_on_wake == (level == 1 and sample is not None)
    engine.variants.awake(awake)
    assert engine.is_private


def test_poll_looks_at_the_files_of_adapters(engine: Engine) -> None:
    engine.variants.of(Request(Lora()), 0.0)
    engine.files.contents["lora"] = "b"
    engine.variants.poll([Lora()], 1.0)
    assert engine.changes == 1
    engine.variants.adapter_added(Lora(load_inplace=True), 1.0)
    assert engine.variants.of(Request(Lora()), 1.0) == Variant("files", "of b")
    engine.variants.adapter_removed(1)
    assert engine.variants.of(Request(Lora()), 1.0) == Variant("files", "of b")


def test_close_ends_the_look_at_files(engine: Engine) -> None:
    engine.variants.close()
    assert engine.checkpoint.is_closed
