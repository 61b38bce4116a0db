"""The model that MARS has trained: a base, and the LoRA that benchmarks/models/ holds."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from mars_ray.config.inputs import PretrainedModel
from mars_ray.model.adapters import add_adapters, merged
from mars_ray.model.create import create_model
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_model, load_tokenizer, save_model

LORA = Path("benchmarks/models/smollm2-mars")
RANK, ALPHA, BLOCK_SIZE = 32, 64.0, 4


def make(base: Path, directory: Path, adapters: Path = LORA) -> None:
    """Writes the directory of both, merged, if it is not there yet. Raises ModelError."""
    if directory.is_dir():
        return
    create_model(PretrainedModel(path=str(base)), list, directory, 0)
    card, tokenizer = read_card(directory), load_tokenizer(directory)
    model = load_model(directory, dtype=None)
    add_adapters(model, card.mask_token_id, rank=RANK, alpha=ALPHA, dropout=0.0, seed=0)
    _, unknown = model.load_state_dict(load_file(adapters / "adapters.safetensors"), strict=False)
    assert not unknown, f"the model has no {unknown[0]}"
    with torch.no_grad():
        weights = merged(model, model.state_dict(), card.mask_token_id)
    save_model(directory, model, tokenizer, replace(card, block_size=BLOCK_SIZE), weights)
