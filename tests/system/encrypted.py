"""A cluster in which every connection over TCP is mutual TLS, for tests of several files."""

from dataclasses import replace
from pathlib import Path

from kvstore.client.config import ClientSettings
from kvstore.security.tls.config import ServerTlsSettings
from tests.security.tls.certified import Cluster, flags, given_to
from tests.system.running import System


class Encrypted:
    """A master and nodes with certificates of one authority, and settings of clients that have one, too."""

    def __init__(self, folder: Path, system: System, *master_flags: str) -> None:
        self.authority = Cluster(folder / "certs")
        self.system = system
        self.of_master = self.authority.master()
        self.of_nodes: dict[str, ServerTlsSettings] = {}
        system.start_master(0, *flags(self.of_master), *master_flags)
        system.settings = self.client("*")

    def node(self, name: str, *more: str) -> None:
        self.of_nodes[name] = self.authority.node(name)
        self.system.start_node(name, "--dram", "96MiB", *flags(self.of_nodes[name]), *more)

    def client(self, tenant: str = "") -> ClientSettings:
        return given_to(replace(self.system.settings, tenant=tenant if tenant != "*" else ""), self.authority.client(tenant))


def environment(settings: ClientSettings) -> dict[str, str]:
    """By which the command line has the same certificates."""
    return {f"KVSTORE_CLIENT_{name.upper()}": getattr(settings, name) for name in ("tls_ca", "tls_cert", "tls_key")}
