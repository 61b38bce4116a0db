"""How much replies differ in T/F: `python benchmarks/reply_spread.py IDENTITY.json OUTPUT.json`.

Reads the answers that `benchmarks/identity.py` keeps beside its result, those with a group of masks
behind every outcome, and lists what masks brought each reply.
"""

import json
import sys
from pathlib import Path
from typing import Any

from service_models import spread_of

MODE = "verified 1 G=5, with adapter, batch 16"


def main() -> None:
    """Write tokens and forwards of each reply, and the quantiles of what masks brought."""
    identity, output = Path(sys.argv[1]), Path(sys.argv[2])
    result = json.loads(identity.read_text())
    answers: list[dict[str, Any]] = json.loads(
        (identity.with_suffix(".answers") / f"float32 {MODE}.json").read_text()
    )
    tokens = [len(answer["tokens"]) for answer in answers]
    forwards = [answer["forwards"] for answer in answers]
    spread = {
        "mode": MODE,
        "replies": len(answers),
        "tokens": tokens,
        "forwards": forwards,
        "spread": spread_of(tokens, forwards),
        "provenance": result["provenance"],
    }
    output.write_text(json.dumps(spread) + "\n")


if __name__ == "__main__":
    main()
