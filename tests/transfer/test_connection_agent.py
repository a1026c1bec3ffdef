"""An agent over TCP connections."""

from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.conformance import AgentConformance
from kvstore.transfer.connection_agent import ConnectionAgent
from kvstore.transfer.tcp import TcpConnection


class TestTcpAgent(AgentConformance):
    def make_agent(self, name: str) -> TransferAgent:
        return ConnectionAgent(name, Rail(), TransferSettings(), TcpConnection)
