"""The command `namespaces`: lists namespaces, shows their identity, and explains why two engines do not share blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.table import Table

from kvstore.cli.options import client_options, echo_json, json_option
from kvstore.cli.options import show as show_result
from kvstore.cli.tools.tables import new_table
from kvstore.cli.weights import age, weights_text
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.console.documents import contents
from kvstore.kvcache.explained import differences, fields
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.settings import format_size

NOT_REPORTED: Final = "no engine has reported its identity: its blocks were put under a plain name, or its engine does not report"
SHORT_ID: Final = 8
"""Digits of an id in tables: among 1,000 namespaces two collide in one of 8,600 clusters."""
MAX_NAMED: Final = 8
"""Most namespaces in an error text."""


@dataclass(frozen=True, slots=True)
class ListedNamespace:
    """A namespace with blocks, or one that an engine reported. `usage` is empty if it has no blocks and no live engine."""

    tenant: str
    name: str
    usage: pb.NamespaceUsage
    identity: Namespace | None
    """The salt is replaced by a digest; None: not reported."""


def known(reply: pb.ContentsReply, table: pb.WeightsTable) -> list[ListedNamespace]:
    """Return the namespaces of both replies, without duplicates."""
    forms = {(one.tenant, one.form.id.hex()): one.form.form for one in table.namespaces}
    usages = {(one.tenant, one.namespace): one for one in reply.namespaces}
    keys = dict.fromkeys((*usages, *forms))
    return [
        ListedNamespace(*key, usages.get(key, pb.NamespaceUsage()), Namespace.from_canonical(forms[key]) if key in forms else None)
        for key in keys
    ]


def find(given: str, among: Sequence[ListedNamespace], tenant: str) -> ListedNamespace:
    """Return the namespace whose name is `given`, or whose id starts with it. `tenant`'s namespace is preferred.

    Raises InvalidArgument if none or several match.
    """
    found = [one for one in among if one.name == given] or [one for one in among if given and one.name.startswith(given.lower())]
    if not found:
        raise InvalidArgument(f"no namespace {given!r}: `kvstore namespaces` lists them")
    names = sorted({one.name for one in found})
    if len(names) > 1:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise InvalidArgument(f"{given!r} matches several namespaces: {', '.join(names[:MAX_NAMED])}{more}; give more digits")
    own = [one for one in found if one.tenant == tenant] or found
    if len(own) > 1:
        tenants = ", ".join(repr(one.tenant) for one in own)
        raise InvalidArgument(f"namespace {names[0]} belongs to several tenants: {tenants}; choose one with --tenant")
    return own[0]


def namespaces_table(reply: pb.ContentsReply) -> RenderableType:
    """Return a table of the namespaces, largest first, then empty ones that engines use."""
    has_tenants = len({one.tenant for one in reply.namespaces}) > 1
    table = new_table(
        "namespace",
        *(("tenant",) if has_tenants else ()),
        "model",
        "layout",
        "weights",
        "blocks",
        "size",
        "last read",
        "used by",
        right=("blocks", "size"),
    )
    for one in reply.namespaces:
        tenant = (one.tenant or "(none)",) if has_tenants else ()
        size = format_size(one.stored.bytes)
        table.add_row(
            _shown_name(one),
            *tenant,
            one.model or "-",
            one.layout or "-",
            _weights(one),
            f"{one.stored.blocks:,}",
            size,
            _read(one),
            _users(one),
        )
    return table


def details(one: ListedNamespace) -> dict[str, Any]:
    """Return all facts about a namespace, for JSON."""
    usage = one.usage
    return {
        "namespace": one.name,
        "tenant": one.tenant,
        "blocks": usage.stored.blocks,
        "bytes": usage.stored.bytes,
        "read_age_s": usage.read_age_s if usage.HasField("read_age_s") else None,
        "users": list(usage.users),
        "is_used": usage.is_used,
        "is_retired": usage.is_retired,
        "identity": dict(fields(one.identity)) if one.identity is not None else None,
    }


def details_table(one: ListedNamespace) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    stored = one.usage.stored
    rows = [
        ("namespace", one.name or "(none)"),
        ("tenant", one.tenant or "(none)"),
        ("blocks", f"{stored.blocks:,}"),
        ("size", format_size(stored.bytes)),
    ]
    rows += [("last read", _read(one.usage)), ("used by", _users(one.usage))]
    for name, text in rows:
        table.add_row(name, text)
    if one.identity is None:
        table.add_row("identity", NOT_REPORTED)
    for field in fields(one.identity) if one.identity is not None else ():
        table.add_row(f"identity: {field.name}" if field.name == "tenant" else field.name, field.text)
    return table


def compared(one: ListedNamespace, other: ListedNamespace) -> list[str]:
    """Return why engines of two namespaces do not share blocks, one sentence per line.

    Raises InvalidArgument if the identity of one was not reported.
    """
    for each in (one, other):
        if each.identity is None:
            raise InvalidArgument(f"namespace {each.name} cannot be compared: {NOT_REPORTED}")
    assert one.identity is not None
    assert other.identity is not None
    found = differences(one.identity, other.identity, (one.name[:8], other.name[:8]))
    if one.tenant != other.tenant:
        found.insert(0, f"The store's tenant is {one.tenant!r} of one and {other.tenant!r} of the other. Tenants never share.")
    return found or ["They are one namespace: engines that use it share blocks of equal tokens."]


def _shown_name(one: pb.NamespaceUsage) -> str:
    """The namespace's name; for one with a reported identity the first digits of its id, which `show` and `diff` accept."""
    return one.namespace[:SHORT_ID] if one.model else one.namespace or "(none)"


def _weights(one: pb.NamespaceUsage) -> str:
    if not one.model:
        return "-"
    base, _at, version = one.weights.partition("@")
    return weights_text(base, version) + (" (retired)" if one.is_retired else "")


def _read(one: pb.NamespaceUsage) -> str:
    return age(one.read_age_s) if one.HasField("read_age_s") else "-"


def _users(one: pb.NamespaceUsage) -> str:
    return ", ".join(one.users) if one.is_used else "-"


@click.group(invoke_without_command=True, short_help="List namespaces; explain why two engines do not share.")
@json_option
@client_options
@click.pass_context
def namespaces(context: click.Context, as_json: bool, settings: ClientSettings) -> None:
    """List namespaces: model, weights, blocks, size, last read, and the engines that use them.

    Order: the 1,000 largest, then empty ones that live engines use. An operator sees all tenants, a tenant its own.
    """
    if context.invoked_subcommand is not None:
        return
    with Control.find(settings) as control:
        reply = control.contents()
    show_result(contents(reply)["namespaces"], lambda: namespaces_table(reply), as_json=as_json)


@namespaces.command(short_help="Show all fields of a namespace's identity.")
@click.argument("id")
@json_option
@client_options
def show(id: str, as_json: bool, settings: ClientSettings) -> None:
    """Show the identity and usage of the namespace ID. The first digits of an id are enough."""
    one = find(id, _known(settings), settings.tenant)
    show_result(details(one), lambda: details_table(one), as_json=as_json)


@namespaces.command(short_help="Explain why engines of two namespaces do not share.")
@click.argument("a")
@click.argument("b")
@json_option
@client_options
def diff(a: str, b: str, as_json: bool, settings: ClientSettings) -> None:
    """Show the fields in which the namespaces A and B differ, with advice. The first digits of an id are enough."""
    among = _known(settings)
    lines = compared(find(a, among, settings.tenant), find(b, among, settings.tenant))
    if as_json:
        echo_json(lines)
    else:
        click.echo("\n".join(lines))


def _known(settings: ClientSettings) -> list[ListedNamespace]:
    with Control.find(settings) as control:
        return known(control.contents(), control.weights())
