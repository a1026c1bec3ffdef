"""Each argument of SGLang's is in the name of a page, or left out for a reason that stands in left_out.py."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.engines.sglang.arguments import IN_KEY
from tests.engines.live.child import EngineChild
from tests.engines.live.sglang.hicache import child, use
from tests.engines.live.sglang.left_out import IN_KEY_OTHERWISE, NOT_IN_KEY
from tests.engines.weights.checkpoints import safetensors

READ = [name for names in IN_KEY.values() for name in names]
LEFT_OUT = [name for names in NOT_IN_KEY.values() for name in names.split()]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineChild]:
    with child(tmp_path_factory.mktemp("engines") / "one") as started:
        use(started, "127.0.0.1:1")
        yield started


def checkpoint(folder: Path, weight: bytes = b"1", adapter: bool = False, **config: Any) -> str:
    folder.mkdir()
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    (folder / name).write_bytes(safetensors({"weight": weight}))
    (folder / ("adapter_config.json" if adapter else "config.json")).write_text(json.dumps({"architectures": ["Llama"]} | config))
    return str(folder)


def names(engine: EngineChild, perturbed: list[str] | None = None, **told: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = engine.ask("names", told=told, perturbed=perturbed or [])
    return found


def test_table_has_each_argument_once(engine: EngineChild) -> None:
    """One that is in none of its parts is new: it belongs into the key, or there is a reason why not."""
    table = [*READ, *LEFT_OUT, *IN_KEY_OTHERWISE]
    assert sorted(table) == sorted(set(table))
    assert set(engine.ask("arguments")) == set(table)


def test_key_changes_with_the_arguments_in_it_only(engine: EngineChild, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    found = names(engine, READ + LEFT_OUT, model_path=path, speculative_draft_model_path=path)
    own = found.pop("")
    changed = {name for name, ids in found.items() if ids != own}
    assert changed == set(READ)
    assert {name for name, ids in found.items() if ids[0] == own[0]} == set(LEFT_OUT), "of the primary pool as of a draft's"


def test_key_has_what_files_hold_and_not_where_they_lie(engine: EngineChild, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a", rope_theta=1)
    shutil.copytree(path, tmp_path / "b")
    own = names(engine, model_path=path)[""]
    assert names(engine, model_path=str(tmp_path / "b"))[""] == own
    for other in (checkpoint(tmp_path / "c", b"2", rope_theta=1), checkpoint(tmp_path / "d", rope_theta=2)):
        assert names(engine, model_path=other)[""][0] != own[0]
    assert names(engine, model_path=path, load_format="dummy")[""][0] != own[0]


def test_key_of_a_draft_pool_has_the_drafts_files(engine: EngineChild, tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target")
    drafts = [checkpoint(tmp_path / "a"), checkpoint(tmp_path / "same"), checkpoint(tmp_path / "other", b"2")]
    first, same, other = (names(engine, model_path=target, speculative_draft_model_path=draft)[""] for draft in drafts)
    assert first == same
    assert first[0] == other[0]
    assert first[1] != other[1]


def test_key_has_the_contents_of_adapters(engine: EngineChild, tmp_path: Path) -> None:
    """Those that SGLang names by name and path: all that the engine was started with."""
    target, adapter = checkpoint(tmp_path / "target"), tmp_path / "adapter"
    seen = [names(engine, model_path=target)[""][0]]
    for weight, rank in ((b"1", 1), (b"2", 1), (b"2", 2)):
        shutil.rmtree(adapter, ignore_errors=True)
        checkpoint(adapter, weight, adapter=True, r=rank)
        seen.append(names(engine, model_path=target, lora_paths=[["lora", str(adapter)]])[""][0])
        assert names(engine, model_path=target, lora_paths=[["lora", str(adapter)]])[""][0] == seen[-1]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_key_has_the_element_types_that_the_engine_was_told(engine: EngineChild, tmp_path: Path, kind: str) -> None:
    """Both fp8 types are stored as uint8."""
    use(engine, "127.0.0.1:1", kind=kind)
    path = checkpoint(tmp_path / "model")
    seen = {names(engine, model_path=path, kv_cache_dtype=dtype)[""][0] for dtype in ("auto", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp8")}
    assert len(seen) == 5
