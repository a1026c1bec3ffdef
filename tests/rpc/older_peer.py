"""A daemon of the release before: it reads no frame of a later version, and answers a Hello by the Welcome it knows."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import HEADER_BYTES, OLDEST_VERSION, pack_header, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import SERVER_NODE, Failure, Welcome
from kvstore.rpc.address import Address
from tests.rpc.wires import read_exactly


@contextmanager
def older_peer(version: int = OLDEST_VERSION) -> Iterator[tuple[Address, list[int]]]:
    """Its address, and the versions of the frames that came, one a connection."""
    came: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=_serve, args=(listener, version, came))
        serving.start()
        try:
            yield Address(*listener.getsockname()), came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


def _serve(listener: socket.socket, version: int, came: list[int]) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with closing(sock):
            header = unpack_header(read_exactly(sock, HEADER_BYTES))
            came.append(header.version)
            if header.version > version:
                sock.sendall(_frame(Failure(ProtocolError.code, f"this side speaks {version}"), 0, version))
            else:
                sock.sendall(_frame(Welcome(SERVER_NODE, "older"), header.request_id, version))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


def _frame(message: Message, request_id: int, version: int) -> bytes:
    body = message.pack_for(version)
    return pack_header(message.TYPE, request_id, len(body), version=version) + body
