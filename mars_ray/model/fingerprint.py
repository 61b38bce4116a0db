"""Which model a directory holds, told by its weights: names and copies of it do not matter."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from mars_ray.errors import ModelError
from mars_ray.model.complete import weight_files

# Of each tensor, its first and last bytes: whatever was trained has changed them, and a model of
# 60 GB is told in a second.
_SAMPLE_BYTES = 1 << 14
_LENGTH_BYTES = 8


def fingerprint(directory: str | Path) -> str:
    """SHA-256 over names, types, shapes and samples of all tensors, however they are split into
    files. Raises ModelError if the weights cannot be read."""
    lines: list[bytes] = []
    for name in weight_files(Path(directory)):
        path = Path(directory) / name
        try:
            lines += _tensors(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"the weights in {path} cannot be read: {error}") from error
    digest = hashlib.sha256()
    for line in sorted(lines):
        digest.update(line)
    return digest.hexdigest()


def _tensors(path: Path) -> Iterator[bytes]:
    """A line of each tensor of a safetensors file (the format: `complete.py`)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        for name, entry in json.loads(file.read(length)).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            sample = hashlib.sha256()
            for place in (begin, max(begin, end - _SAMPLE_BYTES)):
                file.seek(start + place)
                sample.update(file.read(min(_SAMPLE_BYTES, end - place)))
            known = json.dumps([name, entry["dtype"], entry["shape"], sample.hexdigest()])
            yield known.encode() + b"\n"
