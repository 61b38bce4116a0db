"""Lists in the documentation are complete."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "mars_ray" / "serve"


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def texts(path: Path) -> set[str]:
    """All texts of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def test_every_metric_is_described():
    files = ("replica/metrics.py", "ingress/metrics.py", "threshold_actor.py")
    said = set[str]().union(*(texts(SERVE / file) for file in files))
    made = {text for text in said if re.fullmatch(r"mars_\w+", text)}
    assert len(made) > 20
    described = re.findall(
        r"^\| `(mars_\w+)`", (ROOT / "docs/operate/monitoring.md").read_text(), re.MULTILINE
    )
    assert sorted(described) == sorted(made)


def codes() -> Iterator[str]:
    for path in SERVE.rglob("*.py"):
        for call in calls(path):
            given = [key.value for key in call.keywords if key.arg == "code"]
            # Of a refusal the fourth argument.
            if isinstance(call.func, ast.Name) and call.func.id == "ErrorInfo":
                given += call.args[3:4]
            yield from (str(value.value) for value in given if isinstance(value, ast.Constant))


def test_every_error_code_is_described():
    made = set(codes())
    assert {"replica_lost", "model_not_found"} <= made
    table = (
        (ROOT / "docs/reference/api.md")
        .read_text()
        .split("| status | `code` |")[1]
        .split("\n\n")[0]
    )
    assert set(re.findall(r"`([a-z_]+)`", table)) - {"timeout_s", "param"} == made
