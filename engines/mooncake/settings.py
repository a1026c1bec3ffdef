"""Settings of Mooncake's API beyond what its `setup` takes: `KVSTORE_MOONCAKE_*`."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import setting

SECTION: Final = "mooncake"


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """See docs/settings.md."""

    lease_s: float = setting(
        5.0,
        "How long an object that is_exist or batch_is_exist found stays, at least: Mooncake's default_kv_lease_ttl. remove without force "
        "refuses it for so long. 0: not at all. Nodes allow max_lease_s at most.",
        minimum=0,
        maximum=600,
    )
