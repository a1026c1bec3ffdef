"""Tickets of clients, for tests that connect to nodes directly."""

from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline

TIMEOUT_S = 60.0


def node_table(master: str | Address, tenant: str, token: str) -> NodeTable:
    """Request the node table, with its tickets, from a master as this tenant."""
    deadline = Deadline(TIMEOUT_S)
    address = parse_address(master) if isinstance(master, str) else master
    channel = Channel.open(address, Hello(ROLE_CLIENT, tenant, token), deadline)
    try:
        return channel.call(Nodes(), NodeTable, deadline)
    finally:
        channel.close()


def hello_to_node(master: str | Address, tenant: str, token: str, *, node: str = "") -> Hello:
    """Return the tenant's Hello for the node of this name, or for the first node."""
    table = node_table(master, tenant, token)
    return Hello(ROLE_CLIENT, tenant, ticket=table.tickets[list(table.names).index(node) if node else 0])
