"""A plain model whose next token is decided by the last one alone, and draft adapters for it.

Its layers add nothing, so the hidden state is the last token's embedding, normed. A mask row knows
that embedding by the sequential head, which can copy it: a perfect adapter without any training.
"""

from dataclasses import replace
from pathlib import Path

import torch

from mars_ray.config.inputs import PresetModel
from mars_ray.core.draft_head import DraftHead
from mars_ray.model.create import create_model
from mars_ray.model.directory import PLAIN, fingerprint
from mars_ray.model.draft_adapter import (
    DraftAdapter,
    DraftCard,
    read_draft_adapter,
    write_draft_adapter,
)
from mars_ray.model.load import load_model, load_tokenizer, save_model

DEPTHS = 4
TEXTS = ["one two three four five six seven eight nine ten"] * 50
_POSITIONS = 1 << 15


def write_base(directory: Path, seed: int = 0) -> Path:
    """Greedy answers never end by themselves: no special token is ever the likeliest."""
    create_model(PresetModel(preset="tiny", vocab_size=330), lambda: TEXTS, directory, seed=seed)
    model, tokenizer = load_model(directory, dtype=torch.float32), load_tokenizer(directory)
    model.config.tie_word_embeddings = False
    model.config.max_position_embeddings = _POSITIONS
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    torch.manual_seed(seed)
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    with torch.no_grad():
        head.weight[tokenizer.all_special_ids] = 0
        for layer in model.base_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    save_model(directory, model, tokenizer, PLAIN)
    return directory


def write_perfect(base: Path, directory: Path) -> Path:
    """Every draft is right: a step commits a token and all depths behind it."""
    size = _size(base)
    identity = torch.eye(size)
    # silu(x) - silu(-x) is x: of the mask's own state nothing is left, and the token's comes in.
    plus_and_minus = torch.cat([identity, -identity])
    head = DraftHead(
        -plus_and_minus, plus_and_minus, torch.zeros(DEPTHS, 2 * size), plus_and_minus.T
    )
    return _write(base, directory, head)


def write_useless(base: Path, directory: Path) -> Path:
    """A draft is right by chance at best."""
    return _write(base, directory, None)


def _write(base: Path, directory: Path, head: DraftHead | None) -> Path:
    size = _size(base)
    card = DraftCard(
        depths=DEPTHS,
        base="bigram",
        base_fingerprint=fingerprint(base),
        head_size=2 * size if head else 0,
        candidates=330,
    )
    torch.manual_seed(0)
    mask_embedding = torch.randn(DEPTHS, size)
    write_draft_adapter(directory, DraftAdapter(card, mask_embedding, {}, head))
    return directory


def write_for_another(base: Path, directory: Path) -> Path:
    """Whole and well, but its base has other weights."""
    adapter = read_draft_adapter(write_useless(base, directory), base)
    card = replace(adapter.card, base_fingerprint="0" * 64)
    write_draft_adapter(directory, replace(adapter, card=card))
    return directory


def write_broken(base: Path, directory: Path) -> Path:
    """One of its numbers is none."""
    adapter = read_draft_adapter(write_useless(base, directory), base)
    adapter.mask_embedding_DH[0, 0] = torch.nan
    write_draft_adapter(directory, adapter)
    return directory


def _size(base: Path) -> int:
    return load_model(base, dtype=torch.float32).config.hidden_size
