"""Models as they are downloaded, without a card: decoded as transformers does, not otherwise."""

import json

import pytest
import torch
from model.toys import build, write

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    VerifiedMode,
)
from mars_ray.decode.engine import generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.errors import RequestError
from mars_ray.model.load import load_model, load_tokenizer, stop_ids

SIZE = EngineConfig(max_batch=3, max_context=96, device="cpu", threads=1)
PROMPTS = [(5, 40, 77), (9,), tuple(range(20, 50))]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "mistral"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain") / request.param
    model, tokenizer = build(request.param, 300)
    # Random weights repeat one token for ever; these wander.
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("mode", [ExactMode(), JacobiMode()], ids=lambda mode: mode.type)
def test_a_plain_model_says_what_transformers_lets_it_say(checkpoint, mode):
    """Every architecture, in a batch of prompts of different lengths. Guards a mask token that a
    plain model does not have, and a token that can never be said for its sake."""
    engine, _ = load_engine(checkpoint, SIZE)
    requests = [
        Request(str(number), prompt, mode, Sampling(), 40, frozenset())
        for number, prompt in enumerate(PROMPTS)
    ]
    model = load_model(checkpoint, dtype=None)
    for prompt, done in zip(PROMPTS, generate_all(engine, requests), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )
        assert list(done.tokens) == expected[0, len(prompt) :].tolist()
        assert len(set(done.tokens)) > 5


@pytest.mark.parametrize(
    "mode",
    [VerifiedMode(window=2), ConfidenceMode(), BlockCachedMode()],
    ids=lambda mode: mode.type,
)
def test_modes_that_need_masks_need_an_adapter(checkpoint, mode):
    """Guards drafts from masks that the model has never seen; and the message says the way out."""
    engine, _ = load_engine(checkpoint, SIZE)
    with pytest.raises(RequestError, match=r"'exact', or give it a draft adapter \(`mars-ray ad"):
        engine.check(Request("x", (1, 2), mode, Sampling(), 8, frozenset()))


@pytest.mark.parametrize("said", [None, 0, [0, 1]])
def test_an_answer_ends_with_its_turn(tmp_path, said):
    """Whatever generation_config.json says, which of base models is the end of a text: an answer
    would go on with a turn of the user's."""
    directory = write(tmp_path / "plain", "qwen2", 300)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    end = load_tokenizer(directory).convert_tokens_to_ids("<|im_end|>")
    engine, _ = load_engine(directory, SIZE)
    expected = {end} | ({0, 1} if isinstance(said, list) else set() if said is None else {said})
    assert stop_ids(engine.model) == expected


def test_a_model_without_a_template_is_for_texts(tmp_path, caplog):
    """Guards completions that are refused for want of what only chats need."""
    directory = write(tmp_path / "plain", "llama", 300)
    template = directory / "chat_template.jinja"
    plain_end = template.read_text().replace("<|eot_id|>", "END")
    template.unlink()
    assert stop_ids(load_engine(directory, SIZE)[0].model) == {3}
    assert not caplog.records
    template.write_text(plain_end)
    assert stop_ids(load_engine(directory, SIZE)[0].model) == {3}
    assert "answers end only where generation_config.json says so" in caplog.text
