"""A node's certificates: it connects to masters and other nodes, and both and clients connect to it, so it is TLS for all or for none."""

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.certificates import Certificates
from kvstore.store.config import NodeSettings


def own_certificates(settings: NodeSettings) -> Certificates | None:
    """None: no TLS. Raises ConfigError: files that cannot be used, or only some of them named."""
    found = Certificates.of(settings)
    if found is not None and not (found.connects and found.serves):
        raise ConfigError("a node connects and is connected to: for TLS it needs tls_ca, tls_cert and tls_key, all three")
    return found
