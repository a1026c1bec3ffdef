"""Numbers of connections are one connection's at a time, and come round in turn."""

from kvstore.transfer.ucx.connection_ids import ConnectionIds


def test_numbers_of_connections_are_not_given_twice() -> None:
    ids = ConnectionIds(max_id=3)
    assert [ids.take() for _ in range(3)] == [1, 2, 3]
    ids.give_back(2)
    ids.give_back(2)
    assert ids.take() == 2
    ids.give_back(1)
    ids.give_back(3)
    assert [ids.take() for _ in range(2)] == [3, 1]
