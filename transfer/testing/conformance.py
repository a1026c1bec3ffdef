"""What every connection and every transfer agent must do, as test classes to inherit. Needs the `dev` extra (pytest).

    class TestMyConnection(ConnectionConformance):
        connection_class = MyConnection
        rail = Rail(address="127.0.0.1")

    class TestMyAgent(AgentConformance):
        def make_agent(self, name: str) -> TransferAgent:
            return MyAgent(name, Rail())

They use nothing but the interfaces of streams/connection.py and agent.py; what only one transport does belongs into that transport's own
tests.
"""

from kvstore.transfer.testing.agents import AgentConformance
from kvstore.transfer.testing.connections import ConnectionConformance

__all__ = ["AgentConformance", "ConnectionConformance"]
