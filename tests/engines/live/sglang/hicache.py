"""SGLang on a CPU over our back end, as tests start it."""

import os
from pathlib import Path
from typing import Any, Final

from tests.engines.live.child import EngineChild

FOLDER: Final = Path(__file__).parent
CPU: Final = FOLDER / "cpu"
VANISHING: Final = "TEST_VANISHING"
"""Of the environment: a file with the places of pages that are to vanish before the next read, which takes the file away (faults.py)."""


def extra_config(master: str, **settings: Any) -> dict[str, Any]:
    """Return the value of `--hicache-storage-backend-extra-config`."""
    names = {"backend_name": "kvstore", "module_path": "kvstore.engines.sglang.storage", "class_name": "KVStoreHiCache", "interface_v1": 1}
    return names | {"master": master} | settings


def path() -> dict[str, str]:
    """The environment of a Python that runs SGLang without a GPU."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(CPU), os.environ.get("PYTHONPATH")]))}


def child(log: Path) -> EngineChild:
    return EngineChild("sglang", FOLDER / "hicache_child.py", log=log, environment=path())


def use(engine: EngineChild, master: str, *, layout: str = "page_first", kind: str = "mha", heads: int = 2, **more: Any) -> None:
    """Restart the engine's back end with pools and a configuration of this kind. `more`: `dtype` of the pools, and settings."""
    dtype = more.pop("dtype", "float32")
    extra = extra_config(master, **{"lookup_deadline_s": 30} | more)
    engine.ask("use", kind=kind, layout=layout, heads=heads, dtype=dtype, extra=extra)
