"""Prints docs/settings.md, from the code: `python docs/make_settings.py > docs/settings.md`."""

import sys
from typing import Any, Final

from kvstore.client.config import ClientSettings
from kvstore.client.jobs.config import SECTION as JOBS
from kvstore.client.jobs.config import JobSettings
from kvstore.client.tensors.config import SECTION as TENSORS
from kvstore.client.tensors.config import TensorSettings
from kvstore.engines.lmcache.settings import SECTION as LMCACHE
from kvstore.engines.lmcache.settings import LMCacheSettings
from kvstore.engines.mooncake.setup import SECTION as MOONCAKE
from kvstore.engines.mooncake.setup import MooncakeSettings
from kvstore.engines.publisher.config import PublisherSettings
from kvstore.engines.sglang.settings import SECTION as SGLANG
from kvstore.engines.sglang.settings import SGLangSettings
from kvstore.engines.sidecar.config import SidecarSettings
from kvstore.engines.vllm.settings import SECTION as VLLM
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.handover.config import SECTION as HANDOVER
from kvstore.handover.config import HandoverSettings
from kvstore.master.config import MasterSettings
from kvstore.protocol.settings import settings_table
from kvstore.router.config import RouterSettings
from kvstore.router.fake_engine.config import StandinSettings
from kvstore.store.config import NodeSettings
from kvstore.telemetry.tracing.config import SECTION as TRACING
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.transfer.config import SECTION, TransferSettings

HEAD: Final = """# Settings

Made by `python docs/make_settings.py > docs/settings.md`; a test holds it to the code.

Every program takes each of its settings from the first of these that has it:

1. the flag,
2. the environment variable,
3. its section of one TOML file, which `--config FILE` or `KVSTORE_CONFIG` names,
4. the default.

Refused by name are variables that are nearly one of these, sections of the file that no program has, and settings in a program's own
section that it does not have.

Sizes are numbers of bytes with an optional unit: `4KiB`, `64MiB`, `1.5GiB` (1024), `10GB` (1000). Times are in seconds.
"""

PROGRAMS: Final[tuple[tuple[str, str, str, type[Any]], ...]] = (
    ("kvstore-master", "", "master", MasterSettings),
    ("kvstore-node", "", "node", NodeSettings),
    ("kvstore-router", "", "router", RouterSettings),
    ("kvstore-sidecar", "", "sidecar", SidecarSettings),
    ("kvstore-publisher", "", "publisher", PublisherSettings),
    (
        "kvstore, Client and AsyncClient",
        "The commands of `kvstore` have the flags `--master`, `--tenant`, `--token` and `--deadline-s`; the other settings come from the\n"
        "environment or the file. `Client` and `AsyncClient` take each value from the first of these sources that gives it:\n\n"
        "1. the arguments `master`, `tenant`, `token` and `deadline_s`,\n"
        "2. `settings=ClientSettings(...)`; a field with its default counts as not given,\n"
        "3. the environment, 4. the file that `KVSTORE_CONFIG` names, 5. the default.\n\n"
        "An argument that differs from `settings` is refused (`InvalidArgument`). With `ClientSettings(..., is_loaded=True)` the client\n"
        "reads neither environment nor file.\n\n",
        "client",
        ClientSettings,
    ),
    (
        "Jobs",
        "Of `Jobs` (`kvstore.client.jobs`), calls that an engine does not wait for. They have no flags. In Python pass\n"
        "`JobSettings(...)`.\n\n",
        JOBS,
        JobSettings,
    ),
    (
        "Caches of tensors",
        "Of `TensorCache`; [kvcache.md](kvcache.md#tensors-engines-of-any-tp-and-pp-share-a-cache) says what they\n"
        "do. They have no flags. In Python pass `settings=TensorSettings(...)`.\n\n",
        TENSORS,
        TensorSettings,
    ),
    (
        "Transfer engine",
        "Of every program that has one; [transfer.md](transfer.md) says what they do. They have no flags. In Python pass\n"
        "`TransferSettings(...)` to `TransferEngine`, or as `transfer=` to `Client` and `AsyncClient`.\n\n",
        SECTION,
        TransferSettings,
    ),
    (
        "Traces",
        "Of masters, nodes, clients, routers and sidecars; [tracing.md](tracing.md) says what they do. They have no flags. In Python pass\n"
        "`tracing=TracingSettings(...)` to `Client` and `AsyncClient`, which else take them from environment and file.\n\n",
        TRACING,
        TracingSettings,
    ),
    (
        "Hand-over",
        "Of `CacheTransceiver`; [kvcache.md](kvcache.md#hand-over-between-engines) says what they do. They have no flags. In Python pass\n"
        "`HandoverSettings(...)`; an engine that reads environment and file calls `load_settings`.\n\n",
        HANDOVER,
        HandoverSettings,
    ),
    (
        "SGLang's plug-in",
        "Of `kvstore.engines.sglang`; [engines.md](engines.md#sglang) says what they do. They have no flags: SGLang hands over what its\n"
        "`--hicache-storage-backend-extra-config` names.\n\n",
        SGLANG,
        SGLangSettings,
    ),
    (
        "LMCache's plug-ins",
        "Of `kvstore.engines.lmcache`; [engines.md](engines.md#lmcache) says what they do. They have no flags: LMCache hands over what\n"
        "its `adapter_params`, or the entries of a remote connector, name.\n\n",
        LMCACHE,
        LMCacheSettings,
    ),
    (
        "Mooncake's API",
        "Of `kvstore.engines.mooncake`; [engines.md](engines.md#mooncake) says what they do. They have no flags, and Mooncake's\n"
        "`setup` has no argument for them.\n\n",
        MOONCAKE,
        MooncakeSettings,
    ),
    (
        "vLLM's connector",
        "Of `kvstore.engines.vllm`; [engines.md](engines.md#vllm) says what they do. They have no flags: vLLM hands over what its\n"
        "`kv_connector_extra_config` names.\n\n",
        VLLM,
        VllmSettings,
    ),
    (
        "Stand-in engines",
        "Of `python -m kvstore.router.fake_engine.engine`; [router.md](router.md) says what they are for.\n\n",
        "standin",
        StandinSettings,
    ),
)
"""Title, remark, section and settings of each."""


def text() -> str:
    """The whole file."""
    return HEAD + "".join(f"\n## {title}\n\n{remark}{table(section, kind)}" for title, remark, section, kind in PROGRAMS)


def table(section: str, kind: type[Any]) -> str:
    """As the programs print it, without the column of flags where there are none."""
    rows = settings_table(section, kind)
    return (
        rows
        if section not in (SECTION, HANDOVER, JOBS, LMCACHE, MOONCAKE, SGLANG, TENSORS, TRACING, VLLM)
        else "".join(f"|{row.split('|', 2)[2]}\n" for row in rows.splitlines())
    )


if __name__ == "__main__":
    sys.stdout.write(text())
