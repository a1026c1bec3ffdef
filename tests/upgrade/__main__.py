"""`python -m tests.upgrade`: this release beside the last tagged one; one line, and exit status 0, while there is no tag."""

import subprocess
import sys

from tests.upgrade.former_release import NO_RELEASE, ROOT, last_tag


def main() -> int:
    if last_tag() is None:
        print(NO_RELEASE)
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/upgrade"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
