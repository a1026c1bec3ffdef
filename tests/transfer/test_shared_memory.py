"""Shared memory is an agent."""

from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.conformance import AgentConformance
from kvstore.transfer.shared_memory import SharedMemoryAgent


class TestSharedMemory(AgentConformance):
    fences_closed_regions = False

    def make_agent(self, name: str) -> TransferAgent:
        return SharedMemoryAgent(name, Rail(), TransferSettings())
