"""Fork detection: a forked child inherits its parent's connections and mappings, and must not use them.

Children are counted by a fork hook; getpid would take a tenth of a shared-memory read.
"""

import os


class ForkGeneration:
    """`number` is incremented in each forked child: an object made under another number belongs to an ancestor."""

    number = 0


def _forked() -> None:
    ForkGeneration.number += 1


os.register_at_fork(after_in_child=_forked)
