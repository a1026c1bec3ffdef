"""What the other parts ran on, and what the first use of the device costs a process."""

import ctypes
import importlib.util
import platform
import time
from collections.abc import Iterator

from kvstore.cli.tools.bench import BenchRow


def rows() -> Iterator[BenchRow]:
    begun_s = time.perf_counter()
    import torch

    yield BenchRow(f"import of torch {torch.__version__}, Python {platform.python_version()}", time.perf_counter() - begun_s, "s")
    has_triton = importlib.util.find_spec("triton") is not None
    yield BenchRow(f"Triton {'' if has_triton else 'not '}installed", int(has_triton), "")
    if not torch.cuda.is_available():
        yield BenchRow("card: none, needs CUDA; the rest ran on the CPU device with small sizes", 0, "not run")
        return
    begun_s = time.perf_counter()
    torch.ones(1, device="cuda:0")
    torch.cuda.synchronize()
    yield BenchRow("first use of the device in a process", time.perf_counter() - begun_s, "s")
    card = torch.cuda.get_device_properties(0)
    about = f"{card.name}, driver {driver_version()}, CUDA {torch.version.cuda}, {card.multi_processor_count} SMs"
    yield BenchRow(f"card: {about}", card.total_memory / (1 << 30), "GiB")


def driver_version() -> str:
    """Version of NVIDIA's driver by NVML, or "unknown"."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
            return "unknown"
        return text.value.decode()
    except (OSError, AttributeError):
        return "unknown"
