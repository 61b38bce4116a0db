"""Log-probabilities of a prompt's tokens: those of one forward over the whole prompt."""

from dataclasses import replace

import pytest
import torch
from decode.adapters import good_adapter
from decode.cases import SCARCE
from decode.models import pattern, request, trained_model

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import TokenLogprobs
from mars_ray.errors import RequestError
from mars_ray.model.directory import PLAIN, ModelCard


def prompts_of(engine: Engine, requests: list) -> dict[str, tuple[TokenLogprobs, ...]]:
    """By request; they come with the first event and never again."""
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            assert not event.failure
            if event.request_id not in found:
                found[event.request_id] = event.prompt_logprobs
            else:
                assert not event.prompt_logprobs
    engine.check_integrity()
    return found


@pytest.mark.parametrize("mode", [ExactMode(), VerifiedMode()], ids=lambda mode: mode.type)
@pytest.mark.parametrize(
    "size",
    [
        EngineConfig(max_batch=3, max_context=64),
        EngineConfig(max_batch=2, max_context=64, max_step_tokens=21, attention_backend="dense"),
        SCARCE,
    ],
    ids=["whole", "in chunks", "sent back"],
)
def test_they_are_those_of_one_forward(model, mode, size):
    """In chunks, beside others, with pages of the same prompt in the cache, and sent back between
    two chunks."""
    texts = [pattern(index, 1 + index % 3, 23 - 5 * (index % 3)) for index in range(5)]
    texts += [texts[0], [7]]
    engine = Engine(model, PLAIN, size, adapter=good_adapter(model))
    asked = [
        replace(request(str(i), text, mode, max_new_tokens=12), prompt_logprobs=2 if i % 4 else 0)
        for i, text in enumerate(texts)
    ]
    without = [request(f"without {i}", text, mode) for i, text in enumerate(texts)]
    found = prompts_of(engine, [*asked, *without])
    assert not any(found[each.id] for each in without)
    if size is SCARCE:
        assert engine.snapshot().preemptions
    for each in asked:
        with torch.inference_mode():
            logits_LV = model(torch.tensor([each.prompt])).logits[0].float()
        log_p_LV = logits_LV.log_softmax(dim=-1)
        assert len(found[each.id]) == len(each.prompt) - 1
        for place, said in enumerate(found[each.id]):
            own = float(log_p_LV[place, each.prompt[place + 1]])
            assert said.logprob == pytest.approx(own, abs=1e-4)
            top = log_p_LV[place].topk(each.prompt_logprobs)
            values = [value for _, value in said.top]
            assert values == pytest.approx(top.values.tolist(), abs=1e-4)


def test_a_token_that_is_never_said_has_a_number():
    """The mask token, of which JSON could not tell minus infinity; also as the least likely."""
    mask, model = 7, trained_model(0, vocab_size=8)
    card = ModelCard("<|mask|>", mask, block_size=4)
    engine = Engine(model, card, EngineConfig(max_batch=1, max_context=64))
    asked = request("a", [1, mask, 2], ExactMode(), max_new_tokens=1, stop=-1)
    said, other = prompts_of(engine, [replace(asked, prompt_logprobs=8)])["a"]
    assert said.logprob == -9999 < -100 < other.logprob
    assert said.top[-1] == other.top[-1] == (mask, -9999)


def test_too_many_of_the_likeliest_are_refused(model):
    """As for the answer's tokens."""
    engine = Engine(model, PLAIN, EngineConfig(max_batch=1, max_context=64))
    with pytest.raises(RequestError, match=r"0 \.\. 20"):
        engine.submit(replace(request("a", [1, 2], ExactMode()), prompt_logprobs=21))
