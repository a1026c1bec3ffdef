"""Client of shell.py, which a shell runs in place of a command: python -I -S ask.py SOCKET MODULE ARGUMENT...

It imports little, so that it starts fast.
"""

import json
import os
import socket
import sys


def main() -> int:
    """Run the command in the other process and return its status; 128 plus the signal's number after a signal."""
    place, module, *arguments = sys.argv[1:]
    request = {"module": module, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(place)
        socket.send_fds(sock, [b" "], [0, 1, 2])
        sock.sendall(json.dumps(request).encode())
        sock.shutdown(socket.SHUT_WR)
        status = int(sock.recv(16))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
