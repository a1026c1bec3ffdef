"""Contract of every catalog. Inherit CatalogConformance and implement its two hooks; needs pytest (the `dev` extra)."""

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from kvstore.master.catalogs.interface import IDENTITY_BYTES, BlockDeletes, BlockPuts, Candidate, Catalog, Change, Op
from kvstore.protocol.errors import Closed, KVStoreError, StaleEpoch
from tests.master.catalogs.following import Following

OPEN_DEADLINE_S = 60.0
DONE_DEADLINE_S = 60.0

MakeCatalog = Callable[[], Catalog]


class Outcomes:
    """Collects the errors passed to `done`, from any thread, in order."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[int, KVStoreError | None]] = queue.SimpleQueue()

    def done(self, number: int = 0) -> Callable[[KVStoreError | None], None]:
        return lambda error: self._told.put((number, error))

    def next(self) -> tuple[int, KVStoreError | None]:
        return self._told.get(timeout=DONE_DEADLINE_S)

    @property
    def empty(self) -> bool:
        return self._told.empty()


def commit(catalog: Catalog, *changes: Change) -> KVStoreError | None:
    """Commit one batch and return the error passed to `done`."""
    outcomes = Outcomes()
    catalog.commit(changes, outcomes.done())
    return outcomes.next()[1]


def commit_all(catalog: Catalog, batches: Sequence[Sequence[Change]]) -> list[tuple[int, KVStoreError | None]]:
    """Commit all batches without waiting between them; (number, error) in the order in which `done` was called."""
    outcomes = Outcomes()
    for number, batch in enumerate(batches):
        catalog.commit(batch, outcomes.done(number))
    return [outcomes.next() for _batch in batches]


def opened(catalog: Catalog, name: str = "me") -> Following:
    """Open the catalog and follow it."""
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    following = Following()
    catalog.follow(Candidate(name, f"{name}:1"), following)
    return following


def elected(catalog: Catalog, name: str = "me") -> Following:
    """Open the catalog and wait to be elected."""
    following = opened(catalog, name)
    following.await_elected()
    return following


def blocks(*keys: bytes, tenant: str = "red", generation: int = 1, parents: Sequence[bytes] = ()) -> BlockPuts:
    """Puts that differ in what their keys differ in."""
    count = len(keys)
    return BlockPuts(
        tenant,
        keys,
        [100 + len(key) for key in keys],
        [hash_of(key) for key in keys],
        [generation + index for index in range(count)],
        ["space" if key[:1] < b"m" else "" for key in keys],
        parents or [b""] * count,
        [(1,) if key[-1:] < b"m" else (1, 2, 3_000_000_000) for key in keys],
    )


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[-8:].rjust(8, b"\xff"), "big")


class CatalogConformance:
    """Promises of Catalog, one a test."""

    durable: ClassVar[bool] = True
    """Committed records are listed for the next owner."""

    @pytest.fixture
    def place(self) -> MakeCatalog:
        """Hook: makes catalogs, not yet opened, all on one new and empty place. Its teardown removes the place."""
        raise NotImplementedError

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """Hook: open `rival` while `former` is open, and assert that not both can write. `former` has the record a: 1."""
        raise NotImplementedError

    @pytest.fixture
    def make(self, place: MakeCatalog) -> Iterator[MakeCatalog]:
        """Catalogs that are closed when the test ends."""
        made: list[Catalog] = []

        def make() -> Catalog:
            made.append(place())
            return made[-1]

        yield make
        for catalog in made:
            catalog.close()

    @pytest.fixture
    def catalog(self, make: MakeCatalog) -> Catalog:
        """Of its owner."""
        catalog = make()
        elected(catalog)
        return catalog

    def reloaded(self, catalog: Catalog, make: MakeCatalog) -> Following:
        """Return the records that the next owner gets after `catalog` is closed."""
        catalog.close()
        return elected(make())

    def expected(self, *records: tuple[bytes, bytes]) -> dict[bytes, bytes]:
        return dict(records) if self.durable else {}

    def expected_blocks(self, *changes: Change) -> dict[tuple[str, bytes], object]:
        naive = Following()
        naive.take(changes if self.durable else ())
        return naive.blocks

    def test_follower_gets_begin_owner_and_election_in_order(self, make: MakeCatalog) -> None:
        following = elected(make())
        assert following.told[0] == "begin"
        assert following.told[-1] == "elected"
        assert "owned by None" in following.told

    def test_before_its_election_commits_fail(self, make: MakeCatalog) -> None:
        catalog = make()
        catalog.open(deadline_s=OPEN_DEADLINE_S)
        assert isinstance(commit(catalog, Op(b"a", b"1")), StaleEpoch)

    def test_the_next_owner_is_given_every_durable_record(self, catalog: Catalog, make: MakeCatalog) -> None:
        assert commit(catalog, Op(b"a", b"1"), Op(b"y", b"2")) is None
        assert commit(catalog, Op(b"c", b"")) is None
        assert self.reloaded(catalog, make).records == self.expected((b"a", b"1"), (b"y", b"2"), (b"c", b""))

    def test_every_owners_epoch_is_larger_than_its_predecessors(self, make: MakeCatalog) -> None:
        epochs = []
        for _owner in range(3):
            catalog = make()
            epochs.append(elected(catalog).epoch)
            catalog.close()
        assert 0 < epochs[0] < epochs[1] < epochs[2]

    @pytest.mark.promise("failover")
    def test_its_identity_is_kept_and_is_no_other_catalogs(self, make: MakeCatalog) -> None:
        identities = []
        for _owner in range(2):
            catalog = make()
            catalog.open(deadline_s=OPEN_DEADLINE_S)
            identities.append(catalog.identity)
            catalog.close()
        assert all(len(bytes.fromhex(identity)) == IDENTITY_BYTES for identity in identities)
        assert (identities[0] == identities[1]) == self.durable, "what forgets is another catalog each time"

    def test_the_last_operation_on_a_key_wins_across_batches(self, catalog: Catalog, make: MakeCatalog) -> None:
        batches = [[Op(b"%d" % (number % 7), b"%d" % number if number % 3 else None)] for number in range(700)]
        assert all(error is None for _number, error in commit_all(catalog, batches))
        naive = {op.key: op.value for batch in batches for op in batch}
        assert self.reloaded(catalog, make).records == self.expected(*((key, value) for key, value in naive.items() if value is not None))

    def test_delete_of_an_absent_record_is_no_error(self, catalog: Catalog, make: MakeCatalog) -> None:
        assert commit(catalog, Op(b"a", b"1"), Op(b"y", b"2")) is None
        assert commit(catalog, Op(b"a", None), Op(b"never there", None)) is None
        assert self.reloaded(catalog, make).records == self.expected((b"y", b"2"))

    def test_done_is_called_once_in_the_order_of_commits(self, catalog: Catalog) -> None:
        outcomes = Outcomes()
        for number in range(300):
            catalog.commit([Op(b"%d" % number, b"x")] if number % 5 else [], outcomes.done(number))
        assert [outcomes.next() for _number in range(300)] == [(number, None) for number in range(300)]
        catalog.close()
        assert outcomes.empty

    def test_values_may_be_64_kib_and_many_of_them_one_batch(self, catalog: Catalog, make: MakeCatalog) -> None:
        records = [(b"%03d" % number, bytes([number]) * 65_536) for number in range(100)]
        assert commit(catalog, *map(Op._make, records)) is None
        assert self.reloaded(catalog, make).records == self.expected(*records)

    def test_keys_of_any_bytes_are_kept(self, catalog: Catalog, make: MakeCatalog) -> None:
        keys = [b"\x00", b"\x00\x00", b"\x00\xff", b"/", b"a", b"a\x00", b"a\x00b", b"a\xff", b"\xff", b"\xff\x00", b"\xff" * 400]
        assert commit(catalog, *(Op(key, key[:1]) for key in reversed(keys))) is None
        assert self.reloaded(catalog, make).records == self.expected(*((key, key[:1]) for key in keys))

    def test_blocks_come_back_as_they_were_put_last(self, catalog: Catalog, make: MakeCatalog) -> None:
        changes = [
            blocks(*(b"key-%d" % number for number in range(500))),
            blocks(b"key-7", b"key-8", generation=1 << 63),
            blocks(b"a", b"key-7", tenant=""),
            blocks(b"\x00", b"k" * 255, tenant="t" * 128, parents=[b"p" * 255, b"\x00"]),
        ]
        for change in changes:
            assert commit(catalog, change) is None
        assert self.reloaded(catalog, make).blocks == self.expected_blocks(*changes)

    def test_deleted_blocks_are_gone_whatever_preceded_them(self, catalog: Catalog, make: MakeCatalog) -> None:
        batches: list[list[Change]] = [
            [blocks(b"a", b"b", b"c", b"d")],
            [BlockDeletes("red", [b"a", b"never there"]), BlockDeletes("blue", [b"b"])],
            [blocks(b"e"), BlockDeletes("red", [b"b", b"e"]), blocks(b"b", generation=9), blocks(b"x"), BlockDeletes("red", [b"c"])],
            [BlockDeletes("red", []), blocks(b"a", generation=5), BlockDeletes("red", [b"a"])],
        ]
        assert all(error is None for _number, error in commit_all(catalog, batches))
        found = self.reloaded(catalog, make).blocks
        assert found == self.expected_blocks(*(change for batch in batches for change in batch))
        assert sorted(key for _tenant, key in found) == ([b"b", b"d", b"x"] if self.durable else [])

    def test_a_batch_of_20_000_blocks_is_taken_and_given(self, catalog: Catalog, make: MakeCatalog) -> None:
        keys = [number.to_bytes(16, "big") for number in range(20_000)]
        puts = blocks(*keys, parents=[b"", *keys[:-1]])
        assert commit(catalog, puts) is None
        assert self.reloaded(catalog, make).blocks == self.expected_blocks(puts)

    def test_second_master_is_refused_or_takes_over(self, catalog: Catalog, make: MakeCatalog) -> None:
        assert commit(catalog, Op(b"a", b"1")) is None
        self.check_rivals(catalog, make())

    def test_close_fails_later_commits_and_is_idempotent(self, catalog: Catalog) -> None:
        catalog.close()
        catalog.close()
        assert isinstance(commit(catalog, Op(b"a", b"1")), Closed)

    def test_a_catalog_that_was_never_opened_can_be_closed(self, make: MakeCatalog) -> None:
        make().close()
