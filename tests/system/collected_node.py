"""kvstore-node, as collected.py says."""

from tests import tuned_node
from tests.system import collected


def main() -> None:
    collected.tells()
    tuned_node.main()


if __name__ == "__main__":
    main()
