"""Methods of vLLM's EngineCore that the connector wraps: this vLLM has them, with the arguments that the wrappers take. No engine runs."""

import subprocess
from typing import Final

from tests.engines.live.environments import python_of

CHILD: Final = """
import inspect
from kvstore.engines.vllm.engine_calls import AROUND, watch_engines
from vllm.v1.engine.core import EngineCore, EngineCoreProc

before = {name: inspect.signature(getattr(EngineCore, name)) for name in AROUND}
for _ in range(2):
    watch_engines()
for name, around in AROUND.items():
    method = getattr(EngineCore, name)
    assert inspect.signature(method) == before[name], f"{name}: vLLM converts arguments by its signature"
    assert list(before[name].parameters)[1:] == list(inspect.signature(around).parameters)[3:], f"{name}: other arguments"
    assert not hasattr(method.__wrapped__, "of_kvstore"), f"{name} is wrapped twice"
    assert getattr(EngineCoreProc, name) is method, f"{name}: engines in processes of their own have another"
print(len(AROUND))
"""


def test_engine_s_methods_are_wrapped_once_with_their_arguments() -> None:
    run = subprocess.run([python_of("vllm"), "-c", CHILD], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["9"], run.stderr
