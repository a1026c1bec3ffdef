"""What arguments are refused, one check at a time; test_operations.py shows that every call makes its checks."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvstore.client.arguments import (
    check_ack,
    check_arguments,
    check_count,
    check_flag,
    check_keys,
    check_kind,
    check_limit,
    check_list,
    check_parents,
    check_replicas,
    check_seconds,
    namespace_text,
)
from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.config import TransferSettings


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
    check_parents(None, [b"a", b"b", b"c"])
    check_parents([], [])
    check_parents([None, b"a"], [b"a", b"b"])
    with pytest.raises(InvalidArgument, match="1 parents for 2 keys"):
        check_parents([b"k"], [b"a", b"b"])
    with pytest.raises(InvalidArgument):
        check_parents([b""], [b"a"])


def test_no_key_is_its_own_ancestor() -> None:
    check_parents([b"b", b"c", b"elsewhere"], [b"a", b"b", b"c"])
    check_parents([b"a", b"a", b"c", None], [b"b", b"c", b"d", b"a"])
    check_parents([b"a"], [["no key"]])  # type: ignore[list-item]  # check_keys refuses it
    for parents in ([b"a", None], [b"b", b"a"]):
        with pytest.raises(InvalidArgument, match="its own ancestor"):
            check_parents(parents, [b"a", b"b"])


@pytest.mark.parametrize("items", [{b"a"}, {b"a": 1}, iter([b"a"]), b"a", "a", 7, np.zeros(())])
def test_what_has_no_order_is_no_list(items: object) -> None:
    with pytest.raises(InvalidArgument, match="values is a list"):
        check_list(items, "values")


def test_lists_arrays_and_tensors_are_lists_but_for_sparse_ones() -> None:
    for items in ([b"a"], (b"a",), np.zeros((2, 2)), torch.zeros(2, 2), deque([b"a"])):
        check_list(items, "values")
    with pytest.raises(InvalidArgument, match="to_dense"):
        check_list(torch.eye(2).to_sparse(), "values")


@pytest.mark.parametrize("seconds", ["1", float("nan"), float("inf"), 10**400, [1]])
def test_seconds_are_a_number(seconds: object) -> None:
    for right in (None, 0, -1.5, 60):
        check_seconds(right, "deadline_s")
    with pytest.raises(InvalidArgument, match="deadline_s is a number of seconds"):
        check_seconds(seconds, "deadline_s")  # type: ignore[arg-type]


def test_a_flag_is_true_or_false_and_a_limit_a_number() -> None:
    check_flag(True, "force")
    check_limit(None)
    check_limit(1)
    with pytest.raises(InvalidArgument, match="force is True or False"):
        check_flag(1, "force")  # type: ignore[arg-type]
    for limit in (0, 1.0, True):
        with pytest.raises(InvalidArgument, match="limit is a number"):
            check_limit(limit)  # type: ignore[arg-type]


def test_masters_tenants_and_tokens_are_texts() -> None:
    check_arguments(["a:1", "b:1"], "", "", 1.0)
    check_arguments(None, None, None, None)
    with pytest.raises(InvalidArgument, match="master is HOST:PORT"):
        check_arguments([1], "", "", None)
    with pytest.raises(InvalidArgument, match="token is text"):
        check_arguments("a:1", "", 7, None)
    with pytest.raises(InvalidArgument, match="deadline_s is a number of seconds above 0"):
        check_arguments("a:1", "", "", 0)


def test_settings_are_what_they_are_called() -> None:
    check_kind(None, TransferSettings, "transfer")
    with pytest.raises(InvalidArgument, match="transfer is a TransferSettings, not a dict"):
        check_kind({}, TransferSettings, "transfer")


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
