"""The size of the code and its pages, and how the code changed since an earlier commit.

    python benchmarks/code_size.py [BEFORE]

compares BEFORE (default: the last commit of the old layout) with HEAD, prints one JSON object and
writes it to results/code_size.json. Uncommitted changes do not count. Needs only the standard
library and git.

Lines are all lines of Python files, blank ones and comments included. `git diff --numstat
--find-renames --find-copies` says which file came from which, and how many lines were inserted and
deleted. A file counts on both sides for the part of the tree where it is now: a move from one part
to another is neither a loss nor a gain. For each part:

moved      lines of files that have another path now and the same content
rewritten  deleted lines that inserted lines anywhere in the part make up for; includes lines that
           went to another file of the part
deleted    deleted lines that no inserted line makes up for: lines_before less lines
"""

import ast
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "code_size.json"
BEFORE = "4c74c46"
# The first match counts. The simulator has been in several places.
PARTS = {
    "simulator": (
        "mars_ray/simulator/",
        "mars_ray/scaling/simulate/",
        "mars_ray/scaling/baselines/",
        "mars_ray/scaling/traces/",
        "mars_ray/config/simulate.py",
        "mars_ray/config/traces.py",
    ),
    "mars_ray": ("mars_ray/",),
    "benchmarks": ("benchmarks/",),
    "tools": ("tools/",),
    "tests": ("tests/",),
}

# Tables that render.py writes into a page.
GENERATED = re.compile(r"<!-- results:(\w+) -->.*?<!-- /results:\1 -->", re.DOTALL)
# The first is no page; the others are generated.
UNCOUNTED = ("log.md", "inside/faults.md", "reference/support-matrix.md")
UNCOUNTED += ("reference/commands.md", "reference/configuration.md")


class Change(NamedTuple):
    """The change of one file: lines inserted and deleted, and its path on each side."""

    before: str
    after: str
    inserted: int
    removed: int


def main() -> None:
    """Print and write the comparison as one JSON object."""
    before = git("rev-parse", sys.argv[1] if len(sys.argv) > 1 else BEFORE).strip()
    changes = parse_changes(git("diff", "--numstat", "-z", "-M", "-C", before, "HEAD"))
    result = {
        "parts": compare(sizes(before), sizes("HEAD"), changes),
        "package": package(ROOT / "mars_ray"),
        "pages": pages(ROOT),
        "provenance": {
            "before": before[:12],
            "commit": git("rev-parse", "HEAD").strip()[:12],
            "git": git("--version").split()[2],
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def compare(
    before: dict[str, int], after: dict[str, int], changes: list[Change]
) -> dict[str, dict[str, int]]:
    """Number of files, lines and changed lines, by part. `before` and `after` are lines by path."""
    successor = {c.before: c.after for c in changes if c.before not in after}
    parts = {}
    for part in PARTS:
        old = {path for path in before if part_of(successor.get(path, path)) == part}
        new = {path for path in after if part_of(path) == part}
        lines_before, lines = sum(before[path] for path in old), sum(after[path] for path in new)
        mine = [change for change in changes if part_of(change.after) == part]
        moved = [c for c in mine if c.before != c.after and not c.inserted and not c.removed]
        parts[part] = {
            "files_before": len(old),
            "files": len(new),
            "lines_before": lines_before,
            "lines": lines,
            "moved": sum(before[c.before] for c in moved if c.before in old),
            "rewritten": min(sum(c.removed for c in mine), sum(c.inserted for c in mine)),
            "deleted": max(0, lines_before - lines),
        }
    return parts


def package(directory: Path) -> dict[str, int]:
    """Files, lines, functions and classes of the whole package, methods and local ones included."""
    texts = [path.read_text() for path in directory.rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "functions": sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in nodes),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
    }


def pages(root: Path) -> dict[str, int]:
    """Words of the documentation without the log and what scripts write, and the README's lines."""
    written = {*(root / "docs").rglob("*.md")} - {root / "docs" / name for name in UNCOUNTED}
    return {
        "docs_words": sum(len(GENERATED.sub("", page.read_text()).split()) for page in written),
        "readme_lines": len((root / "README.md").read_text().splitlines()),
    }


def part_of(path: str) -> str | None:
    """The part of the tree that a Python file belongs to; None for every other file."""
    if not path.endswith(".py"):
        return None
    return next((part for part, places in PARTS.items() if path.startswith(places)), None)


def parse_changes(numstat: str) -> list[Change]:
    """Parse `git diff --numstat -z`: two paths follow the line of a renamed or copied file."""
    changes, fields = [], iter(numstat.split("\0")[:-1])
    for field in fields:
        inserted, removed, path = field.split("\t")
        before, after = (path, path) if path else (next(fields), next(fields))
        if inserted != "-":  # "-": a binary file
            changes.append(Change(before, after, int(inserted), int(removed)))
    return changes


def sizes(commit: str) -> dict[str, int]:
    """Lines of every Python file of a commit that belongs to a part."""
    empty = git("hash-object", "-t", "tree", "/dev/null").strip()
    whole = parse_changes(git("diff", "--numstat", "-z", empty, commit))
    return {change.after: change.inserted for change in whole if part_of(change.after)}


def git(*words: str) -> str:
    """The output of a git command. Raises CalledProcessError if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
