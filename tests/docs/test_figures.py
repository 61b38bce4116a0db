"""The figures of the docs, from committed results and the code that they show."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_figure_is_drawn(tmp_path):
    """Guards pictures that nothing makes any more."""
    script = str(ROOT / "benchmarks" / "figures.py")
    subprocess.run([sys.executable, script, "--output", str(tmp_path)], check=True, timeout=200)
    pages = [ROOT / "docs" / "start" / "concepts.md", ROOT / "docs" / "results.md"]
    text = "".join(page.read_text() for page in pages)
    shown = re.findall(r"!\[.+\]\((?:\.\./)?images/(.+\.svg)\)", text)
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    for name in shown:
        assert "</svg>" in (ROOT / "docs" / "images" / name).read_text()


def test_the_answer_shown_is_lossless():
    """What the page says of `verified` holds for its own example."""
    table = json.loads((ROOT / "benchmarks" / "results" / "answer_trace.json").read_text())
    answers = table["answers"]
    assert answers["verified 1"]["tokens"] == answers["exact"]["tokens"]
    assert answers["verified 1"]["forwards"] < answers["exact"]["forwards"]
