"""The quotas file of a master: TOML, read whole.

[default]                       # of every tenant that has no table of its own
dram_bytes = "8GiB"             # at each node
connections = 64                # at each daemon

[tenants.red]                   # what it does not name is as in [default]
dram_bytes = "64GiB"
pins = "none"                   # no limit
"""

from typing import Any, Final

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.settings import parse_size
from kvstore.security.quotas.quota import BYTES, NAMES
from kvstore.security.quotas.tables import NO_TABLES, NamedLimits, Tables
from kvstore.security.toml_file import read_toml

MAX_FILE_BYTES: Final = 1 << 20
"""Some 10,000 tenants: nodes are told all of it in one message."""
MAX_LIMIT: Final = (1 << 63) - 1
NO_LIMIT: Final = "none"


def read_tables(path: str) -> Tables:
    """Of the file, or none ("": no limits). Raises ConfigError, which names the file and the key that is wrong."""
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
    """A limit as people type it: a size or a number, by its name, or "none". Raises InvalidArgument."""
    check_name(name)
    is_number = name not in BYTES and text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT))
    try:
        return _limit(name, int(text) if is_number else text)
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None


def check_name(name: str) -> None:
    """Raises InvalidArgument for a limit that there is not."""
    if name not in NAMES:
        raise InvalidArgument(f"there is no limit {name!r}; there are: {', '.join(NAMES)}")


def _limits(path: str, place: str, table: Any) -> NamedLimits:
    """Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f"the quotas file {path}: {place} is a table; write it in a line of its own and its limits below")
    if unknown := sorted(set(table) - set(NAMES)):
        raise ConfigError(f"the quotas file {path}, {place}: unknown key {', '.join(unknown)}; known are {', '.join(NAMES)}")
    try:
        return {name: _limit(name, value) for name, value in table.items()}
    except ConfigError as error:
        raise ConfigError(f"the quotas file {path}, {place} {error}") from None


def _limit(name: str, value: Any) -> int | None:
    """Raises ConfigError, which names the key."""
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
