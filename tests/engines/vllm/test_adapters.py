"""LoRAs by their contents: files of a test, which it changes below ids that an engine has loaded."""

from dataclasses import dataclass, field

import pytest

from kvstore.engines.vllm.adapters import CHECK_S, MAX_ADAPTERS, Adapters
from kvstore.protocol.errors import ConfigError


@dataclass
class Request:
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
class Engine:
    files: Files = field(default_factory=Files)
    changes: int = 0

    def __post_init__(self) -> None:
        self.adapters = Adapters(self.files, self.change)

    def change(self) -> None:
        self.changes += 1


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_of_reads_an_adapter_once(engine: Engine) -> None:
    assert [engine.adapters.of(Request(), now_s) for now_s in (0.0, 1.0, 2.0)] == ["of a"] * 3
    assert engine.adapters.of(Request(is_3d_lora_weight=True), 3.0) == "of a 3d"
    assert (engine.files.reads, engine.changes) == (1, 0)


def test_of_files_that_change_below_an_id_is_unknown(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.adapters.of(Request(), 0.0)
    engine.files.contents["lora"] = "b"
    assert engine.adapters.of(Request(), CHECK_S / 2) == "of a"
    assert [engine.adapters.of(Request(), now_s) for now_s in (CHECK_S, 9.0)] == [None, None]
    assert engine.changes == 1
    (warned,) = caplog.records
    assert "changed after the engine loaded it" in warned.getMessage()


def test_added_in_place_reads_the_files_again(engine: Engine) -> None:
    engine.adapters.of(Request(), 0.0)
    engine.files.contents["lora"] = "b"
    engine.adapters.added(Request(), 0.0)
    assert engine.adapters.of(Request(), 0.0) == "of a", "the engine has it, and did not read it"
    engine.adapters.added(Request(load_inplace=True), 0.0)
    assert (engine.adapters.of(Request(), 1.0), engine.changes) == ("of b", 1)
    engine.adapters.added(Request(load_inplace=True), 0.0)
    assert engine.changes == 1, "nothing changed"


def test_added_for_the_first_time_reads_the_files(engine: Engine) -> None:
    engine.adapters.added(Request(), 0.0)
    assert (engine.adapters.of(Request(), 0.0), engine.files.reads, engine.changes) == ("of a", 1, 0)


def test_of_another_path_under_a_live_id_is_unknown(engine: Engine) -> None:
    """The engine computes with the one that it has loaded."""
    engine.files.contents["other"] = "b"
    engine.adapters.of(Request(), 0.0)
    assert engine.adapters.of(Request(lora_path="other"), 0.0) is None
    assert engine.adapters.of(Request(), 0.0) is None
    engine.adapters.removed(1)
    assert engine.adapters.of(Request(lora_path="other"), 0.0) == "of b"
    engine.adapters.removed(2)


def test_of_files_that_are_not_there_yet_is_unknown_until_they_are(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    request = Request(lora_path="hub/lora")
    assert engine.adapters.of(request, 0.0) is engine.adapters.of(request, 1.0) is None
    assert "hub/lora has no weight files" in caplog.text
    engine.files.contents["hub/lora"] = "h"
    assert engine.adapters.of(request, 2.0) == "of h"


def test_of_many_adapters_forgets_the_oldest(engine: Engine) -> None:
    for number in range(MAX_ADAPTERS + 1):
        engine.adapters.of(Request(number + 1), 0.0)
    assert engine.files.reads == MAX_ADAPTERS + 1
    engine.adapters.of(Request(2), 0.0)
    assert engine.files.reads == MAX_ADAPTERS + 1
    engine.adapters.of(Request(1), 0.0)
    assert engine.files.reads == MAX_ADAPTERS + 2
