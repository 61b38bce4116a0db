"""Files that long runs add to."""

from pathlib import Path
from typing import Any

import pytest

from mars_ray.files import read_journal


def test_half_a_line_is_cut_off_without_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards hours of work on a disk that is full, which is when there is half a line."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b')
    monkeypatch.setattr(Path, "write_bytes", full)
    assert read_journal(path) == [{"a": 1}]
    assert path.read_bytes() == b'{"a": 1}\n'
