"""Limits of tenants: parsing of the quotas file and of operators' values, merge at a master, control-plane messages.

    [default]                       # of every tenant that has no table of its own
    dram_bytes = "8GiB"             # at each node
    connections = 64                # at each daemon

    [tenants.red]                   # other limits are those of [default]
    dram_bytes = "64GiB"
    pins = "none"                   # no limit

A tenant's limit is the operator's value, else that of the tenant's table in the file, else that of [default].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.settings import parse_size
from kvstore.security.config_file import read_toml, signature
from kvstore.security.quotas.quota import BYTES, NAMES, Quota, Quotas

NamedLimits = Mapping[str, int | None]
"""Given limits by name (quota.NAMES); None: no limit."""
MAX_FILE_BYTES: Final = 1 << 20
"""Enough for 10,000 tenants; nodes get all of it in one message."""
MAX_LIMIT: Final = (1 << 63) - 1
NO_LIMIT: Final = "none"


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of a quotas file: [default], and tenants' own."""

    default: NamedLimits = field(default_factory=dict)
    tenants: Mapping[str, NamedLimits] = field(default_factory=dict)


NO_TABLES: Final = Tables()


class Origins(NamedTuple):
    """Names of a tenant's limits by origin: operator, or quotas file; all others come from [default]."""

    operator: list[str]
    file: list[str]


def in_force(file: Tables, operators: Mapping[str, NamedLimits]) -> Quotas:
    """Merge the file's limits and the operators', which take precedence."""
    default = Quota(**file.default)
    tenants = dict.fromkeys([*file.tenants, *operators])
    return Quotas(default, {name: replace(default, **{**file.tenants.get(name, {}), **operators.get(name, {})}) for name in tenants})


def origins(file: Tables, operators: Mapping[str, NamedLimits]) -> dict[str, Origins]:
    """Return the origins of limits of tenants that have their own."""
    found = {}
    for name in dict.fromkeys([*file.tenants, *operators]):
        above = operators.get(name, {})
        found[name] = Origins(list(above), [limit for limit in file.tenants.get(name, {}) if limit not in above])
    return found


def read_tables(path: str) -> Tables:
    """Read the file; "": no limits. Raises ConfigError with the file and the wrong key."""
    if not path:
        return NO_TABLES
    table = read_toml(path, "the quotas file", max_bytes=MAX_FILE_BYTES)
    if unknown := sorted(set(table) - {"default", "tenants"}):
        raise ConfigError(f"the quotas file {path} has {', '.join(unknown)}: its tables are [default] and [tenants.NAME]")
    default = _limits(path, "[default]", table.get("default", {}))
    tenants = table.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ConfigError(f"the quotas file {path}: tenants is a table of tables; write [tenants.NAME] and its limits below")
    return Tables(default, {name: _limits(path, f"[tenants.{name}]", limits) for name, limits in tenants.items()})


def parse_limit(name: str, text: str) -> int | None:
    """Parse a limit: a size or a number, depending on its name, or "none". Raises InvalidArgument."""
    check_name(name)
    is_number = name not in BYTES and text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT))
    try:
        return _limit(name, int(text) if is_number else text)
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None


def check_name(name: str) -> None:
    """Raises InvalidArgument for an unknown limit."""
    if name not in NAMES:
        raise InvalidArgument(f"there is no limit {name!r}; there are: {', '.join(NAMES)}")


def _limits(path: str, section: str, table: Any) -> NamedLimits:
    """Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f"the quotas file {path}: {section} is a table; write it in a line of its own and its limits below")
    if unknown := sorted(set(table) - set(NAMES)):
        raise ConfigError(f"the quotas file {path}, {section}: unknown key {', '.join(unknown)}; known are {', '.join(NAMES)}")
    try:
        return {name: _limit(name, value) for name, value in table.items()}
    except ConfigError as error:
        raise ConfigError(f"the quotas file {path}, {section} {error}") from None


def _limit(name: str, value: Any) -> int | None:
    """Raises ConfigError with the key."""
    if value == NO_LIMIT:
        return None
    try:
        limit = parse_size(value) if name in BYTES and isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MAX_LIMIT:
        what = 'a size such as "64GiB"' if name in BYTES else "a whole number"
        raise ConfigError(f'{name}: {value!r} is no limit; write {what} from 0 on, or "{NO_LIMIT}"')
    return limit


class QuotasInForce:
    """Current quotas of a master. A new file replaces the old one entirely, or not at all if it is invalid."""

    def __init__(self, path: str) -> None:
        """Read the quotas file at `path`; "": no limits. Raises ConfigError."""
        self._path = path
        self._seen = signature(path)
        self._file = read_tables(path)
        self._operators: Mapping[str, NamedLimits] = {}
        self.now = in_force(self._file, self._operators)
        self.version = self.now.version
        """Version of `now`."""

    def has_changed(self) -> bool:
        """Return True if the file has changed since it was last read."""
        return signature(self._path) != self._seen

    def reread(self) -> Quotas:
        """Reload the file, if there is one, and return the current quotas.

        Raises ConfigError for an invalid file, without a change.
        """
        if self._path:
            self._seen = signature(self._path)
            self._file = read_tables(self._path)
            self._make()
        return self.now

    def overlay(self, operators: Mapping[str, NamedLimits]) -> None:
        """Replace all operators' limits, by tenant.

        The caller must not change the mapping; passing the same object again is cheap.
        """
        if operators is not self._operators:
            self._operators = operators
            self._make()

    def origins(self) -> dict[str, Origins]:
        """Return the origins of limits of tenants that have their own."""
        return origins(self._file, self._operators)

    def _make(self) -> None:
        self.now = in_force(self._file, self._operators)
        self.version = self.now.version


def as_message(quotas: Quotas, version: int) -> pb.Quotas:
    """Return the message of these quotas; `version` is theirs, passed in because computing it is slow."""
    tenants = {name: _as_message(quota) for name, quota in quotas.tenants.items()}
    return pb.Quotas(version=version, default=_as_message(quotas.default), tenants=tenants)


def from_message(message: pb.Quotas) -> Quotas:
    """Return the quotas of a message; limits that this release does not know are ignored."""
    return Quotas(_from_message(message.default), {name: _from_message(quota) for name, quota in message.tenants.items()})


def _as_message(quota: Quota) -> pb.TenantQuota:
    return pb.TenantQuota(**quota.limits())


def _from_message(message: pb.TenantQuota) -> Quota:
    return Quota(**{name: getattr(message, name) for name in NAMES if message.HasField(name)})
