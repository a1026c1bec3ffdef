"""Facts are found by name or in a file; an error in either is one clear message.

Element types have sizes, and a name that is none is answered with those there are.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.kvcache.models.table import DTYPE_BYTES, check_above_zero, dtype_bytes, facts_of, find_facts
from kvstore.protocol.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True)
class Turbo:
    stages: int


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    cylinders: int
    litres: float
    is_diesel: bool = False
    turbo: Turbo | None = None


TABLE = {engine.name: engine for engine in (Engine("Small", 3, 1.0), Engine("Big", 8, 4.0, True))}


def find(name: str) -> Engine:
    return find_facts(name, TABLE, Engine, noun="engine")


def test_file_may_omit_fields_with_a_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.JSON"
    path.write_text('{"name": "mine", "cylinders": 4, "litres": 2}')
    found = find(str(path))
    assert found == Engine("mine", 4, 2.0)
    assert type(found.litres) is float


def test_a_part_is_an_object_in_its_turn_or_null() -> None:
    engine = {"name": "x", "cylinders": 4, "litres": 2.0}
    assert facts_of(engine | {"turbo": {"stages": 2}}, Engine, what="it") == Engine("x", 4, 2.0, turbo=Turbo(2))
    assert facts_of(engine | {"turbo": None}, Engine, what="it") == Engine("x", 4, 2.0)
    with pytest.raises(ConfigError, match=r"turbo of it: missing fields \['stages'\], unknown fields \['size'\]"):
        facts_of(engine | {"turbo": {"size": 2}}, Engine, what="it")
    with pytest.raises(ConfigError, match=r"stages of turbo of it must be of type int, not '2'"):
        facts_of(engine | {"turbo": {"stages": "2"}}, Engine, what="it")
    with pytest.raises(ConfigError, match=r"turbo of it must be of type Turbo, not 2"):
        facts_of(engine | {"turbo": 2}, Engine, what="it")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must be a JSON object"),
        ('{"name": "x", "cylinders": 4, "wheels": 4}', r"missing fields \['litres'\], unknown fields \['wheels'\]"),
        ('{"name": "x", "cylinders": 4.5, "litres": 2}', "cylinders of the engine in .* must be of type int, not 4.5"),
        ('{"name": "x", "cylinders": true, "litres": 2}', "cylinders of the engine in .* must be of type int, not True"),
        ('{"name": "x", "cylinders": 4, "litres": "2"}', "litres of the engine in .* must be of type float, not '2'"),
        ('{"name": "x", "cylinders": 4, "litres": 2, "is_diesel": 1}', "is_diesel of the engine in .* must be of type bool, not 1"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        find(str(path))


@pytest.mark.parametrize("litres", [0.0, -1.0, float("inf"), float("nan")])
def test_a_figure_must_be_above_zero_and_finite(litres: float) -> None:
    with pytest.raises(ConfigError, match=r"litres is .*: it must be above 0, and finite"):
        check_above_zero(Engine("x", 3, litres))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_size_is_in_the_name(dtype: str) -> None:
    bits = re.search(r"\d+", dtype)
    assert bits is not None
    assert dtype_bytes(dtype) * 8 == int(bits[0])


@pytest.mark.parametrize("dtype", ["bf16", "", "Float16", None, ["float16"]])
def test_another_name_is_refused_with_those_there_are(dtype: str) -> None:
    with pytest.raises(InvalidArgument, match="take one of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"):
        dtype_bytes(dtype)
