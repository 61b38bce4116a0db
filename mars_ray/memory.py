"""How much memory this machine has left."""

from pathlib import Path


def free_on_node() -> float:
    """What this machine, or the container that this process is in, has left, bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return float(free)
