"""Actions that an operator can start from the page. Each parses its JSON arguments into a call; the audit trail records the operator."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstore.console.source import ConsoleSource
from kvstore.protocol.errors import InvalidArgument
from kvstore.security.actor import Actor
from kvstore.security.quotas.limits import check_name, parse_limit

Act = Callable[[ConsoleSource, Actor], str]
"""Performs the action for an operator, in a thread that may block; returns the result as a line. Raises errors of protocol/errors.py."""
DRAIN_TARGETS: Final = ("peers", "nvme")


def _drain(arguments: Any) -> Act:
    node, to, cancel = _text(arguments, "node"), arguments.get("to", "peers"), arguments.get("cancel", False)
    if to not in DRAIN_TARGETS or not isinstance(cancel, bool):
        raise InvalidArgument(f"drain: 'to' must be one of {', '.join(DRAIN_TARGETS)}, and 'cancel' true or false")

    def act(source: ConsoleSource, by: Actor) -> str:
        source.drain(node, by, to=to, cancel=cancel)
        return f"{node} accepts blocks again" if cancel else f"{node} is being drained"

    return act


def _forget(arguments: Any) -> Act:
    node = _text(arguments, "node")

    def act(source: ConsoleSource, by: Actor) -> str:
        source.forget(node, by)
        return f"{node} is forgotten"

    return act


def _pin(arguments: Any) -> Act:
    tenant, namespace, pinned = _text(arguments, "tenant", ""), _text(arguments, "namespace", ""), arguments.get("pinned")
    if not isinstance(pinned, bool):
        raise InvalidArgument(f"'pinned' is {pinned!r}: it must be true or false")

    def act(source: ConsoleSource, by: Actor) -> str:
        blocks = source.pin(tenant, namespace, by, pinned=pinned)
        return f"{'Pinned' if pinned else 'Unpinned'} {blocks:,} blocks of {_space(tenant, namespace)}"

    return act


def _remove(arguments: Any) -> Act:
    tenant, namespace = _text(arguments, "tenant", ""), _text(arguments, "namespace", "")

    def act(source: ConsoleSource, by: Actor) -> str:
        blocks = source.remove(tenant, namespace, by)
        return f"Removed {blocks:,} blocks of {_space(tenant, namespace)}"

    return act


def _quota(arguments: Any) -> Act:
    tenant, name, text = _text(arguments, "tenant", ""), _text(arguments, "limit"), _text(arguments, "value", "").strip()
    check_name(name)
    limit = parse_limit(name, text) if text else None

    def act(source: ConsoleSource, by: Actor) -> str:
        if text:
            source.set_quota(tenant, {name: limit}, by)
            return f"{name} of tenant {tenant or '(none)'} is {text}"
        source.clear_quota(tenant, [name], by)
        return f"{name} of tenant {tenant or '(none)'} is as in the quotas file"

    return act


ACTIONS: Final[Mapping[str, Callable[[Any], Act]]] = {"drain": _drain, "forget": _forget, "pin": _pin, "remove": _remove, "quota": _quota}
"""Name -> parser of the action's JSON arguments; raises InvalidArgument."""


def _text(arguments: Any, name: str, default: str | None = None) -> str:
    if not isinstance(arguments, dict):
        raise InvalidArgument(f"the arguments of an action must be a JSON object, not {type(arguments).__name__}")
    value = arguments.get(name, default)
    if not isinstance(value, str) or (default is None and not value):
        raise InvalidArgument(f"{name!r} is missing or not a string")
    return value


def _space(tenant: str, namespace: str) -> str:
    return f"namespace {namespace or '(none)'}" + (f" of tenant {tenant}" if tenant else "")
