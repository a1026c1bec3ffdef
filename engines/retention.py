"""Retention hints in the requests of an engine's clients, as far as the operator's settings allow them.

A request has them as a JSON object. All members are optional:

    {"priority": 70, "ttl_s": 600, "session": "chat-7", "reuse_s": 30, "ranges": [[0, 2048, 75], [2048, null, 20]]}

`ranges` has [first token, token after the last one or null, priority] for a part of the sequence; other tokens have
`priority`. A hint never fails its request: malformed members are ignored. Imports neither an engine nor the client.
"""

import logging
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import DEFAULT_PRIORITY, MAX_RETENTION_S, PRIORITIES, Retention, session_id

FIELD: Final = "retention"
"""Member of vLLM's `kv_transfer_params` that has the hints of a request."""
MEMBERS: Final = frozenset(("priority", "ttl_s", "session", "reuse_s", "ranges"))
MAX_RANGES: Final = 64
"""Ranges of one request; further ones are ignored. It bounds the scheduler's work for one request."""
NO_HINT: Final = Retention()


class RetentionSettings(Protocol):
    """The settings that this module uses."""

    @property
    def retention_from_requests(self) -> bool: ...
    @property
    def retention_ceiling(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RequestRetention:
    """Hints of one request, by tokens. `of_tokens[i]` applies from token `starts[i]` up to `starts[i + 1]`, or to the
    end."""

    starts: Sequence[int]
    """Ascending; the first one is 0."""
    of_tokens: Sequence[Retention]
    outside: Retention
    """Applies to tokens outside of all ranges."""

    @property
    def of_unknown(self) -> Retention | None:
        """The hint of blocks whose tokens are unknown: that of the tokens outside of all ranges. None: no hint."""
        return _or_none(self.outside)

    def of_block(self, start: int, end: int) -> Retention | None:
        """Return the hint of the block of tokens [start, end): the one of highest priority among its tokens. None: no
        hint.

        So a high priority applies to the blocks that its range covers in part, a low one to those that it covers
        fully.
        """
        first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, end)
        return _or_none(max(self.of_tokens[first:last], key=_priority))


class RetentionReader:
    """Reads the hints of requests, up to the operator's ceiling. Not thread-safe."""

    def __init__(self, settings: RetentionSettings, log: logging.Logger) -> None:
        self._is_allowed = settings.retention_from_requests
        self._ceiling = settings.retention_ceiling
        self._log = log
        self._has_logged = False
        self._hinted = self._malformed = 0

    def read(self, parameters: Any, field: str = FIELD) -> RequestRetention | None:
        """Return the hints in the member `field` of a request's parameters. None: the request has none, or the setting
        `retention_from_requests` is off. Raises nothing, whatever the client sent."""
        if not self._is_allowed or not isinstance(parameters, Mapping) or parameters.get(field) is None:
            return None
        found, problems = parse_retention(parameters[field], self._ceiling)
        self._hinted += found is not None
        self._malformed += bool(problems)
        if problems and not self._has_logged:
            self._has_logged = True
            self._log.warning("kvstore: a request's retention hints were ignored in part; further ones are not logged: %s", problems[0])
        return found

    def take_counts(self) -> tuple[int, int]:
        """Return the requests with hints, and those of whose hints a part was ignored, since the last call."""
        counts, self._hinted, self._malformed = (self._hinted, self._malformed), 0, 0
        return counts


def parse_retention(hints: Any, ceiling: int) -> tuple[RequestRetention | None, list[str]]:
    """Return a request's hints, and why parts of them were ignored.

    Priorities above `ceiling` are lowered to it, times above MAX_RETENTION_S to that. Without a valid `ttl_s`, if the
    request has one, its priorities are ignored: they would not end. None: nothing is left of the hints.
    """
    if not isinstance(hints, Mapping):
        return None, [f"retention is an object, not {reprlib.repr(hints)}"]
    unknown = next((name for name in hints if name not in MEMBERS), None)
    problems = [] if unknown is None else [f"retention has no member {reprlib.repr(unknown)}"]
    ttl_s, reuse_s = (_seconds(hints, name, problems) for name in ("ttl_s", "reuse_s"))
    is_endless = hints.get("ttl_s") is not None and ttl_s is None
    priority = DEFAULT_PRIORITY
    ranges: list[tuple[int, int | None, int]] = []
    if not is_endless:
        if (given := hints.get("priority")) is not None:
            if _is_number(given, PRIORITIES):
                priority = min(given, ceiling)
            else:
                problems.append(f"priority is a whole number from 0 to {PRIORITIES}, not {reprlib.repr(given)}")
        ranges = _ranges(hints.get("ranges"), ceiling, problems)
    whole = Retention(session=_session(hints, problems), reuse_s=reuse_s)
    starts = sorted({0, *(start for start, _, _ in ranges), *(end for _, end, _ in ranges if end is not None)})
    priorities = [_priority_at(token, ranges, priority) for token in starts]
    *of_tokens, outside = [
        whole if each == DEFAULT_PRIORITY else replace(whole, priority=each, ttl_s=ttl_s) for each in (*priorities, priority)
    ]
    has_hints = any(hint != NO_HINT for hint in of_tokens)
    return RequestRetention(starts, of_tokens, outside) if has_hints else None, problems


def _ranges(given: Any, ceiling: int, problems: list[str]) -> list[tuple[int, int | None, int]]:
    if given is None:
        return []
    if not isinstance(given, list):
        problems.append(f"ranges is a list of [start, end, priority], not {reprlib.repr(given)}")
        return []
    if len(given) > MAX_RANGES:
        problems.append(f"ranges has {len(given)} entries, the maximum is {MAX_RANGES}")
    found = []
    for entry in given[:MAX_RANGES]:
        if _is_range(entry):
            start, end, priority = entry
            found.append((start, end, min(priority, ceiling)))
        else:
            problems.append(f"an entry of ranges is [start, end or null, priority] with start < end, not {reprlib.repr(entry)}")
    return found


def _is_range(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    start, end, priority = entry
    return _is_number(start) and _is_number(priority, PRIORITIES) and (end is None or (_is_number(end) and start < end))


def _priority_at(token: int, ranges: Sequence[tuple[int, int | None, int]], default: int) -> int:
    """Return the highest priority of the ranges that contain the token, `default` outside of all."""
    return max((priority for start, end, priority in ranges if start <= token and (end is None or token < end)), default=default)


def _seconds(hints: Mapping[Any, Any], name: str, problems: list[str]) -> float | None:
    given = hints.get(name)
    if given is None:
        return None
    if isinstance(given, (int, float)) and not isinstance(given, bool) and given > 0:
        return float(given) if given < MAX_RETENTION_S else MAX_RETENTION_S
    problems.append(f"{name} is a number of seconds above 0, not {reprlib.repr(given)}")
    return None


def _session(hints: Mapping[Any, Any], problems: list[str]) -> str | None:
    session = hints.get("session")
    if session is None:
        return None
    try:
        session_id(session)
    except InvalidArgument as error:
        problems.append(str(error))
        return None
    assert isinstance(session, str)
    return session


def _is_number(value: Any, maximum: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (maximum is None or value <= maximum)


def _priority(hint: Retention) -> int:
    return hint.priority


def _or_none(hint: Retention) -> Retention | None:
    return None if hint == NO_HINT else hint
