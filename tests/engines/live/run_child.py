"""Runs a module in an engine's environment for a test (child.py): `run_child.py FILE FD ARGUMENT...`.

It creates the file's `Child(ARGUMENT...)` and writes `{}` to descriptor FD. For each line of standard input it calls a method of the
child and writes the result to FD as a line of JSON. At the end of standard input it calls `end`.
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
