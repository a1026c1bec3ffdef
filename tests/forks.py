"""Calls made by a child that was forked from the test."""

import os
from collections.abc import Callable

from kvstore.protocol.errors import KVStoreError


def told_by_child(call: Callable[[], object]) -> str:
    """Run the call in a forked child; return the name of its error, or its result as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = str(call())
        except KVStoreError as error:
            found = type(error).__name__
        except BaseException as error:
            found = repr(error)
        os.write(writer, found.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told
