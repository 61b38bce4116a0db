"""A model directory of a base and the LoRA that MARS has trained on it.

    python benchmarks/merged_model.py BASE ADAPTERS DIRECTORY

ADAPTERS holds the `adapters.safetensors` of a checkpoint, of rank 32 and alpha 64, for blocks of 4.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from mars_ray.config.inputs import PretrainedModel
from mars_ray.model.adapters import add_adapters, merged
from mars_ray.model.create import create_model
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_model, load_tokenizer, save_model

RANK, ALPHA, BLOCK_SIZE = 32, 64.0, 4


def main() -> None:
    """Merge, and write the directory. Raises ModelError."""
    base, adapters, directory = map(Path, sys.argv[1:])
    create_model(PretrainedModel(path=str(base)), list, directory, 0)
    card, tokenizer = read_card(directory), load_tokenizer(directory)
    model = load_model(directory, dtype=None)
    add_adapters(model, card.mask_token_id, rank=RANK, alpha=ALPHA, dropout=0.0, seed=0)
    _, unknown = model.load_state_dict(load_file(adapters / "adapters.safetensors"), strict=False)
    assert not unknown, f"the model has no {unknown[0]}"
    with torch.no_grad():
        weights = merged(model, model.state_dict(), card.mask_token_id)
    save_model(directory, model, tokenizer, replace(card, block_size=BLOCK_SIZE), weights)


if __name__ == "__main__":
    main()
