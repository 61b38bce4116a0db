"""Write tables and numbers of README and docs from the committed results, between their markers.

    <!-- results:demo --> ... <!-- /results:demo -->
    <!-- headline:smollm2.prompts ,d -->500<!-- /headline -->

`python benchmarks/render.py` rewrites them; `--check` fails if a table differs from the results.
"""

import json
import re
import sys
from pathlib import Path

from headline import headlines
from lib.support import matrix
from lib.tables import TABLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKERS = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)
# A name of headline.py, and the format of its value.
NUMBERS = re.compile(r"(<!-- headline:([\w.]+) (\S+) -->)[^<]*(<!-- /headline -->)")


def render(page: str) -> str:
    """The page with every marked table and number replaced. Raises KeyError for a number whose
    result does not exist."""

    def table(match: re.Match[str]) -> str:
        if match[2] == "support":
            lines = matrix(RESULTS)
        else:
            lines = TABLES[match[2]](json.loads((RESULTS / f"{match[2]}.json").read_text()))
        return match[1] + "\n".join(lines) + "\n" + match[3]

    found, _ = headlines()

    def number(match: re.Match[str]) -> str:
        return match[1] + format(found[match[2]]["value"], match[3]) + match[4]

    return NUMBERS.sub(number, MARKERS.sub(table, page))


def main() -> int:
    """Rewrite, or with `--check` compare."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path in PAGES:
        old = path.read_text()
        new = render(old)
        if old != new:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if check and stale:
        print(f"not what the results say: {', '.join(stale)}; run python benchmarks/render.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
