"""How many keys fit, learned from when victims are asked for. Nobody tells a policy: a group's share of a tier changes as it runs."""


class ObservedCapacity:
    """The most keys there were at recent calls for a victim: one is asked for when the tier is full.

    It rises at once. It falls to what was seen lately after as many calls as it is large, all of them below it: until then a low count
    is a batch that makes its room before it comes.
    """

    __slots__ = ("_calls", "_recent", "keys")

    def __init__(self) -> None:
        self.keys = 0
        """0 until a victim was asked for."""
        self._recent = 0
        self._calls = 0

    def observe(self, count: int) -> int:
        """A victim is asked for, with `count` keys there; the capacity. O(1)."""
        if count >= self.keys:
            self.keys = count
        else:
            self._recent = max(self._recent, count)
            self._calls += 1
            if self._calls <= self.keys:
                return self.keys
            self.keys = self._recent
        self._recent = self._calls = 0
        return self.keys
