"""Processes that a test looks at, or kills, while others come and go."""

import psutil


def family(pid: int) -> list[psutil.Process]:
    """The processes below this one."""
    return psutil.Process(pid).children(recursive=True)


def titled(processes: list[psutil.Process], part: str) -> list[psutil.Process]:
    """Those of them with `part` in the command line."""
    return [process for process in processes if part in title(process)]


def title(process: psutil.Process) -> str:
    """Its command line; empty if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
