"""docs/operate/troubleshooting.md speaks of messages that the code really has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Not messages of ours, and said to be so.
OTHERS = {
    "a GPU runs out of memory",
    "429, 408 and 503",
    "Authentication required",
    "No available agent to submit job",
    "a job waits for ever",
    "replicas that have taken more than 30s to be scheduled",
}


def messages() -> list[str]:
    """Every text of the code, with … where it has a variable."""
    return [
        _text(node)
        for path in (ROOT / "mars_ray").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def test_every_heading_is_a_message():
    """Guards a page that explains what nobody will ever see."""
    text = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
    headings = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert headings >= OTHERS
    known = messages()
    for heading in headings - OTHERS:
        # A variable may be the end of what is quoted.
        wanted = re.compile(r"\s*".join(map(re.escape, heading.split())))
        assert any(wanted.search(message) for message in known), heading
