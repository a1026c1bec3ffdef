"""What an operator can do from the page: each checks what it is told, and then does it. The audit trail has who did what."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstore.console.source import ConsoleSource
from kvstore.protocol.errors import InvalidArgument
from kvstore.security.actor import Actor
from kvstore.security.quotas.limits import check_name, parse_limit

Act = Callable[[ConsoleSource, Actor], str]
"""Does it for an operator, in a thread where it may block; what came of it, in a line. Raises errors of protocol/errors.py."""
PLACES: Final = ("peers", "nvme")


def _drain(told: Any) -> Act:
    node, to, cancel = _text(told, "node"), told.get("to", "peers"), told.get("cancel", False)
    if to not in PLACES or not isinstance(cancel, bool):
        raise InvalidArgument(f"a drain goes to one of {', '.join(PLACES)}, and cancel is true or false")

    def act(source: ConsoleSource, by: Actor) -> str:
        source.drain(node, by, to=to, cancel=cancel)
        return f"{node} takes blocks again" if cancel else f"{node} is being drained"

    return act


def _forget(told: Any) -> Act:
    node = _text(told, "node")

    def act(source: ConsoleSource, by: Actor) -> str:
        source.forget(node, by)
        return f"{node} is forgotten"

    return act


def _pin(told: Any) -> Act:
    tenant, namespace, pinned = _text(told, "tenant", ""), _text(told, "namespace", ""), told.get("pinned")
    if not isinstance(pinned, bool):
        raise InvalidArgument("pinned is true or false")

    def act(source: ConsoleSource, by: Actor) -> str:
        blocks = source.pin(tenant, namespace, by, pinned=pinned)
        return f"{'Pinned' if pinned else 'Unpinned'} {blocks:,} blocks of {_space(tenant, namespace)}"

    return act


def _remove(told: Any) -> Act:
    tenant, namespace = _text(told, "tenant", ""), _text(told, "namespace", "")

    def act(source: ConsoleSource, by: Actor) -> str:
        blocks = source.remove(tenant, namespace, by)
        return f"Removed {blocks:,} blocks of {_space(tenant, namespace)}"

    return act


def _quota(told: Any) -> Act:
    tenant, name, text = _text(told, "tenant", ""), _text(told, "limit"), _text(told, "value", "").strip()
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
"""By name: what is told (JSON) becomes what is done. Raises InvalidArgument."""


def _text(told: Any, name: str, least: str | None = None) -> str:
    if not isinstance(told, dict):
        raise InvalidArgument("an action is told in an object")
    value = told.get(name, least)
    if not isinstance(value, str) or (least is None and not value):
        raise InvalidArgument(f"{name} is missing, or no text")
    return value


def _space(tenant: str, namespace: str) -> str:
    return f"namespace {namespace or '(none)'}" + (f" of tenant {tenant}" if tenant else "")
