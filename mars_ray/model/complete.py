"""Whether a model directory is whole: a copy that was cut short loads late, or not as it should."""

import json
from pathlib import Path

from mars_ray.errors import ModelError

CONFIG_FILE = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# A safetensors file: eight bytes with the header's length, the header (JSON), the tensors' bytes.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def check_config(directory: Path, called: str) -> None:
    """Raises ModelError if there is none."""
    if not (directory / CONFIG_FILE).is_file():
        raise ModelError(f"{called} has no {CONFIG_FILE}: it is no model directory")


def check_complete(directory: Path) -> None:
    """Raises ModelError if config or weights are missing, or a file of weights was cut short."""
    check_config(directory, str(directory))
    for name in _weight_files(directory):
        path = directory / name
        if not path.is_file():
            raise ModelError(
                f"{directory} has no {name}: weights must be in safetensors, and whole"
            )
        size = path.stat().st_size
        if size != _safetensors_size(path):
            raise ModelError(f"{path} is damaged or was cut short: it has {size} bytes")


def _weight_files(directory: Path) -> list[str]:
    index = directory / _INDEX
    if not index.is_file():
        return [_SINGLE]
    try:
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights: {error}") from error


def _safetensors_size(path: Path) -> int | None:
    """The file's size as its header tells it, or None if it has no header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return _LENGTH_BYTES + length + max(ends, default=0)
