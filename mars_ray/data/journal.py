"""Files of JSON lines that a long run adds to, and an interrupted one goes on with."""

import json
from pathlib import Path
from typing import Any


def read_journal(path: Path) -> list[Any]:
    """All that was written whole; none without a file.

    What a killed run did not finish writing is cut off, so that the next line is one of its own.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
