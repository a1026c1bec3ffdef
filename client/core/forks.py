"""Whether this is still the process in which something was made: a forked child has all that its parent has, and must not use it.

To ask the kernel for the process's number takes as long as a tenth of a read in shared memory, so children are counted when they begin.
"""

import os


class ForkGeneration:
    """`number` rises in each child that is forked off: what was made under another one is an ancestor's."""

    number = 0


def _forked() -> None:
    ForkGeneration.number += 1


os.register_at_fork(after_in_child=_forked)
