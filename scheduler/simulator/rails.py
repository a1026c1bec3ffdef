"""What one instance sends: first come, first served, at the rate of its rails. It says when, it moves nothing."""


class Rails:
    """The sending side of an instance's network. The receiver is taken to be as fast: a prompt has one receiver, a hot block many."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        self._free_at_s = 0.0

    def backlog_bytes(self, now_s: float) -> int:
        """What was asked for and has not left yet."""
        return round(max(0.0, self._free_at_s - now_s) * self.bytes_per_s)

    def send(self, size_bytes: int, *, now_s: float) -> float:
        """When the last of `size_bytes`, asked for now, has arrived."""
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
        self.sent_bytes += size_bytes
        return self._free_at_s
