"""SIEVE written down plainly: what the endpoint pool must agree with."""


class NaiveSieve:
    """The pseudo-code of the paper over a list: `keys` from the head (newest) to the tail; `hand` is None before the tail."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def insert(self, key: int) -> None:
        self.keys.insert(0, key)

    def remove(self, key: int) -> None:
        if self.hand == key:
            self.hand = self.previous(key)
        self.keys.remove(key)
        self.visited.discard(key)

    def previous(self, key: int) -> int | None:
        index = self.keys.index(key)
        return self.keys[index - 1] if index else None

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        for _ in range(2 * len(self.keys)):
            self.hand = self.keys[-1] if self.hand is None else self.hand
            if self.hand not in self.visited | refused:
                return self.hand
            self.visited.discard(self.hand)
            self.hand = self.previous(self.hand)
        return None

    def access(self, key: int, capacity: int) -> bool:
        """Return True for a hit in a cache of `capacity`; a miss inserts the key."""
        if key in self.keys:
            self.visited.add(key)
            return True
        if len(self.keys) == capacity:
            victim = self.victim()
            assert victim is not None
            self.remove(victim)
        self.insert(key)
        return False
