"""Promises of tables.py."""

from kvstore.security.quotas.quota import UNLIMITED, Quota
from kvstore.security.quotas.tables import NO_TABLES, Origins, Tables, in_force, origins

FILE = Tables({"dram_bytes": 10, "pins": 1}, {"red": {"dram_bytes": 20, "connections": 4}})


def test_what_an_operator_has_set_is_above_the_tenants_table_and_that_above_the_default() -> None:
    quotas = in_force(FILE, {"red": {"connections": None, "blocks": 5}, "green": {"pins": 7}})
    assert quotas.of("red") == Quota(dram_bytes=20, blocks=5, pins=1)
    assert quotas.of("green") == Quota(dram_bytes=10, pins=7)
    assert quotas.of("blue") == Quota(dram_bytes=10, pins=1)
    assert in_force(NO_TABLES, {}) == UNLIMITED


def test_of_each_tenant_with_limits_of_its_own_it_is_told_who_says_them() -> None:
    assert origins(FILE, {"red": {"connections": None, "blocks": 5}, "green": {"pins": 7}}) == {
        "red": Origins(["connections", "blocks"], ["dram_bytes"]),
        "green": Origins(["pins"], []),
    }
