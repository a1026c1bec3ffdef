"""The other end of a bare message: a Python process that waits in epoll, reads a message and replies with a few bytes.

Its time is the minimum of a put on this machine, for any store.
"""

import select
import socket
import sys

ANSWER = bytes(29)
"""As long as the answer to a put."""


def main() -> None:
    peer = socket.socket(fileno=int(sys.argv[1]))
    peer.setblocking(False)
    ready = select.epoll()
    ready.register(peer.fileno(), select.EPOLLIN)
    room = bytearray(1 << 16)
    while True:
        ready.poll()
        if not peer.recv_into(room):
            return
        peer.send(ANSWER)


if __name__ == "__main__":
    main()
