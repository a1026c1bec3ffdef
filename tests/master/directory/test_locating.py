"""Promises of queries.py: a Lookup's columns agree with the rows, and name nobody who is dead or to be avoided."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.master.directory import queries
from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.queries import locate
from kvstore.master.directory.records import Version
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.tenants import Tenants
from kvstore.protocol.master_messages import Locations

HOLDERS = {b"one": ((1, 2),), b"both": ((1, 2), (2, 4)), b"other": ((2, 6),), b"dead": ((3, 2),)}
LIVE = (1, 2)


@pytest.fixture
def rows() -> Rows:
    tenants = Tenants()
    rows = Rows(tenants)
    for number, (key, pairs) in enumerate(HOLDERS.items(), start=1):
        rows.insert(tenants.of("red"), key, Version(10 * number, 100 * number, 1000 * number, "ns", b""), pairs)
    rows.sets.set_live(LIVE)
    return rows


def naive(rows: Rows, found: Sequence[int], avoid: int) -> Locations:
    """One key after another."""
    replicas: list[int] = []
    sizes: list[int] = []
    checksums: list[int] = []
    generations: list[int] = []
    nodes: list[int] = []
    tiers: list[int] = []
    for row in found:
        pairs = [(node_id, mask) for node_id, mask in rows.pairs(row) if node_id in LIVE and node_id != avoid]
        replicas.append(len(pairs))
        for column, values in ((sizes, rows.sizes), (checksums, rows.checksums), (generations, rows.generations)):
            column.append(values[row] if pairs else 0)
        nodes += [node_id for node_id, _mask in pairs]
        tiers += [mask for _node_id, mask in pairs]
    return Locations(bytes(replicas), sizes, checksums, generations, nodes, bytes(tiers))


@pytest.mark.parametrize("avoid", [0, 1, 2, 3, 9])
def test_an_answer_is_that_of_looking_at_one_key_after_another(rows: Rows, avoid: int) -> None:
    of_red = next(iter(rows.tenants)).rows
    found = [of_red[b"both"], NO_ROW, of_red[b"dead"], of_red[b"one"], of_red[b"other"], of_red[b"both"]]
    answer, expected = locate(rows, np.array(found, np.intp), avoid=avoid), naive(rows, found, avoid)
    for name in ("replicas", "sizes", "checksums", "generations", "nodes", "tiers"):
        assert list(getattr(answer, name)) == list(getattr(expected, name)), name


def test_the_question_is_left_as_it_was(rows: Rows) -> None:
    found = np.array([next(iter(rows.tenants)).rows[b"dead"]], np.intp)
    before = found.copy()
    assert locate(rows, found).replicas == b"\0"
    assert (found == before).all()


def test_replicas_beyond_what_a_message_takes_are_left_out_others_of_each_block(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    of_red = rows.tenants.of("red")
    for number, key in enumerate((b"again", b"and again"), start=5):
        rows.insert(of_red, key, Version(1, 1, number, "ns", b""), HOLDERS[b"both"])
    found = np.array([of_red.rows[b"again"], NO_ROW, of_red.rows[b"one"], of_red.rows[b"and again"]], np.intp)
    monkeypatch.setattr(queries, "MAX_COUNT", 5)
    assert list(locate(rows, found).nodes) == [1, 2, 1, 1, 2], "as many as there may be"
    monkeypatch.setattr(queries, "MAX_COUNT", 4)
    answer = locate(rows, found)
    assert (answer.replicas, list(answer.nodes), answer.tiers) == (b"\1\0\1\1", [2, 1, 1], b"\4\2\2")
    assert list(answer.generations) == [5, 0, 1000, 6]
