"""Runs a module in an engine's environment for a test (child.py): `run_child.py FILE FD ARGUMENT...`.

It makes the file's `Child(ARGUMENT...)`, writes `{}` to descriptor FD, and calls a method of it for each line of standard input, of which
it writes the result there as a line of JSON. When standard input ends it calls `end`.
"""

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # engines start processes that import this file
    file, descriptor, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(file).parent)
    with open(int(descriptor), "w", buffering=1) as out:
        child = importlib.import_module(Path(file).stem).Child(*arguments)
        print("{}", file=out)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(child, command.pop("do"))(**command)), file=out)
        child.end()
