"""How much memory this machine has left."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_on_node(cgroup: Path = _CGROUP) -> float:
    """Bytes that this machine, or the container that this process is in, has left."""
    free = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((cgroup / "memory.current").read_text())
        # The kernel's cache of files counts as used, and gives way to whoever needs memory.
        used -= _numbers(cgroup / "memory.stat")["inactive_file"]
        free = min(free, int(text) - used)
    return float(free)


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines}
