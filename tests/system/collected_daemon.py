"""A daemon, as collected.py says."""

from tests import tuned_daemon
from tests.system import collected


def main() -> None:
    collected.tells()
    tuned_daemon.main()


if __name__ == "__main__":
    main()
