"""kvstore-node, as collected.py says."""

from kvstore.store import daemon
from tests.system import collected


def main() -> None:
    collected.tells()
    daemon.main()


if __name__ == "__main__":
    main()
