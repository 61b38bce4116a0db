"""The tokens at which an answer ends."""

import logging
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from mars_ray.errors import ModelError
from mars_ray.model.load import opened

log = logging.getLogger(__name__)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens at which `transformers` would also stop. Raises ModelError if there are none."""
    return _some(_known(model.generation_config))


def stop_ids_of(directory: str | Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens at which answers of a directory's model end, that of the chat template's turn
    included; reads no weights. Raises ModelError if there are none."""
    known = _known(_generation_of(directory))
    if tokenizer.chat_template:
        try:
            known.append(end_of_turn_id(tokenizer))
        except ModelError as error:
            log.warning("answers end only where generation_config.json says so: %s", error)
    return _some(known)


def _generation_of(directory: str | Path) -> GenerationConfig:
    """As `transformers` makes it for the model: the model's own configuration where it has none."""
    if (Path(directory) / GENERATION_CONFIG_NAME).exists():
        return opened(directory, lambda: GenerationConfig.from_pretrained(directory))
    config = opened(
        directory, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
    )
    return GenerationConfig.from_model_config(config)


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
