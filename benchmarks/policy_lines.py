"""The lines of code of the scaling policy, now and before it learnt.

    python benchmarks/policy_lines.py

prints one JSON object and writes it to results/policy_lines.json. Blank lines, comments and
docstrings do not count, nor do the service model and the collection of samples, which other parts
use as well. Needs only the standard library and git.
"""

import ast
import io
import json
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "policy_lines.json"
FOLDER = "mars_ray/autoscale"
BEFORE = "5855e8b"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# As they are called now, and as they were called in BEFORE.
_OTHERS = ("__init__", "sample", "service_model", "service_model_fit", "step_size")


def main() -> None:
    """Print and write both counts."""
    result = {"before": lines_at(BEFORE), "after": lines_at("HEAD"), "before_commit": BEFORE}
    text = json.dumps(result, indent=1) + "\n"
    RESULT.write_text(text)
    print(text, end="")


def lines_at(commit: str) -> int:
    """Lines of code of the policy's files in a commit."""
    names = _git("ls-tree", "--name-only", commit, f"{FOLDER}/").split()
    files = [name for name in names if name.endswith(".py") and Path(name).stem not in _OTHERS]
    return sum(code_lines(_git("show", f"{commit}:{name}")) for name in files)


def code_lines(text: str) -> int:
    """Lines that hold code."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is a docstring.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
