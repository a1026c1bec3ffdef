"""Install commands of optional dependencies, for errors about a missing one.

The distribution is `kvstore-llm`, installed from a checkout; `kvstore` on the public index is another project.
"""

from importlib.util import find_spec
from typing import Final

from kvstore.protocol.errors import ConfigError

DISTRIBUTION: Final = "kvstore-llm"


def install_line(extra: str) -> str:
    """Return the command that installs `extra` ("ucx", "hbm", ...: pyproject.toml), and where to run it."""
    return f"pip install '.[{extra}]' in the checkout of kvstore"


def need(package: str, extra: str) -> None:
    """Raises ConfigError, with the command that installs `extra`, unless `package` can be imported."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed, and this needs it: {install_line(extra)}")
