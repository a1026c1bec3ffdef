"""What arguments are refused, one check at a time; test_operations.py shows that every call makes its checks."""

from dataclasses import dataclass

import pytest

from kvstore.client.arguments import check_ack, check_count, check_keys, check_parents, check_replicas, namespace_text
from kvstore.protocol.errors import InvalidArgument


class Named:
    id = b"\xab\xcd"


@dataclass
class BadlyNamed:
    id: str = "x"


def test_a_namespace_is_a_text_or_has_an_id() -> None:
    assert namespace_text("plain") == "plain"
    assert namespace_text("é\U0001f600") == "é\U0001f600"
    assert namespace_text(Named()) == "abcd"
    with pytest.raises(InvalidArgument, match="surrogates not allowed"):
        namespace_text("half a pair: \ud800")
    with pytest.raises(InvalidArgument):
        namespace_text(BadlyNamed())


def test_parents_are_as_many_as_keys_and_keys_themselves() -> None:
    check_parents(None, 3)
    check_parents([None, b"k"], 2)
    with pytest.raises(InvalidArgument, match="1 parents for 2 keys"):
        check_parents([b"k"], 2)
    with pytest.raises(InvalidArgument):
        check_parents([b""], 1)


@pytest.mark.parametrize("keys", [b"key", "key"])
def test_one_key_is_not_a_sequence_of_keys(keys: bytes | str) -> None:
    with pytest.raises(InvalidArgument, match="not one key"):
        check_keys(keys)  # type: ignore[arg-type]


def test_there_is_one_for_each_key() -> None:
    check_count([b"a"], [1], "values")
    with pytest.raises(InvalidArgument, match="0 values for 1 keys"):
        check_count([b"a"], [], "values")


def test_a_put_is_answered_for_the_node_or_for_the_cluster() -> None:
    for ack in ("node", "cluster", "replicas"):
        check_ack(ack)
    with pytest.raises(InvalidArgument, match="'node', 'cluster' or 'replicas', not 'soon'"):
        check_ack("soon")


@pytest.mark.parametrize("replicas", [0, 17, 2.0, True])
def test_a_number_of_replicas_out_of_range_is_refused(replicas: int) -> None:
    check_replicas(1)
    check_replicas(16)
    with pytest.raises(InvalidArgument, match="1 to 16 replicas"):
        check_replicas(replicas)
