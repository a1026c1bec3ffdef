"""kvstore-master, as collected.py says."""

from tests import tuned_master
from tests.system import collected


def main() -> None:
    collected.tells()
    tuned_master.main()


if __name__ == "__main__":
    main()
