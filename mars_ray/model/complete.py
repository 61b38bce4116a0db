"""Whether a model directory is whole: a copy that was cut short loads late, or not as it should."""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mars_ray.errors import ModelError

CONFIG_FILE = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# A safetensors file: eight bytes with the header's length, the header (JSON), the tensors' bytes.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
# Stored by old versions of transformers, and computed by all others.
_IGNORED = ".rotary_emb.inv_freq"


def check_config(directory: Path, called: str) -> None:
    """Raises ModelError if there is none."""
    if not (directory / CONFIG_FILE).is_file():
        raise ModelError(f"{called} has no {CONFIG_FILE}: it is no model directory")


def check_complete(directory: Path) -> None:
    """Raises ModelError if config or weights are missing, or a file of weights was cut short."""
    check_config(directory, str(directory))
    for name in weight_files(directory):
        path = directory / name
        if not path.is_file():
            raise ModelError(
                f"{directory} has no {name}: weights must be in safetensors, and whole"
            )
        size = path.stat().st_size
        if size != _safetensors_size(path):
            raise ModelError(f"{path} is damaged or was cut short: it has {size} bytes")


def check_names(directory: Path, known: Collection[str], prefix: str) -> None:
    """Raises ModelError if a file of weights has some that the model does not know.

    `prefix` is what names of a model without its output projection lack.
    """
    strange = [
        name
        for file in weight_files(directory)
        for name in _names(directory / file)
        if not {name, f"{prefix}.{name}"} & set(known) and not name.endswith(_IGNORED)
    ]
    if strange:
        raise ModelError(
            f"the weights in {directory} do not fit its config.json: "
            f"unexpected keys {', '.join(sorted(strange)[:3])}"
        )


def dtype_of_weights(directory: Path) -> torch.dtype:
    """Of the first of them. Raises ModelError if they cannot be read."""
    path = directory / weight_files(directory)[0]
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(next(iter(file.keys()))).dtype
    except (OSError, SafetensorError, StopIteration) as error:
        raise ModelError(f"the weights in {path} cannot be read: {error}") from error


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def weight_files(directory: Path) -> list[str]:
    """The names of its files of weights; they need not be there. Raises ModelError."""
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
