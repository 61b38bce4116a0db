"""Likelihoods of answers by another model, beside transformers' own logits."""

import pytest
import torch
from compare_decoders import random_checkpoint
from mars_frontier import _score
from transformers import AutoModelForCausalLM

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.loading import engine_model


def test_an_answer_is_scored_behind_its_prompt():
    """Guards a shift by one token, and a likelihood of the prompt."""
    prompt, said = (5, 6, 7, 8), [9, 4, 5]
    with random_checkpoint("tiny") as made, torch.inference_mode():
        model = engine_model(str(made), EngineConfig(dtype="float32", device="cpu"))
        count, nll, same = _score(model, prompt, said)
        plain = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
        log_p = plain(torch.tensor([[*prompt, *said]])).logits[0].log_softmax(dim=-1)
    rows = log_p[len(prompt) - 1 : -1]
    assert count == len(said)
    assert nll == pytest.approx(
        -sum(row[token].item() for row, token in zip(rows, said, strict=True)), rel=1e-4
    )
    assert same == sum(int(row.argmax() == token) for row, token in zip(rows, said, strict=True))
