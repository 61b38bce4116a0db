"""How an answer's steps are put together on their way; the answer stays what it was."""

import asyncio
import json
from dataclasses import replace

import pytest
from serve.written import choices, data, text_of_choice, texts

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.protocol import Envelope, GenerationRequest, ReplyForm

REQUEST = GenerationRequest("delivery", ("one two three",), ExactMode(), Sampling(), 40, 100)
STEPS = texts(REQUEST).reply
FORMS = (STEPS, replace(STEPS, by_step=False), ReplyForm(route="completion", is_streamed=False))


def heard(text_engine, request: GenerationRequest, form: ReplyForm) -> list[Envelope]:
    async def run() -> list[Envelope]:
        asked = replace(request, reply=replace(form, has_usage=form.is_streamed))
        return [message async for message in text_engine.generate(asked)]

    return asyncio.run(run())


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_answer_is_the_same_however_it_is_delivered(text_engine, logprobs):
    """An event a step, one an interval, or a reply in one."""
    request = replace(REQUEST, logprobs=logprobs)
    steps, paced, single = (heard(text_engine, request, form) for form in FORMS)
    told = [choice["mars"] for choice in choices(steps) if "mars" in choice]
    assert told == [{"forward": forward, "tokens": 1} for forward in range(1, 41)]
    assert 1 < len(paced) < 40
    (envelope,) = single
    reply = json.loads(envelope.text)
    own = reply["choices"][0]
    for messages in (steps, paced):
        assert text_of_choice(messages) == own["text"]
        assert messages[-1].used == envelope.used
        assert (messages[-1].ending, envelope.ending) == ("length", "length")
        assert [message.ending for message in messages[:-1]] == [None] * (len(messages) - 1)
        assert data(messages[-1].text)[-1]["usage"] == reply["usage"]
        if logprobs:
            said = [choice["logprobs"] for choice in choices(messages) if choice["logprobs"]]
            for name, values in own["logprobs"].items():
                assert [value for one in said for value in one[name] or ()] == (values or [])


def test_a_stop_string_ends_in_the_middle_of_an_interval(text_engine):
    """Guards tokens and forwards that are counted though they came behind it."""
    text = text_of_choice(heard(text_engine, REQUEST, STEPS))
    request = replace(REQUEST, stop=(text[len(text) // 2 :][:3],))
    steps, paced, single = (heard(text_engine, request, form) for form in FORMS)
    assert steps[-1].used.completion_tokens < 40
    assert paced[-1].used == single[-1].used == steps[-1].used
    said = json.loads(single[0].text)["choices"][0]["text"]
    assert text_of_choice(paced) == said == text_of_choice(steps)
