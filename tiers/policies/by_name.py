"""Registry of the eviction policies by the name that the configuration uses."""

import time
from collections.abc import Callable
from typing import Any, Final

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.policies.arc import ARC
from kvstore.tiers.policies.gdsf import GDSF
from kvstore.tiers.policies.interface import EvictionPolicy, PolicyFamily, SeparatePolicies
from kvstore.tiers.policies.leaf_lru import LeafLRU
from kvstore.tiers.policies.lfu import LFU
from kvstore.tiers.policies.lhd import LHD
from kvstore.tiers.policies.lru import LRU
from kvstore.tiers.policies.prefix.policy import PrefixFamily, PrefixPolicy
from kvstore.tiers.policies.s3fifo import S3FIFO
from kvstore.tiers.policies.sieve import Sieve
from kvstore.tiers.policies.tinylfu import WTinyLFU

Clock = Callable[[], float]
"""Monotonic seconds."""

POLICIES: Final[dict[str, Callable[[Clock], EvictionPolicy[Any]]]] = {
    LRU.name: lambda clock: LRU(),
    LFU.name: lambda clock: LFU(),
    Sieve.name: lambda clock: Sieve(),
    S3FIFO.name: lambda clock: S3FIFO(),
    ARC.name: lambda clock: ARC(),
    WTinyLFU.name: lambda clock: WTinyLFU(),
    GDSF.name: lambda clock: GDSF(),
    LHD.name: lambda clock: LHD(),
    LeafLRU.name: lambda clock: LeafLRU(),
    PrefixPolicy.name: lambda clock: PrefixPolicy(clock=clock),
}
"""Name -> factory of an empty policy. Only PrefixPolicy uses the clock."""

DEFAULT: Final = "default"
DEFAULT_POLICY: Final = PrefixPolicy.name
"""The policy that DEFAULT selects."""

POLICY_NAMES: Final = (DEFAULT, *sorted(POLICIES))
"""Names that `make_policy` accepts."""


def make_family(name: str, *, clock: Clock = time.monotonic) -> PolicyFamily[Any]:
    """Return the policies of a tenant, none yet. Raises ConfigError as `make_policy`."""
    if name in (DEFAULT, PrefixPolicy.name):
        return PrefixFamily(clock=clock)
    _maker(name)
    return SeparatePolicies(lambda: make_policy(name, clock=clock))


def make_policy(name: str, *, clock: Clock = time.monotonic) -> EvictionPolicy[Any]:
    """Return a new, empty policy. Raises ConfigError, listing the names, for an unknown one."""
    return _maker(name)(clock)


def _maker(name: str) -> Callable[[Clock], EvictionPolicy[Any]]:
    maker = POLICIES.get(DEFAULT_POLICY if name == DEFAULT else name)
    if maker is None:
        raise ConfigError(f"no eviction policy is called {name!r}: choose {', '.join(POLICY_NAMES)}")
    return maker
