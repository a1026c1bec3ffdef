"""Promises of identity.py: every process of a node is told apart from the one before."""

from kvstore.store.identity import new_instance


def test_an_instance_is_another_one_each_time_and_never_none() -> None:
    instances = {new_instance() for _ in range(1000)}
    assert len(instances) == 1000
    assert all(0 < instance < 1 << 63 for instance in instances)
