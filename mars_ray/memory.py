"""Free memory of this machine."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_on_node(cgroup: Path = _CGROUP) -> float:
    """Free bytes of this machine, or of the container that this process is in."""
    free = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((cgroup / "memory.current").read_text())
        # The kernel's file cache counts as used, but is freed when memory is needed.
        used -= _numbers(cgroup / "memory.stat")["inactive_file"]
        free = min(free, int(text) - used)
    return float(free)


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines}
