"""Generated calls of get and put sessions."""

from collections.abc import Iterator

from tests.engines.live.mooncake.differential.material import OTHER, Call, Json, Material, at, call


class SessionCalls(Material):
    """A group of calls a method."""

    def get_sessions(self) -> Iterator[Call]:
        """Objects that are read by ranges."""
        one, two = self.key(), self.key()
        yield call("put_batch", [one, two], [self.bytes(1000), self.bytes(300)])
        yield call("batch_get_session_start", [one, self.key(), two])
        read = "batch_get_into_multi_buffer_ranges"
        yield call(read, [one, two], [[at(0), at(500)], [at(900)]], [[100, 50], [300]], [[900, 0], [0]])
        for pointers, sizes, offsets in (
            *(([[at(0)]], [[10]], [[995]]), ([[at(0)]], [[10]], [[2000]]), ([[at(0)]], [[0]], [[0]]), ([[]], [[]], [[]])),
            *(
                ([[at(0)]], [[10, 1]], [[0]]),
                ([[at(0)]], [[10]], [[0, 1]]),
                ([], [], []),
                ([[at(0)]], [[10]], []),
                ([[at(0, OTHER)]], [[10]], [[0]]),
            ),
            *(
                ([[at(0)]], [[-1]], [[0]]),
                ([[at(0)]], [[10]], [[-1]]),
                ([at(0)], [10], [0]),
                ([{"$numpys": ["uint64", [at(3)]]}], [[7]], [[1]]),
            ),
        ):
            yield call(read, [one], pointers, sizes, offsets)
        yield call(read, [self.key()], [[at(0)]], [[1]], [[0]])
        yield call(read, [one, one], [[at(0)], [at(5)]], [[1], [2]], [[0], [0]])
        yield call(read, [], [], [], [])
        yield call("batch_get_session_start", [one])
        yield call("batch_get_session_start", [one, one])
        yield call("batch_get_session_start", [])
        yield call("batch_get_session_start", one)
        yield call("remove", two)
        yield call("remove", two, True)
        yield call(read, [one, self.key()], [[at(0)], [at(0)]], [[1], [1]], [[0], [0]])
        yield call("batch_get_session_end", [one, self.key()])
        yield call("batch_get_session_end", [one])
        yield call("batch_get_session_end", [])
        yield call(read, [one], [[at(0)]], [[1]], [[0]])

    def put_sessions(self) -> Iterator[Call]:
        """Objects that are written by ranges."""
        one, two, three = self.key(), self.key(), self.key()
        start, write, end, revoke = (
            *("batch_put_session_start", "batch_put_from_multi_buffer_ranges"),
            *("batch_put_session_end", "batch_put_session_revoke"),
        )
        yield call(start, [one, two], [100, 50])
        yield call("batch_is_exist", [one, two])
        yield call("get", one)
        yield call(write, [one, two], [[at(0), at(200)], [at(300)]], [[60, 40], [50]], [[0, 60], [0]])
        for pointers, sizes, offsets in (
            *(([[at(0)]], [[10]], [[95]]), ([[at(0)]], [[10]], [[200]]), ([[at(0)]], [[0]], [[0]]), ([[]], [[]], [[]])),
            *(
                ([[at(0)]], [[10, 1]], [[0]]),
                ([[at(0)]], [[10]], [[0, 1]]),
                ([], [], []),
                ([[at(0)]], [[10]], []),
                ([[at(0), at(1)]], [[1, 2]], [[5, 6]]),
            ),
            *(
                ([[at(0)]], [[-1]], [[0]]),
                ([at(0)], [10], [0]),
                ([[at(0), at(5)]], [[10, 10]], [[0, 95]]),
                ([{"$numpys": ["int64", [at(0)]]}], [[4]], [[9]]),
            ),
        ):
            yield call(write, [one], pointers, sizes, offsets)
        yield call(start, [one], [100])
        yield call(end, [one, self.key()])
        yield call("get", one)
        yield call(revoke, [two, self.key()])
        yield call(end, [two])
        yield call("is_exist", two)
        yield call(start, [one], [70])
        yield call(revoke, [one])
        rows: list[tuple[Json, Json]] = [
            ([three], [0]),
            ([three], []),
            ([three, three], [5, 5]),
            ([], []),
            (three, [5]),
            ([three], [-1]),
            ([""], [5]),
            ([three], [5.0]),
        ]
        for keys, sizes in rows:
            yield call(start, keys, sizes)
            yield call(revoke, [three])
        yield call(write, [self.key()], [[at(0)]], [[1]], [[0]])
        yield call(end, [])
        yield call(revoke, [])
        yield call(start, [self.key("g")], [10], {"$config": {"group_ids": ["g"]}})
        yield call(start, [self.key("h")], [10], {"$config": {"group_ids": ["g", "h"]}})
        yield call(write, [self.key("g")], [[at(0)]], [[10]], [[0]])
        yield call(end, [self.key("g"), self.key("h")])
