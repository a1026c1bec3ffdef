"""The real daemon with fail points, which the file in FAIL_POINTS_FILE arms."""

from tests import tuned_daemon
from tests.faults.fail_points import watch
from tests.faults.points import POINTS


def main() -> None:
    watch(POINTS)
    tuned_daemon.main()


if __name__ == "__main__":
    main()
