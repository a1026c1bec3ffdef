"""`kvstore token`: a random token, and the line by which the masters' tokens file knows it. It asks no cluster."""

import json
import secrets
from datetime import UTC, datetime
from typing import Final

import click

from kvstore.client.cli.options import echo_json, json_option
from kvstore.protocol.errors import InvalidArgument
from kvstore.security.credentials import ANY_NAME, digest_of

TOKEN_BYTES: Final = 32
"""256 random bits: nobody finds it by trying, and its digest can be kept where others read."""


@click.group()
def token() -> None:
    """Tokens, by which tenants, nodes, engines and operators show who they are (docs/security.md)."""


@token.command()
@click.option("--tenant", metavar="NAME", help="For clients of this tenant.")
@click.option("--role", type=click.Choice(["read", "write", "admin"]), help="What it allows a tenant.  [default: write]")
@click.option(
    "--node", metavar="NAME", is_flag=False, flag_value=ANY_NAME, help="For the node of this name to join; for any without a name."
)
@click.option(
    "--instance", metavar="NAME", is_flag=False, flag_value=ANY_NAME, help="For the engine of this name to report; for any without a name."
)
@click.option("--admin", metavar="NAME", help="For an operator, who belongs to no tenant.")
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="The day at whose beginning (UTC) it ends.")
@json_option
def new(
    tenant: str | None, role: str | None, node: str | None, instance: str | None, admin: str | None, expires: datetime | None, as_json: bool
) -> None:
    """Print a new token, and what to add to the masters' tokens file: its digest only. Nobody can tell you the token again."""
    chosen = {"tenants": tenant, "nodes": node, "instances": instance, "admins": admin}
    [(section, name), *others] = [(section, name) for section, name in chosen.items() if name is not None] or [("", "")]
    if not section or others:
        raise InvalidArgument("say for whom the token is, by one of --tenant, --node, --instance and --admin")
    if role is not None and section != "tenants":
        raise InvalidArgument("--role is of a tenant's token: the others have one each")
    if expires is not None and expires.replace(tzinfo=UTC) <= datetime.now(UTC):
        raise InvalidArgument(f"--expires {expires:%Y-%m-%d} is over: no master would take the token")
    made = secrets.token_urlsafe(TOKEN_BYTES)
    facts = {"sha256": json.dumps(digest_of(made).hex())}
    if section == "tenants":
        facts["role"] = json.dumps(role or "write")
    if expires is not None:
        facts["expires"] = f"{expires:%Y-%m-%d}"
    entry = f"[[{section}.{json.dumps(name)}]]\n" + "".join(f"{key} = {value}\n" for key, value in facts.items())
    if as_json:
        echo_json({"token": made, "toml": entry})
        return
    click.echo(f"token: {made}\n\nAdd to the tokens file of the masters, which take it up by themselves:\n\n{entry}", nl=False)
