"""Where an answer ends."""

import logging

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.errors import ModelError
from mars_ray.model.tokenizer import end_of_turn_id

log = logging.getLogger(__name__)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens at which `transformers` too would stop. Raises ModelError if there is none."""
    known = _known(model.generation_config)
    if not known:
        raise ModelError(
            "the model's generation_config.json names no eos_token_id, so answers would never end"
        )
    return frozenset(known)


def stop_at_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the chat template's end of turn to the tokens at which `generate` stops.

    Raises ModelError if the template says none.
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
        # transformers loads it with a warning and refuses to save it. Of all it says we need these.
        log.warning("only its tokens are kept of generation_config.json: %s", error)
        model.generation_config = GenerationConfig(
            bos_token_id=generation.bos_token_id,
            eos_token_id=generation.eos_token_id,
            pad_token_id=generation.pad_token_id,
        )


def _known(generation: GenerationConfig | None) -> list[int]:
    eos = None if generation is None else generation.eos_token_id
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
