"""Arguments of Mooncake's `setup`, in both of its forms (positional, or a dictionary of strings), and settings beyond
them.

The settings are read from `KVSTORE_MOONCAKE_*`.
"""

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.mooncake.arguments import Flag, Integer, Number, Text, converted
from kvstore.protocol.settings import setting

SECTION: Final = "mooncake"


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Settings without an argument in Mooncake's `setup`. See docs/settings.md."""

    lease_s: float = setting(
        5.0,
        "Minimum time that an object found by is_exist or batch_is_exist stays: Mooncake's default_kv_lease_ttl. remove without force "
        "rejects it that long. 0: no lease. Nodes cap it at max_lease_s.",
        minimum=0,
        maximum=600,
    )


DEFAULT_MASTER: Final = "127.0.0.1:7440"
DEFAULT_TENANT: Final = "default"
DEFAULT_BYTES: Final = 16 << 20
DEFAULT_HTTP_PORT: Final = 9300
MIN_BYTES: Final = 1024
"""Minimum size of a segment or buffer that is not empty."""
PORTS: Final = range(12300, 14301)
"""A host name without a port gets one of these, as in Mooncake; nothing listens there."""
RETRIES: Final = "MC_STORE_CLIENT_SETUP_RETRIES"
ATTEMPTS: Final = 20
_UNITS: Final = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KB": 1 << 10,
    "M": 1 << 20,
    "MB": 1 << 20,
    "G": 1 << 30,
    "GB": 1 << 30,
    "T": 1 << 40,
    "TB": 1 << 40,
}
_SIZE: Final = re.compile(r"\s*([+]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True, slots=True)
class SetupArguments:
    """Arguments of `setup` that have an effect here."""

    hostname: str
    master: str
    tenant: str
    can_stage: bool
    """True if a local buffer was given. Without one, Mooncake rejects puts from unregistered memory."""

    @property
    def attempts(self) -> int:
        """Attempts to reach the master: 1 for a host name with a port, else 20 or MC_STORE_CLIENT_SETUP_RETRIES."""
        given = os.environ.get(RETRIES, "")
        return 1 if ":" in self.hostname else int(given) if given.isdigit() else ATTEMPTS

    def host_and_port(self) -> str:
        return self.hostname if ":" in self.hostname else f"{self.hostname}:{random.choice(PORTS)}"


@converted
def of_arguments(
    local_hostname: Text,
    metadata_server: Text,
    global_segment_size: Number,
    local_buffer_size: Number,
    protocol: Text,
    rdma_devices: Text,
    master_server_addr: Text,
    engine: object = None,
    enable_ssd_offload: Flag = False,
    ssd_offload_path: Text = "",
    tenant_id: Text = DEFAULT_TENANT,
    enable_client_http_server: Flag = False,
    client_http_port: Integer = DEFAULT_HTTP_PORT,
) -> SetupArguments | None:
    """Return the setup of these arguments; None if Mooncake rejects them with a code.

    Segments, metadata servers, protocols and devices are validated and otherwise ignored: they belong to the nodes.
    """
    if not local_hostname or "\0" in tenant_id:
        return None
    return SetupArguments(local_hostname, master_server_addr, tenant_id, local_buffer_size > 0)


def of_dictionary(config: Mapping[Any, Any]) -> SetupArguments | None:
    """Return the setup that a dictionary describes, or None. Its values are read as strings; unknown entries are
    ignored.

    `master_server_address` is an alias of `master_server_addr`, from Mooncake's configuration files.
    """
    given = {str(name): str(value) for name, value in config.items()}
    sizes = [_size(given.get(name, str(DEFAULT_BYTES))) for name in ("global_segment_size", "local_buffer_size")]
    if not given.get("metadata_server") or not re.fullmatch(r"\s*[+-]?\d+\s*", given.get("client_http_port", "0")):
        return None
    if any(size is None or 0 < size < MIN_BYTES for size in sizes):
        return None
    master = given.get("master_server_addr") or given.get("master_server_address") or DEFAULT_MASTER
    found: SetupArguments | None = of_arguments(
        given.get("local_hostname", ""), "", *sizes, "", "", master, tenant_id=given.get("tenant_id", DEFAULT_TENANT)
    )
    return found


def _size(text: str) -> int | None:
    """Parse a size like "16MB" or "1.5 gb" into bytes; None if it is invalid."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].upper())
    return None if match is None or unit is None else int(float(match[1]) * unit)
