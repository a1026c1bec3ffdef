"""`kvstore token`: creates tokens and their entries for the masters' tokens file; lists the tokens that masters accept."""

import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import click
from rich.console import RenderableType
from rich.text import Text

from kvstore.cli.options import client_options, echo_json, json_option, show_each
from kvstore.cli.tools.tables import duration, new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.security.credentials import ANY_NAME, digest_of

TOKEN_BYTES: Final = 32
"""256 random bits: too many to guess, and the digest may be stored where others can read it."""


SOON_S: Final = 14 * 86_400
"""A token that expires within this time is shown in yellow."""


@click.group(short_help="Create tokens for tenants, nodes, engines and operators.")
def token() -> None:
    """Tokens authenticate tenants, nodes, engines and operators (docs/security.md)."""


@token.command()
@click.option("--tenant", metavar="NAME", help="For clients of this tenant.")
@click.option("--role", type=click.Choice(["read", "write", "admin"]), help="Permissions of a tenant's token.  [default: write]")
@click.option(
    "--node", metavar="NAME", is_flag=False, flag_value=ANY_NAME, help="For the node of this name to join; for any without a name."
)
@click.option(
    "--instance", metavar="NAME", is_flag=False, flag_value=ANY_NAME, help="For the engine of this name to report; for any without a name."
)
@click.option("--admin", metavar="NAME", help="For an operator (no tenant).")
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="Day (00:00 UTC) on which it expires.")
@click.option("--out", metavar="FILE", help="Write the token to FILE, readable by its owner only, and do not print it.")
@json_option
def new(role: str | None, expires: datetime | None, out: str | None, as_json: bool, **names: str | None) -> None:
    """Create a token, and print the entry for the masters' tokens file. The entry has only a digest: the token cannot be recovered.

    An existing FILE is not overwritten. A node reads it by --join-token-file; for a client export KVSTORE_CLIENT_TOKEN=$(cat FILE).
    """
    [(section, name), *others] = [(f"{option}s", name) for option, name in names.items() if name is not None] or [("", "")]
    if not section or others:
        raise InvalidArgument("give exactly one of --tenant, --node, --instance and --admin")
    if role is not None and section != "tenants":
        raise InvalidArgument("--role applies to --tenant only: the other kinds have a fixed role")
    if expires is not None and expires.replace(tzinfo=UTC) <= datetime.now(UTC):
        raise InvalidArgument(f"--expires {expires:%Y-%m-%d} is in the past: no master would accept the token")
    made = secrets.token_urlsafe(TOKEN_BYTES)
    entry = _entry(section, name, made, role, expires)
    if out is not None:
        _write(out, made)
    if as_json:
        echo_json(({"token": made} if out is None else {"token_file": out}) | {"toml": entry})
        return
    made_line = f"token: {made}" if out is None else f"wrote the token to {out}, which only its owner can read"
    click.echo(f"{made_line}\n\nAdd to the tokens file of the masters, which reload it without a restart:\n\n{entry}", nl=False)


def _entry(section: str, name: str, token: str, role: str | None, expires: datetime | None) -> str:
    """Lines of the tokens file, with the digest in place of the token."""
    facts = {"sha256": json.dumps(digest_of(token).hex())}
    if section == "tenants":
        facts["role"] = json.dumps(role or "write")
    if expires is not None:
        facts["expires"] = f"{expires:%Y-%m-%d}"
    return f"[[{section}.{json.dumps(name)}]]\n" + "".join(f"{key} = {value}\n" for key, value in facts.items())


def _write(file: str, token: str) -> None:
    """Raises InvalidArgument for a file that exists or cannot be written."""
    try:
        with open(file, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(token + "\n")
    except FileExistsError:
        raise InvalidArgument(f"{file} exists: name another file, or remove it first") from None
    except OSError as error:
        raise InvalidArgument(f"cannot write {file}: {error.strerror}") from None


@token.command(short_help="List the tokens that the masters accept.")
@json_option
@client_options
def ls(as_json: bool, settings: ClientSettings) -> None:
    """List the tokens that the masters accept: kind, name, role, id and expiry.

    The id appears in logs and in `kvstore audit`; the token itself is not shown. --json prints one object per line.
    """
    with Control.find(settings) as control:
        found = control.tokens()
    values = [as_dict(one) | ({} if one.HasField("expires_s") else {"expires_s": None}) for one in found]
    show_each(values, lambda: tokens_table(found, now_s=time.time()), as_json=as_json)


def tokens_table(tokens: Sequence[pb.TokenStatus], *, now_s: float) -> RenderableType:
    if not tokens:
        return Text("No tokens: the masters have no tokens file and accept unauthenticated clients.")
    table = new_table("kind", "name", "role", "id", "expires")
    for one in tokens:
        table.add_row(one.kind, one.name or "*", one.role or "-", one.credential, _end(one, now_s))
    return table


def _end(token: pb.TokenStatus, now_s: float) -> Text:
    if not token.HasField("expires_s"):
        return Text("never")
    left_s, day = token.expires_s - now_s, time.strftime("%Y-%m-%d %H:%M", time.gmtime(token.expires_s))
    if left_s <= 0:
        return Text(f"{day}: expired", style="red")
    return Text(f"{day}, in {duration(left_s)}", style="yellow" if left_s < SOON_S else "")
