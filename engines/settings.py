"""What every plug-in is told of the store, and how it takes that from what its engine hands over: a mapping, out of JSON or a file."""

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
    "How the weights are identified in the name of blocks: `sampled` hashes headers, sizes and at most 4,096 samples of the checkpoint, "
    "`full` all its bytes, `off` nothing: then blocks of other weights under the same model name are loaded."
)
REVISION_HELP: Final = (
    "Text that identifies the weights in place of their fingerprint; no file is read then. Change it whenever the weights change."
)
WRITE_BEHIND_BYTES: Final = Size(1 << 30)
"""Blocks that may wait to be stored, in the engine's own memory; blocks that do not fit are not stored."""


@dataclass(frozen=True, slots=True)
class StoreSettings(TlsSettings):
    """Where the store is, who asks, what its blocks are called beyond what the engine says, and how long the engine waits at the most."""

    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    fingerprint: str = setting("sampled", FINGERPRINT_HELP, choices=FINGERPRINT_CHOICES, shared=True)
    revision: str = setting("", REVISION_HELP, shared=True)
    salt: str = setting(
        "", "Makes the keys of blocks unknown to whoever does not have it. Engines share blocks only with equal salts.", shared=True
    )
    lookup_deadline_s: float = shared_settings.LOOKUP_DEADLINE_S()
    load_deadline_s: float = setting(
        5.0,
        "Time for the blocks of one request or call to arrive; then those that have not are computed.",
        minimum=0.001,
        maximum=3600,
        shared=True,
    )

    def client(self) -> ClientSettings:
        """Settings of the engine's client, which reads neither KVSTORE_CLIENT_* nor [client]."""
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
    """`kind` filled from `given`, else KVSTORE_<SECTION>_<NAME>, the TOML file and defaults; see `load_settings`.

    Args:
        source: name of the mapping in the engine's configuration, for errors. A `*` in it stands for an entry's name.
        engine_names: entries of the mapping that are the engine's own.

    Raises:
        ConfigError: an unknown name, or a value outside its range.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known) - set(engine_names)):
        raise ConfigError(f"{source}: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    chosen = {name: given[name] for name in known if name in given}
    form = source if "*" in source else f"{source}.*"
    return load_settings(kind, section, flags=chosen, environ=environ, flag_name=lambda name: form.replace("*", name))
