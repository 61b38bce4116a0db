"""Models that write: one at random, and one that has learnt to ask and to answer sums."""

from pathlib import Path

import pytest
import torch
from data.encoding import encode
from train.small_jobs import make_model
from transformers import PreTrainedTokenizerBase

from mars_ray.config.inputs import PretrainedModel
from mars_ray.data.sources import Message
from mars_ray.model.create import create_model
from mars_ray.model.directory import PLAIN
from mars_ray.model.load import load_model, load_tokenizer, save_model

SUMS = [(a, b) for a in range(10) for b in range(10)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At random, with a mask token, as a training job starts from it: its answers have an end."""
    directory = tmp_path_factory.mktemp("random")
    plain = PretrainedModel(path=str(make_model(directory / "plain")))
    create_model(plain, lambda: (), directory / "model", 0)
    return directory / "model"


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, without a card, that has seen users' turns as often as answers."""
    directory = tmp_path_factory.mktemp("talker")
    made = make_model(directory / "made", hidden_size=64, intermediate_size=128)
    model, tokenizer = load_model(made, dtype=torch.float32), load_tokenizer(made)
    input_ids, attention_mask = conversations(tokenizer)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for _ in range(80):
        rows = torch.randperm(len(input_ids))[:32]
        batch = {"input_ids": input_ids[rows], "attention_mask": attention_mask[rows]}
        model(**batch, labels=labels[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(directory / "model", model, tokenizer, PLAIN)
    return directory / "model"


def conversations(tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and what of them is no padding, (B, L) both."""
    rows = [
        encode(
            [Message("user", f"How many are {a} and {b}?"), Message("assistant", f"{a + b}.")],
            tokenizer,
        )
        for a, b in SUMS
    ]
    longest = max(len(row.input_ids) for row in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in zip(input_ids, rows, strict=True):
        place[: len(row.input_ids)] = torch.from_numpy(row.input_ids)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    return input_ids, (torch.arange(longest) < lengths[:, None]).long()
