"""Promises of errors.py: one tree, one number an error, one table to gRPC."""

import re

import pytest

from kvstore.protocol import errors
from kvstore.protocol.errors import (
    BY_CODE,
    GRPC_STATUS,
    ChecksumMismatch,
    Closed,
    DeadlineExceeded,
    Fenced,
    Forked,
    Full,
    KVStoreError,
    Misuse,
    Retry,
    StaleEpoch,
    TierFailed,
    Unauthorized,
    from_code,
    grpc_status,
    typed,
)


def children(kind: type[KVStoreError]) -> list[type[KVStoreError]]:
    """Of the tree; what else derives from it, such as the router's own error, is in other modules of this process."""
    return [child for child in kind.__subclasses__() if child.__module__ == KVStoreError.__module__]


def everything_below(root: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [root] + [below for child in children(root) for below in everything_below(child)]


def test_every_error_has_its_own_code_within_its_branch() -> None:
    kinds = everything_below(KVStoreError)
    assert len({kind.code for kind in kinds}) == len(kinds) == len(BY_CODE)
    for kind in kinds:
        assert "code" in vars(kind), f"{kind.__name__} inherits its number"
        if kind is not KVStoreError:
            branch = kind.__mro__[kind.__mro__.index(KVStoreError) - 1]
            assert kind.code // 100 * 100 == vars(branch)["code"]


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^    ([│ ]*[├└]── )?([A-Z]\w+)", errors.__doc__, re.MULTILINE)

    def walk(kind: type[KVStoreError], depth: int) -> list[tuple[int, str]]:
        return [(depth, kind.__name__)] + [line for child in children(kind) for line in walk(child, depth + 1)]

    assert [(len(branch) // 4, name) for branch, name in drawn] == walk(KVStoreError, 0)


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_error_from_the_wire_keeps_type_and_text(kind: type[KVStoreError]) -> None:
    error = from_code(kind.code, "why")
    assert type(error) is kind
    assert str(error) == "why"


@pytest.mark.parametrize(("code", "kind"), [(199, Retry), (399, Fenced), (699, Misuse), (700, KVStoreError), (0, KVStoreError)])
def test_an_unknown_code_becomes_its_branch_or_the_root(code: int, kind: type[KVStoreError]) -> None:
    assert type(from_code(code, "")) is kind


def test_foreign_exception_becomes_the_root_error() -> None:
    error = typed(ZeroDivisionError("division by zero"))
    assert (type(error), str(error)) == (KVStoreError, "internal error: ZeroDivisionError: division by zero")
    full = Full("no room")
    assert typed(full) is full


def test_a_deadline_is_also_pythons_timeout() -> None:
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert str(DeadlineExceeded("late")) == "late"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DeadlineExceeded(""), "DEADLINE_EXCEEDED"),
        (ChecksumMismatch(""), "DATA_LOSS"),
        (StaleEpoch(""), "FAILED_PRECONDITION"),
        (Unauthorized(""), "UNAUTHENTICATED"),
        (TierFailed(""), "INTERNAL"),
        (Closed(""), "INVALID_ARGUMENT"),
        (Forked(""), "INVALID_ARGUMENT"),
        (KVStoreError(""), "UNKNOWN"),
    ],
)
def test_an_error_takes_the_grpc_status_of_its_nearest_ancestor(error: KVStoreError, status: str) -> None:
    assert grpc_status(error) == status


def test_every_branch_has_a_grpc_status() -> None:
    assert set(children(KVStoreError)) <= set(GRPC_STATUS)
