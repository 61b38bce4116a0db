"""Where an answer ends."""

from transformers import PreTrainedModel

from mars_ray.errors import ModelError


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens at which `transformers` too would stop. Raises ModelError if there is none."""
    generation = model.generation_config
    eos = None if generation is None else generation.eos_token_id
    if eos is None:
        raise ModelError(
            "the model's generation_config.json names no eos_token_id, so answers would never end"
        )
    return frozenset(eos if isinstance(eos, list) else [eos])
