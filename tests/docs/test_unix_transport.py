"""The example of docs/transfer.md is a transport: it passes the suite that every connection passes."""

from docs.examples.unix_transport import UnixConnection
from kvstore.transfer.conformance import ConnectionConformance


class TestUnixConnection(ConnectionConformance):
    connection_class = UnixConnection
