"""`mars.json`: facts that decoding needs and the Hugging Face files of a model do not have."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mars_ray.errors import ModelError
from mars_ray.model.directory import CONFIG_FILE
from mars_ray.storage.hub import missing

CARD_FILE = "mars.json"


_TYPES = {"mask_token": "str", "mask_token_id": "int", "block_size": "int"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The mask token, and the deepest block trained: 0 for a model that was not MARS-trained.

    A plain model has no mask token. With a draft adapter it needs none, because masks then have
    embeddings in the adapter and no token of the vocabulary.
    """

    mask_token: str | None
    mask_token_id: int | None
    block_size: int

    @property
    def trained_mask_id(self) -> int | None:
        """The mask token of a model that was trained with it."""
        return self.mask_token_id if self.block_size else None


# Any unmodified Hugging Face model: decoded in `exact`, or with a draft adapter.
PLAIN = ModelCard(mask_token=None, mask_token_id=None, block_size=0)


def read_card(directory: str | Path, called: str | None = None) -> ModelCard:
    """The directory's card; `PLAIN` for a model without one.

    `called` is the model's name in messages if the directory is a copy of it. Raises ModelError if
    the directory holds no model, or the card is invalid.
    """
    path = Path(directory) / CARD_FILE
    name = called or str(directory)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not Path(directory).is_dir():
            raise missing(directory) from None
        if (Path(directory) / CONFIG_FILE).is_file():
            return PLAIN
        raise ModelError(
            f"{name} has neither {CARD_FILE} nor {CONFIG_FILE}: it is no model directory"
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
    """Writes or replaces the directory's card; for a plain model, removes it."""
    path = Path(directory) / CARD_FILE
    if card.mask_token_id is None:
        path.unlink(missing_ok=True)
        return
    path.write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")
