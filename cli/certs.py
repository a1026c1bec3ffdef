"""The commands `certs init`, `certs master`, `certs node` and `certs client`: an authority and certificates to try TLS with."""

from pathlib import Path
from typing import Any, Final

import click

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.extras import install_line
from kvstore.security.tls.subjects import ANY, CLIENT, MASTER, NODE, CertificateSubject

FOLDER: Final = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
DAYS: Final = click.option("--days", type=click.FloatRange(0.001, 3650), default=90.0, show_default=True, help="How long it is valid.")
HOST: Final = click.option(
    "--host", "hosts", multiple=True, required=True, help="Name or address by which it is reached; may be given several times."
)


@click.group(short_help="Make an authority and certificates to try TLS with.")
def certs() -> None:
    """Make an authority and certificates to try TLS with.

    In production let an authority that you have sign them: docs/security.md says what must be in a certificate. Keys can be read by their
    owner only, and nothing is overwritten.
    """


@certs.command(short_help="Make an authority.")
@FOLDER
def init(folder: Path) -> None:
    """Make an authority in FOLDER: ca.pem, which everybody is given as tls_ca, and ca.key, which whoever has it can be anybody with."""
    _authority().make_authority(folder)
    click.echo(f"made {folder}/ca.pem, the tls_ca of all, and {folder}/ca.key, which stays here and secret")


@certs.command(short_help="A certificate for a master.")
@FOLDER
@HOST
@DAYS
def master(folder: Path, hosts: tuple[str, ...], days: float) -> None:
    """Make FOLDER/master-HOST.pem and .key, for a master that is reached by each --host."""
    _issue(folder, f"master-{hosts[0]}", CertificateSubject(MASTER), hosts, days)


@certs.command(short_help="A certificate for a storage node.")
@FOLDER
@click.argument("name")
@HOST
@DAYS
def node(folder: Path, name: str, hosts: tuple[str, ...], days: float) -> None:
    """Make FOLDER/node-NAME.pem and .key, for the node of that --name ("*": of any), which is reached by each --host."""
    _issue(folder, f"node-{name}", CertificateSubject(NODE, name), hosts, days)


@certs.command(short_help="A certificate for clients of a tenant.")
@FOLDER
@click.argument("tenant", default="")
@click.option("--host", "hosts", multiple=True, help="Of engines that hand caches over: where others reach them.")
@DAYS
def client(folder: Path, tenant: str, hosts: tuple[str, ...], days: float) -> None:
    """Make FOLDER/client-TENANT.pem and .key, for clients of TENANT: without one those of no tenant; with "*" an operator's, for all."""
    _issue(folder, f"client-{tenant}" if tenant else "client", CertificateSubject(CLIENT, tenant), hosts, days)


def _issue(folder: Path, file: str, subject: CertificateSubject, hosts: tuple[str, ...], days: float) -> None:
    authority = _authority()
    safe = file.replace(ANY, "any")
    if "/" in safe or "\0" in safe:
        raise InvalidArgument(f"{file!r} would be no file of {folder}: names of certificates have no /")
    cert, key = authority.issue(folder, safe, [subject], hosts, valid=authority.ValidityPeriod.from_now(days))
    click.echo(f"made {cert} and {key}, for {subject.uri()}{': ' if hosts else ''}{', '.join(hosts)}, for {days:g} days")


def _authority() -> Any:
    try:
        from kvstore.security.tls import authority
    except ImportError:
        raise ConfigError(f"`kvstore certs` needs the package cryptography: {install_line('certs')}") from None
    return authority
