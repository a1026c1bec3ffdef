"""What an operator can do from the page: each checks what it is told, and then does it and says so in the log of events."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstore.console.events import WARNING, Event
from kvstore.console.watch import Watch
from kvstore.protocol.errors import InvalidArgument
from kvstore.security.quotas.reading import check_name, parse_limit

Act = Callable[[Watch], str]
"""Does it, in a thread where it may block; what came of it, in a line. Raises errors of protocol/errors.py."""
PLACES: Final = ("peers", "nvme")


def _drain(told: Any) -> Act:
    node, to, cancel = _text(told, "node"), told.get("to", "peers"), told.get("cancel", False)
    if to not in PLACES or not isinstance(cancel, bool):
        raise InvalidArgument(f"a drain goes to one of {', '.join(PLACES)}, and cancel is true or false")

    def act(watch: Watch) -> str:
        watch.source.drain(node, to=to, cancel=cancel)
        return _noted(watch, node, f"An operator has {'ended the drain of' if cancel else 'begun to drain'} {node}")

    return act


def _forget(told: Any) -> Act:
    node = _text(told, "node")

    def act(watch: Watch) -> str:
        watch.source.forget(node)
        return _noted(watch, node, f"An operator has had {node} forgotten")

    return act


def _pin(told: Any) -> Act:
    tenant, namespace, pinned = _text(told, "tenant", ""), _text(told, "namespace", ""), told.get("pinned")
    if not isinstance(pinned, bool):
        raise InvalidArgument("pinned is true or false")

    def act(watch: Watch) -> str:
        blocks = watch.source.pin(tenant, namespace, pinned=pinned)
        return _noted(watch, "", f"An operator has {'pinned' if pinned else 'let go'} {blocks:,} blocks of {_space(tenant, namespace)}")

    return act


def _remove(told: Any) -> Act:
    tenant, namespace = _text(told, "tenant", ""), _text(told, "namespace", "")

    def act(watch: Watch) -> str:
        blocks = watch.source.remove(tenant, namespace)
        return _noted(watch, "", f"An operator has removed {blocks:,} blocks of {_space(tenant, namespace)}")

    return act


def _quota(told: Any) -> Act:
    tenant, name, text = _text(told, "tenant", ""), _text(told, "limit"), _text(told, "value", "").strip()
    check_name(name)
    limit = parse_limit(name, text) if text else None

    def act(watch: Watch) -> str:
        if text:
            watch.source.set_quota(tenant, {name: limit})
            return _noted(watch, "", f"An operator has set {name} of tenant {tenant or '(none)'}: {text}")
        watch.source.clear_quota(tenant, [name])
        return _noted(watch, "", f"An operator has let the quotas file say {name} of tenant {tenant or '(none)'}")

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


def _noted(watch: Watch, subject: str, text: str) -> str:
    watch.note(Event(WARNING, subject, text))
    return text
