"""`mars.json`: what decoding must know about a model and its Hugging Face files do not say."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mars_ray.errors import ModelError
from mars_ray.model.missing import missing

CARD_FILE = "mars.json"


_TYPES = {"mask_token": "str", "mask_token_id": "int", "block_size": "int"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The mask token, and the deepest block trained: 0 for a model that was not MARS-trained."""

    mask_token: str
    mask_token_id: int
    block_size: int


def read_card(directory: str | Path, called: str | None = None) -> ModelCard:
    """Raises ModelError if the directory has no card, or a wrong one.

    `called` is the model's name in messages, where the directory is a copy of it.
    """
    path = Path(directory) / CARD_FILE
    name = called or str(directory)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not Path(directory).is_dir():
            raise missing(directory) from None
        raise ModelError(
            f"{name} has no {CARD_FILE}: it is not a model directory of mars-ray. Fine-tune the "
            "model with `mars-ray train` first, or name the directory that holds the exported model"
        ) from None
    except ValueError as error:
        raise ModelError(f"{CARD_FILE} of {name} is not JSON: {error}") from error
    if not isinstance(content, dict) or _types(content) != _TYPES:
        expected = ", ".join(f"{name} ({kind})" for name, kind in _TYPES.items())
        raise ModelError(f"{CARD_FILE} of {name} must hold exactly {expected}")
    return ModelCard(**content)


def _types(content: dict[str, object]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in content.items()}


def write_card(directory: str | Path, card: ModelCard) -> None:
    """Writes or replaces the directory's card."""
    text = json.dumps(asdict(card), indent=2) + "\n"
    (Path(directory) / CARD_FILE).write_text(text, encoding="utf-8")
