"""The example of docs/transfer.md is a transport: it passes the suite that every connection passes, and engines use it by its name."""

import ast
import io
import tokenize
from pathlib import Path

from docs.examples import unix_transport
from docs.examples.unix_transport import UnixSocket
from kvstore.transfer import Span, TransferEngine
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.testing.connections import ConnectionConformance

NAME = "docs.examples.unix_transport:UnixSocket"
SOURCE = Path(unix_transport.__file__).read_text(encoding="utf-8")
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


def test_it_has_at_most_60_lines_of_code() -> None:
    docstrings = {
        line
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(SOURCE).readline)
    assert len({token.start[0] for token in tokens if token.type not in ignored} - docstrings) <= 60
