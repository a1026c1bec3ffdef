"""The interface of what chooses instances: Algorithm 1 (kvcache_centric.py) and the baselines it is measured against (baselines.py)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.scheduler.decision import Decision, Rejection
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime, TransferTime
from kvstore.scheduler.instances import DecodeInstance, PrefillInstance
from kvstore.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Estimators:
    """All that a dispatcher foresees with, and the size of a block in bytes."""

    prefill: PrefillTime
    decode: DecodeTime
    transfer: TransferTime
    block_bytes: int


class Dispatcher(ABC):
    """Chooses a prefill and a decode instance for each request. Not thread-safe; it changes no instance it is shown.

    `matches[i]` is the number of leading blocks of the prompt that prefill[i] need not compute: the answer of a PrefixIndex. `sendable[i]`
    is how many of them others can fetch from it: fewer where it has some in its GPU's memory only; None: all. Either sequence of
    instances may be empty (Reason.NO_INSTANCE). What is prefilled where `decodes_at` is set is decoded there.
    """

    name: ClassVar[str]

    @abstractmethod
    def dispatch(
        self,
        request: Request,
        matches: Sequence[int],
        prefill: Sequence[PrefillInstance],
        decode: Sequence[DecodeInstance],
        sendable: Sequence[int] | None = None,
    ) -> Decision | Rejection:
        """Where `request` goes, or why nowhere."""
