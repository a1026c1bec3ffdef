"""Holds of lookups: which requests still need the blocks that a lookup found, and which holds can be released. Sans-I/O.

One lookup asks for several requests and takes one hold. The hold is released with the last of them: when its load is over, when it is
admitted without a load, when it ends, or when a later lookup holds its blocks.
"""

from collections.abc import Iterable

from kvstore.client.holds import Hold


class RequestHolds:
    """Used by the scheduler's thread."""

    def __init__(self) -> None:
        self._by_request: dict[str, Hold] = {}
        self._users: dict[Hold, int] = {}

    def take(self, hold: Hold, request_ids: Iterable[str]) -> list[Hold]:
        """A lookup of these requests took `hold`. Return the holds to release: those of earlier lookups of the same requests."""
        requests = list(request_ids)
        self._users[hold] = len(requests)
        earlier = [self._by_request[request_id] for request_id in requests if request_id in self._by_request]
        self._by_request.update(dict.fromkeys(requests, hold))
        return [over for over in earlier if self._drop(over)]

    def end(self, request_ids: Iterable[str]) -> list[Hold]:
        """These requests need no hold any more. Return the holds to release. Unknown requests are ignored."""
        holds = [self._by_request.pop(request_id) for request_id in request_ids if request_id in self._by_request]
        return [hold for hold in holds if self._drop(hold)]

    def __len__(self) -> int:
        """Holds that are not released."""
        return len(self._users)

    def _drop(self, hold: Hold) -> bool:
        """One request less: whether that was the last."""
        self._users[hold] -= 1
        if self._users[hold]:
            return False
        del self._users[hold]
        return True
