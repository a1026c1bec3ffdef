"""Limits as they are written, before they are in force: by tenant, each by its name. Pure.

A tenant's limit is what an operator has set; what no operator has set is as in the tenant's table of the quotas file, and what that does
not name as in the file's [default].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kvstore.security.quotas.quota import Quota, Quotas

NamedLimits = Mapping[str, int | None]
"""By name (quota.NAMES), those that are said; None: no limit."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Of a quotas file: the one of every tenant that has none of its own, and tenants' own."""

    default: NamedLimits = field(default_factory=dict)
    tenants: Mapping[str, NamedLimits] = field(default_factory=dict)


NO_TABLES: Final = Tables()


class Origins(NamedTuple):
    """Who says which limits of a tenant, by name; what neither does is the [default]'s."""

    operator: list[str]
    file: list[str]


def in_force(file: Tables, operators: Mapping[str, NamedLimits]) -> Quotas:
    """What holds, with what operators have set above the file."""
    default = Quota(**file.default)
    tenants = dict.fromkeys([*file.tenants, *operators])
    return Quotas(default, {name: replace(default, **{**file.tenants.get(name, {}), **operators.get(name, {})}) for name in tenants})


def origins(file: Tables, operators: Mapping[str, NamedLimits]) -> dict[str, Origins]:
    """Of the tenants that have limits of their own."""
    found = {}
    for name in dict.fromkeys([*file.tenants, *operators]):
        above = operators.get(name, {})
        found[name] = Origins(list(above), [limit for limit in file.tenants.get(name, {}) if limit not in above])
    return found
