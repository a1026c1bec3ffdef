"""The example of docs/transfer.md is a transport: it passes the suite that every connection passes, and engines use it by its name."""

from docs.examples.unix_transport import UnixSocket
from kvstore.testing.transfer.connections import ConnectionConformance
from kvstore.transfer import Span, TransferEngine
from kvstore.transfer.config import TransferSettings

NAME = "docs.examples.unix_transport:UnixSocket"
SIZE = 3 << 20


class TestUnixSocket(ConnectionConformance):
    connection_class = UnixSocket


def test_two_engines_move_bytes_over_it_and_nothing_else() -> None:
    settings = TransferSettings(transports=NAME, rails="lo")
    with TransferEngine("owner", settings) as owner, TransferEngine("user", settings) as user:
        theirs, ours = owner.allocate(SIZE), user.allocate(SIZE)
        theirs.memory[:] = bytes(range(256)) * (SIZE // 256)
        peer = user.connect(owner.describe())
        region = user.import_region(peer, owner.export(theirs, writable=True))
        user.transfer([(region, ours, SIZE)])
        assert ours.memory == theirs.memory
        user.transfer([(Span(ours, 1), region, SIZE - 1)])
        assert theirs.memory[: SIZE - 1] == ours.memory[1:]
        assert {path.transport for path, state in peer.chooser.states.items() if state.delivered_slices} == {UnixSocket.transport}
        ours.close()
        theirs.close()
