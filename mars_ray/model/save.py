"""Writing a model directory that any tool for Hugging Face models can read."""

import copy
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.files import replaced_directory
from mars_ray.model.directory import CONFIG_FILE, ModelCard, write_card
from mars_ray.model.load import quiet_unless_watched

# The output projection's name in all of `load.ARCHITECTURES`.
_HEAD = "lm_head.weight"


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
    _save_weights(directory, model, state_dict)
    tokenizer.save_pretrained(directory)
    write_card(directory, card)
    # safetensors makes files readable for their owner only; a server may run as another user.
    mode = (directory / CONFIG_FILE).stat().st_mode
    for path in directory.rglob("*"):
        if path.is_file():  # beside named chat templates, which have a directory
            path.chmod(mode)


def _save_weights(
    directory: Path,
    model: PreTrainedModel,
    state_dict: dict[str, Tensor] | None,
) -> None:
    """Writes the same files as `model.save_pretrained`.

    If accelerate is installed, which peft requires, that function imports deepspeed, which takes
    three seconds in every process that saves a model.
    """
    weights = model.state_dict() if state_dict is None else state_dict
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tied = {_HEAD} if config.tie_word_embeddings else set()
    own = {name: _alone(value) for name, value in weights.items() if name not in tied}
    save_torch_state_dict(own, directory)


def _alone(value: Tensor) -> Tensor:
    """The tensor in storage of its own: ZeRO's parameters are pieces of a large tensor."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
