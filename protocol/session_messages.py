"""Messages of every connection: the handshake, and responses that several requests share."""

from typing import Final

from kvstore.protocol.message import U8, U32, U64, CountedU8s, Message, Text, message

ROLE_CLIENT: Final = 1
ROLE_NODE: Final = 2

SERVER_MASTER: Final = 1
SERVER_NODE: Final = 2


@message
class Hello(Message):
    """First message of every connection: role and credentials of its sender.

    - `epoch`: a node's registration epoch; 0 for clients and unregistered nodes. An unregistered node only gets the
      master's control address, and sends Hello again on the same connection after it has registered. To another node,
      whose blocks of `tenant` it reads, a node sends the epoch of their common master.
    - `token` is for masters. A node takes a ticket (security/tickets/ticket.py), from another node a pass.
    - `partition`: to a master, the partition of the connection (partitions.py); between nodes, the one whose master
      sent the CopyBlocks.
    """

    TYPE = 1
    role: U8
    tenant: Text = ""
    token: Text = ""
    name: Text = ""
    epoch: U64 = 0
    ticket: CountedU8s = b""
    partition: U8 = 0


@message
class Welcome(Message):
    """Answer to Hello: identity and other addresses of the server.

    - `unix`: a socket path, usable by processes for which it is the file that `host_id` identifies
      (rpc.address.socket_id: boot id, device, inode). Clients compare name and `host_id` with the intended server.
    - `control`: a master's gRPC address.
    - `owner`: from a follower, where the partition's owner listens for frames (HOST:PORT); "" from the owner or a node.
    - `partitions`: number of partitions, from a master.
    """

    TYPE = 2
    server: U8
    name: Text
    node_id: U32 = 0
    epoch: U64 = 0
    host_id: Text = ""
    unix: Text = ""
    control: Text = ""
    owner: Text = ""
    partitions: U8 = 1


@message
class Failure(Message):
    """The request failed with one typed error and had no effect, unless its documentation says otherwise."""

    TYPE = 3
    code: U32
    text: Text


@message
class Ok(Message):
    """The request succeeded."""

    TYPE = 4


@message
class Flags(Message):
    """One byte a key (or put) of the request, 1 for yes."""

    TYPE = 5
    flags: CountedU8s


@message
class Trace(Message):
    """Trace of the next request, as a W3C traceparent (protocol/traceparent.py). Has no answer.

    A request on behalf of several others has one Trace for each: the first names its parent, the others its links.
    Trace goes only ahead of sampled requests, to a peer whose Welcome (frames.ACCEPTS_TRACES) or registration
    (`accepts_traces`) allows it. A malformed one is ignored.
    """

    TYPE = 7
    traceparent: Text


@message
class Count(Message):
    """A number."""

    TYPE = 6
    value: U64
