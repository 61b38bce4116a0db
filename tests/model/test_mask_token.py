import pytest
import torch
from model.toys import build

from mars_ray.model.create import ensure_mask_token
from mars_ray.model.directory import ModelCard


def rows(model):
    return model.get_input_embeddings().weight.shape[0]


def test_the_tokenizers_own_mask_token_is_used():
    """Nothing is added."""
    model, tokenizer = build("qwen2", 320)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    size = len(tokenizer)
    assert ensure_mask_token(model, tokenizer) == ModelCard("<mask>", size - 1, 0)
    assert (len(tokenizer), rows(model)) == (size, 320)


def test_an_unused_special_token_is_next():
    """Llama 3 reserves some; the first that the template does not use."""
    model, tokenizer = build("llama", 300)
    tokenizer.chat_template += "{# <|reserved_special_token_0|> #}"
    card = ensure_mask_token(model, tokenizer)
    assert card == ModelCard("<|reserved_special_token_1|>", 5, 0)
    assert tokenizer.mask_token_id == 5
    assert rows(model) == 300


def test_then_a_row_that_no_token_has():
    """Qwen2.5: 152,064 rows for 151,665 tokens. The shape of the weights stays."""
    model, tokenizer = build("qwen2", 320)
    free = len(tokenizer)
    before = model.get_input_embeddings().weight.clone()
    assert ensure_mask_token(model, tokenizer) == ModelCard("<|mask|>", free, 0)
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_at_last_a_new_row(architecture):
    """At the mean of the others; the others, and so the model's answers, stay as they were."""
    model, tokenizer = build(architecture, 1)
    model, tokenizer = build(architecture, len(tokenizer))
    size = len(tokenizer)
    before = model.get_input_embeddings().weight.clone()
    assert ensure_mask_token(model, tokenizer) == ModelCard("<|mask|>", size, 0)
    after = model.get_input_embeddings().weight
    assert after.shape[0] == size + 1
    assert model.get_output_embeddings().weight is after
    assert model.config.vocab_size == size + 1
    assert torch.equal(after[:-1], before)
    assert torch.allclose(after[-1], before.mean(0), atol=1e-6)


def test_an_untied_head_grows_too():
    """Llama's: two matrices, each with its own mean."""
    model, tokenizer = build("llama", 1)
    model, tokenizer = build("llama", len(tokenizer))
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    ensure_mask_token(model, tokenizer)
    head = model.get_output_embeddings().weight
    assert head.shape[0] == rows(model) == len(tokenizer)
    assert torch.allclose(head[-1], head[:-1].mean(0), atol=1e-6)


def test_a_second_call_changes_nothing():
    """A trained model is trained further with the same mask."""
    model, tokenizer = build("qwen2", 320)
    first = ensure_mask_token(model, tokenizer)
    size = len(tokenizer)
    assert ensure_mask_token(model, tokenizer) == first
    assert len(tokenizer) == size
