"""What a program's own certificate is for: found by a handshake with itself, in memory, which shows as well that others will accept it."""

import ssl

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.refusals import refusal
from kvstore.security.tls.subjects import CertifiedPeer, names_of, peer_of


def own_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> CertifiedPeer:
    """`client` checks no host's name. Raises ConfigError: peers that trust the same authorities would refuse it, at either end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (near, far, near, far):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            raise ConfigError(f"tls_cert: {refusal(error, 'this program')}") from None
    found = near.getpeercert()
    assert found, "a context for clients lets in no server without a certificate"
    certified = peer_of(names_of(found))
    if not certified.subjects:
        raise ConfigError("tls_cert: it is for nothing of kvstore's, such as kvstore://node/NAME: make it with `kvstore certs`")
    return certified
