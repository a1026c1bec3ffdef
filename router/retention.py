"""Retention hints in a header of a client's request: `x-kvstore-retention: priority=70, ttl_s=600, session=chat-7, reuse_s=30`.

The router passes them on in `kv_transfer_params`, where vLLM's connector reads them.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import Retention

RETENTION_HEADER: Final = "x-kvstore-retention"
MEMBERS: Final = tuple(field.name for field in fields(Retention))


def parse_retention(headers: Mapping[str, str], ceiling: int) -> Mapping[str, Any] | None:
    """Return the members of the header, with a priority of at most `ceiling`. None: there is no header.

    Raises InvalidArgument unless it is a list of NAME=VALUE with names and values of Retention, each once.
    """
    text = headers.get(RETENTION_HEADER)
    if text is None:
        return None
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if name not in MEMBERS or not separator or name in given:
            names = ", ".join(MEMBERS)
            raise InvalidArgument(f"the header {RETENTION_HEADER} has NAME=VALUE of {names}, each at most once, not {part!r:.50}")
        given[name] = value if name == "session" else _number(value)
    try:
        found = Retention(**given)
    except InvalidArgument as error:
        raise InvalidArgument(f"the header {RETENTION_HEADER}: {error}") from None
    found = replace(found, priority=min(found.priority, ceiling))
    return {name: getattr(found, name) for name in MEMBERS if name in given}


def _number(text: str) -> int | float:
    """Return a number, NaN for another text: Retention refuses it by the member's name."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return math.nan
