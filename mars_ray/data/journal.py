"""Files of JSON lines that a long run adds to, and an interrupted one goes on with."""

import json
import os
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
        # Nothing is written: on a full disk that would lose what is there.
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
