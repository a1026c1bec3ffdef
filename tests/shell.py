"""`kvstore` for scripts of a shell: each command is a process forked from the template (forked.py), which has loaded its modules.

The folder, environment and standard streams are those of the calling shell, and the exit status is passed on.
"""

import contextlib
import json
import os
import shlex
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.forked import COMMAND, Request, template

_ASK: Final = Path(__file__).with_name("ask.py")
_MAX_BYTES: Final = 1 << 20


@contextlib.contextmanager
def functions() -> Iterator[str]:
    """A line of a script in which `kvstore` is defined, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        place = f"{folder}/asked"
        listener.bind(place)
        listener.listen()
        answering = threading.Thread(target=_answer, args=(listener,), name="shell")
        answering.start()
        try:
            ask = shlex.join([sys.executable, "-I", "-S", str(_ASK), place, COMMAND])
            yield f'kvstore() {{ {ask} "$@"; }}\n'
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`; to close it would not
            answering.join()


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            asking, _ = listener.accept()
        except OSError:
            return
        with asking:
            text, descriptors, _flags, _place = socket.recv_fds(asking, _MAX_BYTES, 3)
            while more := asking.recv(_MAX_BYTES):
                text += more
            template(()).fork(Request(**json.loads(text)), [*descriptors, asking.fileno()])
            for descriptor in descriptors:
                os.close(descriptor)
