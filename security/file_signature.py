"""Whether a file has been written or replaced since it was looked at."""

import os


def signature(path: str) -> tuple[int, ...]:
    """Differs after a file was written or replaced; () for none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
