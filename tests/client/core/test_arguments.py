"""Refused arguments, check by check; test_operations.py shows that every call makes its checks."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvstore.client.core.arguments import (
    check_list,
    check_offsets,
    check_parents,
    namespace_text,
)
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


def test_offsets_may_be_integers_of_numpy() -> None:
    for offsets in ([0, 4096], np.array([0, 4096]), [np.uint32(0), torch.tensor(4096)]):
        found = check_offsets(offsets, 2)  # type: ignore[arg-type]
        assert found == [0, 4096]
        assert list(map(type, found)) == [int, int]
    for wrong in (["1"], [1.0]):
        with pytest.raises(InvalidArgument, match="whole number of bytes"):
            check_offsets(wrong, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("items", [{b"a"}, {b"a": 1}, iter([b"a"]), b"a", "a", 7, np.zeros(())])
def test_what_has_no_order_is_no_list(items: object) -> None:
    with pytest.raises(InvalidArgument, match="values is a list"):
        check_list(items, "values")


def test_lists_arrays_and_tensors_are_lists_but_for_sparse_ones() -> None:
    for items in ([b"a"], (b"a",), np.zeros((2, 2)), torch.zeros(2, 2), deque([b"a"])):
        check_list(items, "values")
    with pytest.raises(InvalidArgument, match="to_dense"):
        check_list(torch.eye(2).to_sparse(), "values")
