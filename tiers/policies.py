"""The eviction policies by name, as the configuration names them."""

from typing import Any

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.lfu import LFU
from kvstore.tiers.lru import LRU
from kvstore.tiers.policy import EvictionPolicy
from kvstore.tiers.sieve import Sieve

POLICIES: dict[str, type[LRU[Any] | LFU[Any] | Sieve[Any]]] = {policy.name: policy for policy in (LRU, LFU, Sieve)}


def make_policy(name: str) -> EvictionPolicy[Any]:
    """A new, empty policy. Raises ConfigError, with the names there are, for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy is called {name!r}: choose {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
