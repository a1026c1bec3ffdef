"""Mooncake's own tests are run from a checkout of it that MOONCAKE_SRC names; without one they are not collected."""

import os

collect_ignore = [] if os.environ.get("MOONCAKE_SRC") else ["test_own_tests.py"]
