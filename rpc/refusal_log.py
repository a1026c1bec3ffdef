"""How often connections are refused, for the log: a line a minute and reason, with how many there were. Sans-I/O; `now_ns` is passed in."""

from typing import Final

INTERVAL_NS: Final = 60_000_000_000
"""Between two lines about one reason: clients that are refused try again many times a second."""


class RefusalLog:
    """Counts refusals by reason; `total` of all. Reasons are few: each is kept."""

    def __init__(self) -> None:
        self.total = 0
        self._untold: dict[str, int] = {}
        self._told_ns: dict[str, int] = {}

    def count(self, reason: str, now_ns: int) -> str:
        """Count one refusal. The line to log, or "" while the last one of this reason is younger than INTERVAL_NS."""
        self.total += 1
        untold = self._untold[reason] = self._untold.get(reason, 0) + 1
        told_ns = self._told_ns.get(reason)
        if told_ns is not None and now_ns - told_ns < INTERVAL_NS:
            return ""
        self._told_ns[reason], self._untold[reason] = now_ns, 0
        since = "" if told_ns is None else f", {untold} since {(now_ns - told_ns) // 1_000_000_000} s ago"
        return f"refusing connections{since}: {reason}"
