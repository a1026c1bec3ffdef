"""Prepares an environment beside the interpreter's torch, and continues in it: see run.py. Standard library only.

python -m benchmarks.gpu [--wheels FOLDER] [PART...]
"""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.gpu.environment import prepare


def main() -> None:
    """Replace this process by run.py in the prepared environment."""
    parser = argparse.ArgumentParser(prog="make gpu")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install from, without an index")
    parser.add_argument("parts", nargs="*", help="parts to run; all by default")
    arguments = parser.parse_args()
    python, environment = prepare(arguments.wheels)
    sys.stdout.flush()
    os.execve(python, [python, "-m", "benchmarks.gpu.run", *arguments.parts], environment)


if __name__ == "__main__":
    main()
