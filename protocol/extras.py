"""How to install an optional part of kvstore: one line for every message that misses one.

The distribution is `kvstore-llm`; `kvstore` on the public index is another project. It is installed from a checkout.
"""

from typing import Final

DISTRIBUTION: Final = "kvstore-llm"


def install_line(extra: str) -> str:
    """The command that installs `extra` ("ucx", "hbm", ...: pyproject.toml), and where to run it."""
    return f"pip install '.[{extra}]' in the checkout of kvstore"
