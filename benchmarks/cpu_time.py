"""CPU time of other processes of this host."""

from pathlib import Path


def cpu_ns(pid: int) -> int:
    """CPU time of all threads that the process has now, in ns. /proc/PID/stat counts ticks of 10 ms, the cost of a hundred small calls."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
