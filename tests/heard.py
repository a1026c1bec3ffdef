"""Says what it hears, and whether it was forked: for test_forked.py."""

import json
import sys

from tests.forked import is_forked


def main() -> None:
    for line in sys.stdin:
        print(json.dumps([line.rstrip("\n"), is_forked()]), flush=True)
