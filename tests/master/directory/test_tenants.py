"""Promises of tenants.py."""

import pytest

from kvstore.master.directory.tenants import FOR_GOOD, Tenants
from kvstore.protocol.errors import InvalidArgument


def test_a_tenant_is_made_once_and_found_by_name_and_index() -> None:
    tenants = Tenants()
    assert tenants.get("red") is None
    red, blue = tenants.of("red"), tenants.of("blue")
    assert tenants.of("red") is red
    assert tenants.get("blue") is blue
    assert tenants.at(blue.index) is blue
    assert list(tenants) == [red, blue]


def test_a_question_makes_no_tenant() -> None:
    tenants = Tenants()
    assert not tenants.asked("red").rows
    assert list(tenants) == []
    red = tenants.of("red")
    assert tenants.asked("red") is red


def test_a_tenant_that_has_nothing_is_forgotten_and_its_index_used_again() -> None:
    tenants = Tenants()
    red, blue = tenants.of("red"), tenants.of("blue")
    blue.pins[b"key"] = FOR_GOOD
    tenants.forget_empty()
    assert list(tenants) == [blue]
    assert tenants.of("green").index == red.index
    assert tenants.at(blue.index) is blue


def test_a_name_too_long_for_the_catalog_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="128"):
        Tenants().of("x" * 200)
