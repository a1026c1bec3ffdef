"""The connector's assumptions about this vLLM, checked without an engine.

Each field of the configurations and cache specifications is changed in turn. The key of blocks must change exactly for the fields that
the tables of fields.py expect. vLLM's EngineCore must have the methods that the connector wraps, with the arguments that the wrappers take.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from kvstore.engines.vllm import fields
from tests.engines.live.environments import ROOT, python_of

CHILD: Final = Path(__file__).with_name("fields_child.py")
BY_ANOTHER_PART: Final = frozenset(
    {
        "ModelConfig.model",
        "ModelConfig.model_weights",
        "ModelConfig.dtype",
        "ModelConfig.quantization",
        "ModelConfig.quantization_config",
        "CacheConfig.block_size",
        "CacheConfig.cache_dtype",
        "CacheConfig.prefix_caching_hash_algo",
        "ParallelConfig.tensor_parallel_size",
    }
)
"""Fields that are in the key, though not by their name."""


@pytest.fixture(scope="module")
def changed(model: Path) -> dict[str, bool | None]:
    """By `Class.field`; None for one that cannot be changed alone."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    run = subprocess.run([python_of("vllm"), CHILD, model], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, bool | None] = json.loads(run.stdout.splitlines()[-1])
    return found


def outside(kind: str) -> set[str]:
    return {name for names in fields.NOT_IN_KEY[kind].values() for name in names.split()}


def test_configuration_fields_change_the_key_by_their_table(changed: dict[str, bool | None]) -> None:
    for kind, names in fields.IN_KEY.items():
        inside = set(names.split())
        assert not inside & outside(kind), kind
        found = {name.removeprefix(f"{kind}."): is_changed for name, is_changed in changed.items() if name.startswith(f"{kind}.")}
        assert found.keys() == inside | outside(kind), f"fields.py knows others of {kind}: {found.keys() ^ (inside | outside(kind))}"
        for name, is_changed in found.items():
            assert is_changed is None or is_changed == (name in inside or f"{kind}.{name}" in BY_ANOTHER_PART), f"{kind}.{name}"


def test_spec_fields_are_in_the_key_or_in_a_table(changed: dict[str, bool | None]) -> None:
    """With the element types of all kinds of caches, by the engine's own names."""
    names = {name for names in fields.SPEC_NOT_IN_KEY.values() for name in names.split()}
    found = {name: is_changed for name, is_changed in changed.items() if name.partition(".")[0] not in fields.IN_KEY}
    kinds = {name.partition(".")[0] for name in found}
    assert {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec", "CrossAttentionSpec", "RSWASpec"} <= kinds
    for name, is_changed in found.items():
        assert is_changed == (name.partition(".")[2] not in names), name
    for name in ("FullAttentionSpec.dtype", "FullAttentionSpec.kv_quant_mode", "MLAAttentionSpec.cache_dtype_str", "MambaSpec.dtypes"):
        assert found[name], name


CALLS: Final = """
import inspect
from kvstore.engines.vllm.engine_calls import WRAPPERS, watch_engines
from vllm.v1.engine.core import EngineCore, EngineCoreProc

before = {name: inspect.signature(getattr(EngineCore, name)) for name in WRAPPERS}
for _ in range(2):
    watch_engines()
for name, around in WRAPPERS.items():
    method = getattr(EngineCore, name)
    assert inspect.signature(method) == before[name], f"{name}: vLLM converts arguments by its signature"
    assert list(before[name].parameters)[1:] == list(inspect.signature(around).parameters)[3:], f"{name}: other arguments"
    assert not hasattr(method.__wrapped__, "of_kvstore"), f"{name} is wrapped twice"
    assert getattr(EngineCoreProc, name) is method, f"{name}: engines in processes of their own have another"
print(len(WRAPPERS))
"""


def test_engine_s_methods_are_wrapped_once_with_their_arguments() -> None:
    run = subprocess.run([python_of("vllm"), "-c", CALLS], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["9"], run.stderr
