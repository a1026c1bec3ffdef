"""The commands `certs init`, `certs master`, `certs node` and `certs client`: a test certificate authority and its certificates."""

from pathlib import Path
from typing import Any, Final

import click

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.extras import install_line
from kvstore.security.tls.subjects import ANY, CLIENT, MASTER, NODE, CertificateSubject

FOLDER: Final = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
DAYS: Final = click.option("--days", type=click.FloatRange(0.001, 3650), default=90.0, show_default=True, help="Validity in days.")
HOST: Final = click.option(
    "--host", "hosts", multiple=True, required=True, help="Host name or address of the daemon; may be given several times."
)


@click.group(short_help="Create a certificate authority and certificates to try TLS.")
def certs() -> None:
    """Create a certificate authority and certificates to try TLS.

    In production use your own authority; docs/security.md lists the required fields of a certificate. Key files are readable by their
    owner only. Existing files are not overwritten.
    """


@certs.command(short_help="Create a certificate authority.")
@FOLDER
def init(folder: Path) -> None:
    """Create a certificate authority in FOLDER: ca.pem, the tls_ca of all daemons and clients, and ca.key, which must stay secret.

    ca.key can sign a certificate for any identity of the cluster.
    """
    _authority().make_authority(folder)
    click.echo(f"made {folder}/ca.pem, the tls_ca of all daemons and clients, and {folder}/ca.key: keep it here and secret")


@certs.command(short_help="A certificate for a master.")
@FOLDER
@HOST
@DAYS
def master(folder: Path, hosts: tuple[str, ...], days: float) -> None:
    """Create FOLDER/master-HOST.pem and .key, for a master that is reachable at each --host."""
    _issue(folder, f"master-{hosts[0]}", CertificateSubject(MASTER), hosts, days)


@certs.command(short_help="A certificate for a storage node.")
@FOLDER
@click.argument("name")
@HOST
@DAYS
def node(folder: Path, name: str, hosts: tuple[str, ...], days: float) -> None:
    """Create FOLDER/node-NAME.pem and .key, for the node with that --name ("*": any name), which is reachable at each --host."""
    _issue(folder, f"node-{name}", CertificateSubject(NODE, name), hosts, days)


@certs.command(short_help="A certificate for clients of a tenant.")
@FOLDER
@click.argument("tenant", default="")
@click.option("--host", "hosts", multiple=True, help="Host name or address of an engine that takes part in hand-overs.")
@DAYS
def client(folder: Path, tenant: str, hosts: tuple[str, ...], days: float) -> None:
    """Create FOLDER/client-TENANT.pem and .key, for clients of TENANT.

    Without TENANT the certificate is for clients of no tenant; with "*" it is an operator's, for all tenants.
    """
    _issue(folder, f"client-{tenant}" if tenant else "client", CertificateSubject(CLIENT, tenant), hosts, days)


def _issue(folder: Path, file: str, subject: CertificateSubject, hosts: tuple[str, ...], days: float) -> None:
    authority = _authority()
    safe = file.replace(ANY, "any")
    if "/" in safe or "\0" in safe:
        raise InvalidArgument(f"{file!r} is not a file name in {folder}: names must not contain / or a null byte")
    cert, key = authority.issue(folder, safe, [subject], hosts, valid=authority.ValidityPeriod.from_now(days))
    click.echo(f"made {cert} and {key}, for {subject.uri()}{': ' if hosts else ''}{', '.join(hosts)}, for {days:g} days")


def _authority() -> Any:
    try:
        from kvstore.security.tls import authority
    except ImportError:
        raise ConfigError(f"`kvstore certs` needs the package cryptography: {install_line('certs')}") from None
    return authority
