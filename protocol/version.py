"""Release of kvstore. pyproject.toml reads it from here: looking up the installed distribution takes 5 % of a daemon's
start.
"""

from typing import Final

VERSION: Final = "0.1.0"
