"""Messages of every connection: who is there, and the answers that several kinds of request share."""

from typing import Final

from kvstore.protocol.message import U8, U32, U64, CountedU8s, Message, Text, message

ROLE_CLIENT: Final = 1
ROLE_NODE: Final = 2

SERVER_MASTER: Final = 1
SERVER_NODE: Final = 2


@message
class Hello(Message):
    """First message of every connection: who asks. `epoch` is a node's registration epoch.

    It is 0 for clients, and for a node that is not registered yet: such a node only learns the master's control address, and says
    Hello again on the same connection once it is. To another node, whose blocks of `tenant` it is to read, a node says the epoch of
    the master that both obey. The token is for masters; a node is shown a ticket (security/tickets/ticket.py), of another node a pass.
    `partition` is the part of the key space that the connection to a master is about (partitions.py); of a node that speaks to another one
    it is the part whose master ordered what is to be read.
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
    """Answer to Hello: who answers, and where else it can be reached.

    `unix` is a socket path, usable by processes for which it is the socket file that `host_id` tells of (rpc.address.socket_id: its host's
    boot id, its device and inode); `control` is a master's gRPC address. Name and `host_id` together tell whether this is who was meant.
    `owner` is where the master that owns the partition asked for listens for frames (HOST:PORT), from one that stands by; "" from the
    owner, or a node. `partitions` is how many parts the cluster's key space has, from a master."""

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
    """The request failed with one typed error; nothing of it took effect unless its documentation says so."""

    TYPE = 3
    code: U32
    text: Text


@message
class Ok(Message):
    """Done, with nothing more to say."""

    TYPE = 4


@message
class Flags(Message):
    """One byte a key (or put) of the request, 1 for yes."""

    TYPE = 5
    flags: CountedU8s


@message
class Trace(Message):
    """Ahead of a request: the trace that it belongs to, as a W3C traceparent (protocol/traceparent.py). Has no answer.

    Ahead of a request that is for several there is one for each: the first names its parent, the others its links. It goes only to a peer
    whose Welcome says that it takes it (frames.TAKES_TRACES), or its registration (`takes_traces`), and only ahead of what is sampled. One
    that cannot be read is as none.
    """

    TYPE = 7
    traceparent: Text


@message
class Count(Message):
    TYPE = 6
    value: U64
