"""Loading models and tokenizers: safetensors only, and no code from the checkpoint; the tokens at
which an answer ends; and writing a model directory that any tool for Hugging Face models can read.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from mars_ray.errors import ModelError
from mars_ray.files import replaced_directory
from mars_ray.model.directory import (
    CARD_FILE,
    CONFIG_FILE,
    ModelCard,
    check_config,
    check_supported,
    read_card,
    weight_files,
    write_card,
)
from mars_ray.storage.hub import missing

log = logging.getLogger(__name__)

# Errors of transformers on files that are missing, damaged or of another shape (RuntimeError), and
# on values that it does not check.
_COMPLAINTS = (
    OSError,
    ValueError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
)


T = TypeVar("T")


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16. Others convert to float32, which takes several times
    as long as float32 itself."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def quiet_unless_watched() -> None:
    """Turns transformers' progress bars off unless stderr is a terminal."""
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device = "cpu",
    attention: str = "sdpa",
    revision: str | None = None,
) -> PreTrainedModel:
    """The causal language model in a local directory or of a hub name, in eval mode.

    `dtype` None keeps the stored one. Raises ModelError if there is no model, if its architecture
    is not supported, or if its weights are incomplete or not in safetensors.
    """
    read_config(directory, revision)
    loaded: Any = opened(
        directory,
        lambda: AutoModelForCausalLM.from_pretrained(
            directory,
            revision=revision,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        ),
        revision,
    )
    model, report = loaded
    check_report(report, f"the weights in {directory} do not fit its config.json")
    return model.to(device).eval()


def check_report(report: dict[str, Any], complaint: str) -> None:
    """Raises ModelError for missing weights, which transformers fills with random numbers."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:
            names = ", ".join(sorted(str(key) for key in report[kind])[:3])
            raise ModelError(f"{complaint}: {kind.replace('_', ' ')} {names}")


def load_tokenizer(directory: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's directory.

    Raises ModelError if there is none, or if its mask token is not the one that the model was
    trained with. With another model's tokenizer the answers are nonsense, and no other check would
    notice.
    """
    tokenizer = opened(
        directory,
        lambda: AutoTokenizer.from_pretrained(
            directory, revision=revision, trust_remote_code=False
        ),
        revision,
    )
    if (Path(directory) / CARD_FILE).exists():
        card = read_card(directory)
        assert card.mask_token is not None
        if tokenizer.convert_tokens_to_ids(card.mask_token) != card.mask_token_id:
            raise ModelError(
                f"the tokenizer in {directory} is not the one its model was trained with: "
                f"{card.mask_token!r} is not token {card.mask_token_id} as {CARD_FILE} says"
            )
    return tokenizer


def read_config(
    directory: str | Path, revision: str | None = None, called: str | None = None
) -> Any:
    """A model's configuration. Raises ModelError for an unsupported architecture or quantisation.

    `called` is the model's name in messages if the directory is a copy of it.
    """
    name = called or str(directory)
    if called:
        check_config(Path(directory), called)
    config = opened(
        directory,
        lambda: AutoConfig.from_pretrained(directory, revision=revision, trust_remote_code=False),
        revision,
    )
    check_supported(config.to_dict(), name)
    return config


def stored_dtype(directory: str | Path) -> torch.dtype:
    """The dtype that a model's configuration names, or else that of its weights. Raises
    ModelError."""
    if isinstance(said := read_config(directory).dtype, torch.dtype):
        return said
    path = Path(directory) / weight_files(Path(directory))[0]
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(next(iter(file.keys()))).dtype
    except (OSError, SafetensorError, StopIteration) as error:
        raise ModelError(f"the weights in {path} cannot be read: {error}") from error


def not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first of these weights that has NaN or infinite numbers."""
    return next((name for name, value in weights if not value.isfinite().all()), None)


def stored_weights(directory: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in a model's files, one by one."""
    for name in weight_files(Path(directory)):
        with safe_open(Path(directory) / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                yield key, file.get_tensor(key)


def opened(
    place: str | Path,
    load: Callable[[], T],
    revision: str | None = None,
    holds: str = "a model with safetensors weights",
) -> T:
    """Calls `load`, and turns transformers' errors into ModelErrors."""
    quiet_unless_watched()
    try:
        return load()
    except MemoryError as error:
        raise ModelError(f"there is too little memory to load {place}") from error
    except _COMPLAINTS as error:
        if isinstance(error, OSError) and not Path(place).exists():
            raise missing(place, revision, error) from error
        # torch's message when the CPU's memory is full; for CUDA's it has an exception.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise ModelError(f"there is too little memory to load {place}: {error}") from error
        raise ModelError(
            f"cannot load {str(place)!r}, which must hold {holds}: {type(error).__name__}: {error}"
        ) from error


def save_model(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    card: ModelCard,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Writes config, weights, tokenizer, chat template and card; replaces an existing directory.

    The directory appears complete or not at all. Pass `state_dict` if the model's own parameters
    are not whole, as under ZeRO-3.
    """
    with replaced_directory(Path(directory)) as fresh:
        write_model(fresh, model, tokenizer, card, state_dict)


def write_model(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    card: ModelCard,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Writes the files of `save_model` into an empty directory one by one."""
    quiet_unless_watched()
    # As `model.save_pretrained`, which imports deepspeed if accelerate is installed, which peft
    # requires: three seconds in every process that saves a model.
    weights = model.state_dict() if state_dict is None else state_dict
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    own = {
        # In storage of its own: ZeRO's parameters are pieces of a large tensor.
        name: value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
        for name, value in weights.items()
        # The output projection has this name in all of `directory.ARCHITECTURES`.
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_torch_state_dict(own, directory)
    tokenizer.save_pretrained(directory)
    write_card(directory, card)
    # safetensors makes files readable for their owner only; a server may run as another user.
    mode = (directory / CONFIG_FILE).stat().st_mode
    for path in directory.rglob("*"):
        if path.is_file():  # beside named chat templates, which have a directory
            path.chmod(mode)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens at which `transformers` would also stop. Raises ModelError if there are none."""
    return _some(_known(model.generation_config))


def stop_ids_of(directory: str | Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens at which answers of a directory's model end, that of the chat template's turn
    included; reads no weights. Raises ModelError if there are none."""
    # As `transformers` makes it for the model: its own configuration where it has no other.
    if (Path(directory) / GENERATION_CONFIG_NAME).exists():
        generation = opened(directory, lambda: GenerationConfig.from_pretrained(directory))
    else:
        config = opened(
            directory, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
        generation = GenerationConfig.from_model_config(config)
    known = _known(generation)
    if tokenizer.chat_template:
        try:
            known.append(end_of_turn_id(tokenizer))
        except ModelError as error:
            log.warning("answers end only where generation_config.json says so: %s", error)
    return _some(known)


def _some(known: list[int]) -> frozenset[int]:
    if not known:
        raise ModelError(
            "the model's generation_config.json names no eos_token_id, so answers would never end"
        )
    return frozenset(known)


def stop_at_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the chat template's end of turn to the tokens at which `generate` stops.

    Raises ModelError if the template has no end of turn.
    """
    generation = model.generation_config
    if generation is None:
        generation = model.generation_config = GenerationConfig()
    stops = list(dict.fromkeys([end_of_turn_id(tokenizer), *_known(generation)]))
    generation.eos_token_id = stops[0] if len(stops) == 1 else stops
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    try:
        generation.validate(strict=True)
    except ValueError as error:
        # transformers loads it with a warning and refuses to save it. Only its tokens are needed.
        log.warning("only its tokens are kept of generation_config.json: %s", error)
        model.generation_config = GenerationConfig(
            bos_token_id=generation.bos_token_id,
            eos_token_id=generation.eos_token_id,
            pad_token_id=generation.pad_token_id,
        )


def _known(generation: GenerationConfig | None) -> list[int]:
    eos = None if generation is None else generation.eos_token_id
    return list(eos) if isinstance(eos, list) else [] if eos is None else [eos]


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The special token with which the chat template ends an assistant's turn.

    Base models often end texts with a different token than their template ends turns with, and
    decoding must stop at both. Raises ModelError if there is no template, if it cannot be used, or
    if it ends turns with plain text.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, so conversations cannot be written for it; use "
            "an instruction-tuned version of the model, or put a chat_template.jinja beside it"
        )
    answer = "fine"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError) as error:
        raise ModelError(f"the tokenizer's chat template cannot be used: {error}") from error
    assert isinstance(text, str)
    _, found_answer, tail = text.rpartition(answer)
    if not found_answer:
        raise ModelError("the chat template does not write what the assistant answers")
    found = {
        tail.index(token.content): index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content in tail
    }
    if not found:
        raise ModelError(
            "the chat template ends an assistant's turn without a special token, so decoding could "
            "not know where to stop; add the end-of-sequence token to the template"
        )
    return found[min(found)]
