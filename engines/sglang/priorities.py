"""Priorities of SGLang's requests as retention hints of their pages.

SGLang's interface of storage back ends has no priority. Its radix tree has one for each node: the highest of the
requests that used the node. hooks.py notes it when SGLang queues a node's pages for the back end. Imports neither
SGLang nor the client.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvstore.protocol.retention import DEFAULT_PRIORITY, Retention

MAX_PAGES: Final = 1 << 16
"""Pages with a noted priority, about 10 MB. The oldest are forgotten: SGLang has written them by then."""
UNSET: Final = 1 << 32
"""SGLang's priorities of this size and more, either sign, stand for requests without one."""
OF_DEFAULT: Final = (0, 1)
"""Priorities of answers and of prompts of requests without one: SGLang adds 1 to those of prompts."""


class PagePriorities:
    """Priorities of pages on their way to the store. Thread-safe."""

    def __init__(self, limit: int = MAX_PAGES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._of_page: OrderedDict[str, int] = OrderedDict()

    def note(self, hashes: Sequence[str], priority: int) -> None:
        """Remember the priority of a node's pages, unless it is that of requests without one."""
        with self._lock:
            for page in hashes:
                self._of_page.pop(page, None)
                if priority not in OF_DEFAULT and abs(priority) < UNSET:
                    self._of_page[page] = priority
            while len(self._of_page) > self._limit:
                self._of_page.popitem(last=False)

    def hint(self, hashes: Sequence[str], ceiling: int) -> Retention | None:
        """Return the hint of pages of one node; None: no hint.

        SGLang's priorities have no limits, and larger ones are kept longer. They count from the default priority
        upward or downward, up to `ceiling`.
        """
        if not hashes:
            return None
        with self._lock:
            priority = self._of_page.get(hashes[0])
        chosen = DEFAULT_PRIORITY if priority is None else max(0, min(DEFAULT_PRIORITY + priority, ceiling))
        return None if chosen == DEFAULT_PRIORITY else Retention(chosen)
