"""TCP is a Connection, and what only it does."""

from kvstore.transfer.agent import Rail
from kvstore.transfer.conformance import ConnectionConformance
from kvstore.transfer.tcp import TcpConnection


class TestTcp(ConnectionConformance):
    connection_class = TcpConnection
    rail = Rail(address="127.0.0.1")
