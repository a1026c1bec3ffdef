"""What every plug-in is told of the store, and how it takes that from what its engine hands over: a mapping, out of JSON or a file."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.client.jobs.config import JobSettings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, load_settings, setting
from kvstore.protocol.variables import MASTER
from kvstore.security.tls.config import TlsSettings

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StoreSettings(TlsSettings):
    """Where the store is, who asks, what its blocks are called beyond what the engine says, and how long the engine waits at the most."""

    master: str = setting("127.0.0.1:7440", "Addresses of the masters, HOST:PORT or unix:PATH, comma separated.", variable=MASTER)
    tenant: str = setting("", "The tenant whose blocks are seen.")
    token: str = setting("", "The tenant's token.")
    revision: str = setting("", "Of the model's weights, in the name of its blocks.")
    salt: str = setting("", "Makes the keys of blocks unknown to whoever does not have it. Engines share blocks only with equal salts.")
    lookup_deadline_s: float = setting(0.5, "Time for a lookup; after that it is a miss.", minimum=0.001, maximum=60)
    load_deadline_s: float = setting(
        5.0, "Time for the blocks of one call to come; after that those which have not are misses.", minimum=0.001, maximum=3600
    )
    store_deadline_s: float = setting(
        30.0, "Time for the blocks of one call to be stored; after that those which are not are given up.", minimum=0.001, maximum=3600
    )
    write_behind_bytes: Size = setting(
        Size(1 << 30), "Blocks that may wait to be stored, in the engine's own memory; what does not fit is not stored.", minimum=1 << 20
    )

    def jobs(self) -> JobSettings:
        return JobSettings(
            queue_bytes=self.write_behind_bytes,
            lookup_deadline_s=self.lookup_deadline_s,
            load_deadline_s=self.load_deadline_s,
            store_deadline_s=self.store_deadline_s,
        )


def settings_from(
    kind: type[S],
    section: str,
    given: Mapping[str, Any],
    *,
    source: str,
    engine_names: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> S:
    """`kind` filled from `given`, else KVSTORE_<SECTION>_<NAME>, the TOML file and defaults; see `load_settings`.

    Args:
        source: what the engine calls the mapping, for the error.
        engine_names: entries of the mapping that are the engine's own.

    Raises:
        ConfigError: an unknown name, or a value outside its range.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known) - set(engine_names)):
        raise ConfigError(f"{source}: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return load_settings(kind, section, flags={name: given[name] for name in known if name in given}, environ=environ)
