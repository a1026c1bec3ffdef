"""kvstore-node with times and sizes that no operator sets: `--put-ttl-s 1` is NodeTuning.put_ttl_s. The rest is the real node."""

import sys
from dataclasses import fields, replace
from typing import Any

from kvstore.protocol.settings import parse_size
from kvstore.store import daemon
from kvstore.store.tuning import TUNING, NodeTuning


def tune(arguments: list[str]) -> list[str]:
    """Have the node that this process is about to run go by the flags that are a NodeTuning's; the other ones."""
    kinds = {f"--{field.name.replace('_', '-')}": field for field in fields(NodeTuning)}
    found: dict[str, Any] = {}
    left: list[str] = []
    given = iter(arguments)
    for flag in given:
        if flag in kinds:
            field = kinds[flag]
            found[field.name] = float(next(given)) if field.type is float else parse_size(next(given))
        else:
            left.append(flag)
    setattr(daemon, "TUNING", replace(TUNING, **found))  # noqa: B010 - a constant
    return left


def main() -> None:
    sys.argv[1:] = tune(sys.argv[1:])
    daemon.main()


if __name__ == "__main__":
    main()
