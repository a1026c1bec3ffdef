"""The eviction policies by name, as the configuration names them."""

import time
from collections.abc import Callable
from typing import Any, Final

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.policies.arc import ARC
from kvstore.tiers.policies.gdsf import GDSF
from kvstore.tiers.policies.interface import EvictionPolicy
from kvstore.tiers.policies.leaf_lru import LeafLRU
from kvstore.tiers.policies.lfu import LFU
from kvstore.tiers.policies.lhd import LHD
from kvstore.tiers.policies.lru import LRU
from kvstore.tiers.policies.prefix import PrefixPolicy
from kvstore.tiers.policies.s3fifo import S3FIFO
from kvstore.tiers.policies.sieve import Sieve
from kvstore.tiers.policies.tinylfu import WTinyLFU

Clock = Callable[[], float]
"""Seconds since any moment; never goes back."""

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
"""Name -> a new, empty policy on a clock. All but PrefixPolicy count uses and look at no clock."""

DEFAULT: Final = "default"
DEFAULT_POLICY: Final = PrefixPolicy.name
"""What DEFAULT stands for."""

POLICY_NAMES: Final = (DEFAULT, *sorted(POLICIES))
"""All that `make_policy` takes."""


def make_policy(name: str, *, clock: Clock = time.monotonic) -> EvictionPolicy[Any]:
    """A new, empty policy. Raises ConfigError, with the names there are, for an unknown name."""
    maker = POLICIES.get(DEFAULT_POLICY if name == DEFAULT else name)
    if maker is None:
        raise ConfigError(f"no eviction policy is called {name!r}: choose {', '.join(POLICY_NAMES)}")
    return maker(clock)
