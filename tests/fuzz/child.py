"""One target under atheris, in a process of its own, which its fuzzer ends: python -m tests.fuzz.child TARGET
LIBFUZZER-ARGUMENT...
"""

import sys

import atheris


def main() -> None:
    with atheris.instrument_imports(include=["kvstore", "tests.fuzz.targets"]):
        from tests.fuzz.targets import TARGETS, check
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: check(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
