"""What every catalog promises. Inherit CatalogConformance and give it the two hooks; needs pytest (the `dev` extra)."""

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from kvstore.master.catalogs.interface import IDENTITY_BYTES, Catalog, Op
from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError

OPEN_DEADLINE_S = 60.0
DONE_DEADLINE_S = 60.0

MakeCatalog = Callable[[], Catalog]


class Outcomes:
    """Collects what `done` is told, from whatever thread, in order."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[int, KVStoreError | None]] = queue.SimpleQueue()

    def done(self, number: int = 0) -> Callable[[KVStoreError | None], None]:
        return lambda error: self._told.put((number, error))

    def next(self) -> tuple[int, KVStoreError | None]:
        return self._told.get(timeout=DONE_DEADLINE_S)

    @property
    def empty(self) -> bool:
        return self._told.empty()


def commit(catalog: Catalog, *ops: Op) -> KVStoreError | None:
    """Commit one batch and wait for what `done` is told."""
    outcomes = Outcomes()
    catalog.commit(ops, outcomes.done())
    return outcomes.next()[1]


def commit_all(catalog: Catalog, batches: Sequence[Sequence[Op]]) -> list[tuple[int, KVStoreError | None]]:
    """Commit all batches without waiting between them; (number, error) in the order in which `done` was called."""
    outcomes = Outcomes()
    for number, batch in enumerate(batches):
        catalog.commit(batch, outcomes.done(number))
    return [outcomes.next() for _batch in batches]


class CatalogConformance:
    """Promises of Catalog, one a test."""

    durable: ClassVar[bool] = True
    """What was committed is loaded by the next owner."""

    @pytest.fixture
    def place(self) -> MakeCatalog:
        """Hook: makes catalogs, not yet opened, all on one new and empty place. Its teardown removes the place."""
        raise NotImplementedError

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """Hook: open `rival` while `former` is open, and assert that not both can write."""
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
        catalog = make()
        catalog.open(deadline_s=OPEN_DEADLINE_S)
        return catalog

    def reloaded(self, catalog: Catalog, make: MakeCatalog) -> list[tuple[bytes, bytes]]:
        """What the next owner loads after `catalog` was closed."""
        catalog.close()
        successor = make()
        successor.open(deadline_s=OPEN_DEADLINE_S)
        return list(successor.load())

    def expected(self, *records: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        return list(records) if self.durable else []

    def test_a_new_place_is_empty_and_healthy(self, catalog: Catalog) -> None:
        assert list(catalog.load()) == []
        assert catalog.health == "ok"

    def test_the_next_owner_loads_every_durable_record(self, catalog: Catalog, make: MakeCatalog) -> None:
        assert commit(catalog, Op(b"a", b"1"), Op(b"b", b"2")) is None
        assert commit(catalog, Op(b"c", b"")) is None
        assert self.reloaded(catalog, make) == self.expected((b"a", b"1"), (b"b", b"2"), (b"c", b""))

    def test_every_owners_epoch_is_larger_than_its_predecessors(self, make: MakeCatalog) -> None:
        epochs = []
        for _owner in range(3):
            catalog = make()
            epochs.append(catalog.open(deadline_s=OPEN_DEADLINE_S))
            catalog.close()
        assert 0 < epochs[0] < epochs[1] < epochs[2]

    def test_its_identity_is_kept_and_is_no_other_catalogs(self, make: MakeCatalog) -> None:
        identities = []
        for _owner in range(2):
            catalog = make()
            catalog.open(deadline_s=OPEN_DEADLINE_S)
            identities.append(catalog.identity)
            catalog.close()
        assert all(len(bytes.fromhex(identity)) == IDENTITY_BYTES for identity in identities)
        assert (identities[0] == identities[1]) == self.durable, "what forgets is another catalog each time"

    def test_the_last_operation_on_a_key_wins_within_a_batch(self, catalog: Catalog, make: MakeCatalog) -> None:
        set_last = (Op(b"a", b"1"), Op(b"a", None), Op(b"a", b"2"))
        deleted_last = (Op(b"b", b"1"), Op(b"b", None))
        assert commit(catalog, *set_last, *deleted_last) is None
        assert self.reloaded(catalog, make) == self.expected((b"a", b"2"))

    def test_the_last_operation_on_a_key_wins_across_batches(self, catalog: Catalog, make: MakeCatalog) -> None:
        batches = [[Op(b"%d" % (number % 7), b"%d" % number if number % 3 else None)] for number in range(700)]
        assert all(error is None for _number, error in commit_all(catalog, batches))
        naive = {op.key: op.value for batch in batches for op in batch}
        assert self.reloaded(catalog, make) == self.expected(*sorted((key, value) for key, value in naive.items() if value is not None))

    def test_a_deleted_record_is_gone_and_deleting_nothing_is_no_error(self, catalog: Catalog, make: MakeCatalog) -> None:
        assert commit(catalog, Op(b"a", b"1"), Op(b"b", b"2")) is None
        assert commit(catalog, Op(b"a", None), Op(b"never there", None)) is None
        assert self.reloaded(catalog, make) == self.expected((b"b", b"2"))

    def test_done_is_called_exactly_once_each_in_the_order_of_the_commits(self, catalog: Catalog) -> None:
        outcomes = Outcomes()
        for number in range(300):
            catalog.commit([Op(b"%d" % number, b"x")] if number % 5 else [], outcomes.done(number))
        assert [outcomes.next() for _number in range(300)] == [(number, None) for number in range(300)]
        catalog.close()
        assert outcomes.empty

    def test_values_may_be_64_kib_and_many_of_them_one_batch(self, catalog: Catalog, make: MakeCatalog) -> None:
        records = [(b"%03d" % number, bytes([number]) * 65_536) for number in range(100)]
        assert commit(catalog, *itertools.starmap(Op, records)) is None
        assert self.reloaded(catalog, make) == self.expected(*records)

    def test_keys_of_any_bytes_are_kept_and_loaded_in_order(self, catalog: Catalog, make: MakeCatalog) -> None:
        keys = [b"\x00", b"\x00\x00", b"\x00\xff", b"/", b"a", b"a\x00", b"a\x00b", b"a\xff", b"\xff", b"\xff\x00", b"\xff" * 400]
        assert commit(catalog, *(Op(key, key[:1]) for key in reversed(keys))) is None
        assert self.reloaded(catalog, make) == self.expected(*((key, key[:1]) for key in keys))

    def test_a_batch_of_20_000_records_is_taken_and_loaded(self, catalog: Catalog, make: MakeCatalog) -> None:
        records = [(number.to_bytes(16, "big"), b"%0128d" % number) for number in range(20_000)]
        assert commit(catalog, *itertools.starmap(Op, records)) is None
        assert self.reloaded(catalog, make) == self.expected(*records)

    def test_commits_while_loading_neither_wait_nor_change_what_is_loaded(self, catalog: Catalog, make: MakeCatalog) -> None:
        records = [(b"%04d" % number, b"old") for number in range(1_000)]
        assert commit(catalog, *itertools.starmap(Op, records)) is None
        catalog.close()
        successor = make()
        successor.open(deadline_s=OPEN_DEADLINE_S)
        loading = successor.load()
        first = next(loading, None)
        assert commit(successor, *(Op(key, None) for key, _value in records), Op(b"new", b"")) is None
        loaded = [*([first] if first else []), *loading]
        assert loaded == self.expected(*records)

    def test_a_second_master_on_the_same_place_is_kept_out_or_takes_over(self, catalog: Catalog, make: MakeCatalog) -> None:
        assert commit(catalog, Op(b"a", b"1")) is None
        self.check_rivals(catalog, make())

    def test_after_close_commits_are_told_closed_and_a_second_close_is_a_no_op(self, catalog: Catalog) -> None:
        catalog.close()
        catalog.close()
        assert isinstance(commit(catalog, Op(b"a", b"1")), Closed)

    def test_a_catalog_that_was_never_opened_can_be_closed(self, make: MakeCatalog) -> None:
        make().close()

    @pytest.mark.parametrize("op", [Op(b"", b"x"), Op(b"k" * 401, None), Op(b"k", b"v" * 65_537)])
    def test_an_operation_over_the_limits_is_refused_at_once(self, catalog: Catalog, op: Op) -> None:
        outcomes = Outcomes()
        with pytest.raises(InvalidArgument):
            catalog.commit([Op(b"a", b"1"), op], outcomes.done())
        assert outcomes.empty
        assert commit(catalog, Op(b"a", b"1")) is None
