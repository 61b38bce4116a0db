"""A model directory, checked and identified without loading the model, and without torch.

Without these checks, a truncated copy would fail late or load wrongly. `mars.json`, the card, holds
what decoding needs and the Hugging Face files of a model do not have.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mars_ray.errors import ModelError
from mars_ray.files import remedy, replaced_directory
from mars_ray.storage.hub import missing

# transformers' model types, and their names in messages.
ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}
CONFIG_FILE = "config.json"
DRAFT_CARD_FILE = "draft.json"
DRAFT_FORMAT = 1
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# A safetensors file: eight bytes with the header's length, the header (JSON), the tensors' bytes.
_LENGTH_BYTES = 8
# The first and last bytes of each tensor distinguish models, because training changes them. A model
# of 60 GB is identified in a second.
_SAMPLE_BYTES = 1 << 14
# Stored by old versions of transformers; newer ones compute it.
_IGNORED = ".rotary_emb.inv_freq"


def check_config(directory: Path, called: str) -> None:
    """Raises ModelError if there is no configuration."""
    if not (directory / CONFIG_FILE).is_file():
        made = f"; its job is {called}/serve.toml" if (directory / "serve.toml").is_file() else ""
        raise ModelError(f"{called} has no {CONFIG_FILE}: it is no model directory{made}")


def check_supported(config: Mapping[str, Any], called: str) -> None:
    """Raises ModelError for the configuration of an unsupported architecture or quantisation."""
    if config.get("model_type") not in ARCHITECTURES:
        raise ModelError(
            f"{called} is a model of type {config.get('model_type')!r}; "
            f"supported are {', '.join(ARCHITECTURES.values())}"
        )
    if config.get("quantization_config"):
        raise ModelError(
            f"{called} is quantised, which is not supported; use the model that it was made from"
        )


def stored_config(directory: Path, called: str) -> dict[str, Any]:
    """A model's configuration as its file has it, without the defaults of its architecture. Raises
    ModelError."""
    check_config(directory, called)
    try:
        config = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{CONFIG_FILE} of {called} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG_FILE} of {called} holds no JSON object")
    return config


def no_adapter(called: str) -> ModelError:
    """The error for a directory that holds no draft adapter."""
    inner = Path(called, "adapter")
    better = (
        f"Name {inner}" if (inner / DRAFT_CARD_FILE).is_file() else "`mars-ray adapt` makes one"
    )
    return ModelError(f"{called} is no draft adapter: it has no {DRAFT_CARD_FILE}. {better}")


def check_complete(directory: Path) -> None:
    """Raises ModelError if config, tokenizer or weights are missing, or a weight file was cut
    short."""
    check_config(directory, str(directory))
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"{directory} has no {_TOKENIZERS[0]}: copy it from where the model came from"
        )
    for name in weight_files(directory):
        path = directory / name
        if not path.is_file():
            raise ModelError(
                f"{directory} has no {name}: weights must be in safetensors, and whole"
            )
        try:
            # Opening compares the header with the size of the file.
            _names(path)
        except SafetensorError as error:
            size = path.stat().st_size
            raise ModelError(f"{path} is damaged or was cut short: it has {size} bytes") from error


def check_names(directory: Path, known: Collection[str], prefix: str) -> None:
    """Raises ModelError if a weight file has weights that the model does not have.

    `prefix` is missing from the names in files of a model without its output projection.
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


@contextmanager
def written(directory: str | Path) -> Iterator[Path]:
    """A new directory that replaces this one when the block ends without an error. Raises
    ModelError if it cannot be written."""
    try:
        with replaced_directory(Path(directory)) as fresh:
            yield fresh
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write {directory}: {error}. {remedy(error)}, and run again"
        ) from error


def weight_files(directory: Path) -> list[str]:
    """The names of the weight files; the files need not exist. Raises ModelError."""
    index = directory / _INDEX
    if not index.is_file():
        return [_SINGLE]
    try:
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights: {error}") from error


def fingerprint(directory: str | Path) -> str:
    """The identity of a model, whatever its name: SHA-256 over names, types, shapes and samples of
    all tensors, independent of the split into files. Raises ModelError if it cannot be read."""
    lines: list[bytes] = []
    for name in weight_files(Path(directory)):
        path = Path(directory) / name
        try:
            lines += _samples(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"the weights in {path} cannot be read: {error}") from error
    digest = hashlib.sha256()
    for line in sorted(lines):
        digest.update(line)
    return digest.hexdigest()


def _names(path: Path) -> list[str]:
    # Not "pt", which would import torch.
    with safe_open(path, framework="np") as file:
        return list(file.keys())


def _samples(path: Path) -> Iterator[bytes]:
    """A line for each tensor of a weight file."""
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
            f"{name} has neither {CARD_FILE} nor {CONFIG_FILE}: it is no model directory (a draft "
            "adapter goes with --adapter)"
        ) from None
    except ValueError as error:
        raise ModelError(f"{CARD_FILE} of {name} is not JSON: {error}") from error
    types = (
        {key: type(value).__name__ for key, value in content.items()}
        if isinstance(content, dict)
        else {}
    )
    if types != _TYPES:
        expected = ", ".join(f"{name} ({kind})" for name, kind in _TYPES.items())
        raise ModelError(f"{CARD_FILE} of {name} must hold exactly {expected}")
    return ModelCard(**content)


def write_card(directory: str | Path, card: ModelCard) -> None:
    """Writes or replaces the directory's card; for a plain model, removes it."""
    path = Path(directory) / CARD_FILE
    if card.mask_token_id is None:
        path.unlink(missing_ok=True)
        return
    path.write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class DraftCard:
    """The purpose and the training of an adapter."""

    depths: int  # most masks of a group: the block size of its training
    base: str  # the model's name, for people
    base_fingerprint: str  # of the base's weights
    rank: int = 0  # 0: no LoRA
    alpha: float = 0.0
    targets: tuple[str, ...] = ()  # names of linear layers, as peft has them: q_proj, ...
    head_size: int = 0  # 0: no sequential head
    candidates: int = 64  # likeliest tokens of a mask row, among which the head chooses
    training: dict[str, Any] = field(default_factory=dict)  # job, data, tokens seen, provenance

    @property
    def scale(self) -> float:
        """Factor of the LoRA products."""
        return self.alpha / self.rank if self.rank else 0.0


def read_draft_card(directory: str | Path, called: str | None = None) -> DraftCard:
    """The card of the adapter in a directory; `called` is its name in messages.

    Raises ModelError if the directory holds no draft adapter, or one of another version.
    """
    name = called or str(directory)
    path = Path(directory) / DRAFT_CARD_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("format")
        card = DraftCard(**content | {"targets": tuple(content["targets"])})
    except (FileNotFoundError, NotADirectoryError):
        if not path.parent.exists():
            raise ModelError(f"there is no draft adapter {name}: no such directory") from None
        raise no_adapter(name) from None
    except OSError as error:
        raise ModelError(f"{DRAFT_CARD_FILE} of {name} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = f"{DRAFT_CARD_FILE} of {name} is not the card of a draft adapter: {error}"
        raise ModelError(said) from error
    if version != DRAFT_FORMAT:
        raise ModelError(
            f"the draft adapter {name} has format {version}; this version of mars-ray reads "
            f"{DRAFT_FORMAT}"
        )
    return card
