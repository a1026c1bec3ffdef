"""kvstore's back end with a fault: pages vanish between SGLang's lookup and its read."""

import json
import os
from pathlib import Path
from typing import Any

from kvstore.engines.sglang.storage import KVStoreHiCache
from tests.engines.live.sglang.hicache import VANISHING


class LosingHiCache(KVStoreHiCache):
    """Removes pages from the store, then reads."""

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        told = Path(os.environ[VANISHING])
        if transfers[0].keys and told.exists():
            pools = self._current()
            assert pools is not None
            keys = pools[transfers[0].name].keys(transfers[0].keys)
            self._client.remove([keys[place] for place in json.loads(told.read_text())], force=True)
            told.unlink()
        return super().batch_get_v2(transfers, extra_info)
