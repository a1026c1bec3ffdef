"""Translation of OpenSSL's errors into one typed error with a remedy."""

import ssl
from typing import Final

from kvstore.protocol.errors import Untrusted

VERIFY: Final = {
    9: "is not valid yet: compare the clocks of both hosts",
    10: "has expired: make a new one, which is read without a restart",
    18: "is signed by itself, not by an authority in tls_ca",
    19: "is signed by an authority that is not in tls_ca",
    20: "is signed by an authority that is not in tls_ca",
    21: "is signed by an authority that is not in tls_ca",
    26: "is not meant for this end of a connection (its extended key usage): make one for its role",
    62: "is for other hosts: make one that names the host by which it is reached, or reach it by a name that it has",
    64: "is for other addresses: make one that names the address by which it is reached, or reach it by a name that it has",
}
"""Text by X509_V_ERR_*: the problem of the peer's certificate."""
ALERTS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "{peer} requires a certificate: set tls_cert and tls_key",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "{peer} has no certificate, and tls_require_client_cert is set: set its tls_cert and tls_key",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "{peer} reports that this side's certificate has expired: make a new one",
    "TLSV1_ALERT_UNKNOWN_CA": "{peer} does not know the authority of this side's certificate: both need one tls_ca",
    "SSLV3_ALERT_BAD_CERTIFICATE": "{peer} does not accept this side's certificate: make one for this side's role",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "{peer} does not accept this side's certificate: make one for this side's role",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "{peer} does not accept this side's certificate for this end: make one for this side's role",
    "TLSV1_ALERT_PROTOCOL_VERSION": "{peer} speaks no version of TLS that this side speaks: TLS 1.3 is needed",
    "UNSUPPORTED_PROTOCOL": "{peer} speaks no version of TLS that this side speaks: TLS 1.3 is needed",
    "WRONG_VERSION_NUMBER": "{peer} does not speak TLS: give it tls_cert and tls_key, or leave tls_ca out on this side",
}
"""Text by OpenSSL's reason: an alert of the peer, or bytes that are not TLS."""


def tls_error(error: ssl.SSLError, peer: str) -> Untrusted:
    """Return the typed error. `peer`: name of the other end, for the text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = VERIFY.get(error.verify_code, f"is not accepted: {error.verify_message}")
        return Untrusted(f"the certificate of {peer} {problem}")
    text = ALERTS.get(error.reason or "", "no TLS with {peer}: {reason}")
    return Untrusted(text.format(peer=peer, reason=(error.reason or str(error)).lower().replace("_", " ")))


def not_tls_error(peer: str) -> Untrusted:
    """Return the error for a peer whose first byte is not of a TLS handshake."""
    return Untrusted(f"this port requires TLS, and {peer} does not use it: set its tls_ca to the authority of this port's certificate")
