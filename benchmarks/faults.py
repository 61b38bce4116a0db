"""Inputs that failed, with the tests that hold what is right: `faults.toml` as a result and a page.

    python benchmarks/faults.py

writes results/faults.json and docs/inside/faults.md. Needs only the standard library.
"""

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "inside" / "faults.md"
HEAD = """# Inputs that failed

Kinds of faults that users of comparable systems report, looked for here with the other members of
each kind: what each input did, what it does now, and the tests that hold it. Written by
`benchmarks/faults.py` from `benchmarks/faults.toml`.
"""


def collected() -> dict[str, Any]:
    """The kinds with their members. Raises KeyError if one lacks a part."""
    kinds = tomllib.loads((ROOT / "benchmarks" / "faults.toml").read_text())["kind"]
    members = [member for kind in kinds for member in kind["member"]]
    tests = {test for member in members for test in member["tests"]}
    counts = {"kinds": len(kinds), "members": len(members), "tests": len(tests)}
    return {"counts": counts, "kinds": [_kind(kind) for kind in kinds]}


def _kind(kind: dict[str, Any]) -> dict[str, Any]:
    parts = ("input", "before", "now", "tests")
    members = [{part: member[part] for part in parts} for member in kind["member"]]
    return {name: kind[name] for name in ("number", "title", "met")} | {"members": members}


def unknown(result: dict[str, Any]) -> list[str]:
    """Tests that are named and not there."""
    members = [member for kind in result["kinds"] for member in kind["members"]]
    named = {test for member in members for test in member["tests"]}
    return sorted(test for test in named if not _exists(*test.split("::")))


def _exists(path: str, name: str) -> bool:
    file = ROOT / path
    body = ast.parse(file.read_text()).body if file.is_file() else []
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in body)


def page(result: dict[str, Any]) -> str:
    """The result as a page."""
    counts = result["counts"]
    told = [f"{count} {name}" for name, count in counts.items()]
    lines = [HEAD, f"{', '.join(told)}."]
    for kind in result["kinds"]:
        lines += ["", f"## {kind['number']}. {kind['title']}", ""]
        lines += [f"Reported in {', '.join(kind['met'])}.", ""] if kind["met"] else []
        lines += ["| input | before | now | tests |", "|---|---|---|---|"]
        for member in kind["members"]:
            tests = ", ".join(f"`{test.partition('::')[2]}`" for test in member["tests"])
            cells = (member["input"], member["before"], member["now"], tests)
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = collected()
    if missing := unknown(found):
        raise SystemExit(f"no such tests: {', '.join(missing)}")
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))
    print(json.dumps(found["counts"]))
