"""Settings that all plug-ins share, and how a plug-in reads them from its engine's configuration (a mapping from
JSON or a file)."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvstore.client.config import ClientSettings
from kvstore.client.jobs.config import JobSettings
from kvstore.protocol import shared_settings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, load_settings, setting
from kvstore.security.tls.config import TlsSettings, tls_values

S = TypeVar("S")

FINGERPRINT_CHOICES: Final = ("sampled", "full", "off")
FINGERPRINT_HELP: Final = (
    "How weights are identified in a block's namespace: `sampled` hashes headers, sizes and at most 4,096 samples of the checkpoint, "
    "`full` all its bytes, `off` nothing: blocks of other weights with the same model name are loaded then."
)
REVISION_HELP: Final = (
    "Text that identifies the weights instead of their fingerprint; no file is read then. Change it whenever the weights change."
)
WRITE_BEHIND_BYTES: Final = Size(1 << 30)
"""Copies of blocks that may wait to be stored, in the engine's memory. Blocks that do not fit are dropped."""


@dataclass(frozen=True, slots=True)
class StoreSettings(TlsSettings):
    """Settings of every plug-in: address and credentials of the store, identity of the weights, and deadlines."""

    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    fingerprint: str = setting("sampled", FINGERPRINT_HELP, choices=FINGERPRINT_CHOICES, shared=True)
    revision: str = setting("", REVISION_HELP, shared=True)
    salt: str = setting("", "Secret that is part of every block's key. Engines share blocks only with equal salts.", shared=True)
    retention_from_requests: bool = shared_settings.RETENTION_FROM_REQUESTS()
    retention_ceiling: int = shared_settings.RETENTION_CEILING()
    lookup_deadline_s: float = shared_settings.LOOKUP_DEADLINE_S()
    load_deadline_s: float = setting(
        5.0,
        "Time for the blocks of one request or call to arrive; missing ones are computed after it.",
        minimum=0.001,
        maximum=3600,
        shared=True,
    )

    def client(self) -> ClientSettings:
        """Return settings of the engine's client, which ignores KVSTORE_CLIENT_* and [client]."""
        return ClientSettings(master=self.master, tenant=self.tenant, token=self.token, is_loaded=True, **tls_values(self))

    def jobs(self) -> JobSettings:
        return JobSettings(queue_bytes=WRITE_BEHIND_BYTES, lookup_deadline_s=self.lookup_deadline_s, load_deadline_s=self.load_deadline_s)


def settings_from(
    kind: type[S],
    section: str,
    given: Mapping[str, Any],
    *,
    source: str,
    engine_names: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> S:
    """Fill `kind` from `given`, then KVSTORE_<SECTION>_<NAME>, the TOML file and defaults; see `load_settings`.

    Args:
        source: name of the mapping in the engine's configuration, for errors. A `*` stands for an entry's name.
        engine_names: entries of the mapping that belong to the engine.

    Raises:
        ConfigError: an unknown name, or a value outside its range.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known) - set(engine_names)):
        raise ConfigError(f"{source}: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    chosen = {name: given[name] for name in known if name in given}
    form = source if "*" in source else f"{source}.*"
    return load_settings(kind, section, flags=chosen, environ=environ, flag_name=lambda name: form.replace("*", name))
