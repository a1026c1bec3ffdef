"""What a shell runs for a command that another process does (shell.py): python -I -S ask.py SOCKET MODULE ARGUMENT...

It imports little, for it is what is left of the time that a command takes to start.
"""

import json
import os
import socket
import sys


def main() -> int:
    """The status of the command; as a shell has it, of one that a signal ended: 128 and the number of the signal."""
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
