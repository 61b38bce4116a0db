"""Whose forwards a reply's are: no adapter's tokens per forward hold another one's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.request import Completion, Request, TokenEvent
from mars_ray.serve.openai.response_models import MarsUsage
from mars_ray.serve.openai.sse import ReplyWriter, usage
from mars_ray.serve.protocol import Finish, GenerationRequest, Served, TokenText
from mars_ray.serve.replica.output_processor import OutputProcessor
from mars_ray.serve.replica.stats import ReplicaCounters

A, B = "a@1", "b@2"
CALL = GenerationRequest("c", ("x",), VerifiedMode(), Sampling(), 100, 100)


def transcript(mode: Mode, call: GenerationRequest = CALL) -> OutputProcessor:
    request = Request("c-0", (1, 2), mode, Sampling(), 100, frozenset())

    def token_text(token: int, logprob: float) -> TokenText:
        return TokenText(str(token), (), logprob)

    def decode(tokens: Sequence[int]) -> str:
        return "x" * len(tokens)

    counters = ReplicaCounters(ServeJob(checkpoint="x"))
    return OutputProcessor(call, request, 0, decode, token_text, ReplyWriter(call), counters)


def steps(*said: tuple[str | None, int]) -> list[TokenEvent]:
    """Of a whole answer: the adapter of each forward, and how many tokens it brought."""
    events = [
        TokenEvent("c-0", tuple(range(count)), forward, adapter=adapter)
        for forward, (adapter, count) in enumerate(said, start=1)
    ]
    events[-1] = replace(events[-1], completion=Completion("c-0", (), (), len(events), "length"))
    return events


SAID = ((A, 1), (A, 3), (None, 1), (None, 1), (A, 2), (B, 4), (B, 5))
SERVED = (Served(A, 4, 2), Served(None, 2, 2), Served(A, 2, 1), Served(B, 9, 2))


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_forwards_belong_to_the_adapter_of_their_drafts(at_once, stop):
    """However many steps come in one message; guards a batch of steps that begins and ends with one
    adapter and has another between."""
    events = steps(*SAID)
    written = transcript(VerifiedMode(), replace(CALL, stop=stop))
    for first in range(0, len(events), at_once):
        written.process(events[first : first + at_once])
    finish = written.finish
    assert finish
    assert finish.served == SERVED
    assert finish.completion_tokens == sum(served.tokens for served in SERVED)
    assert finish.forwards == sum(served.forwards for served in SERVED)


def test_without_masks_no_adapter_serves():
    """`exact` would spoil the mean of whatever adapter is in force."""
    written = transcript(ExactMode())
    written.process(steps(*SAID))
    assert written.finish
    assert written.finish.served == (Served(None, 17, 7),)
    assert written.finish.mode == "exact"


def finished(*served: Served) -> Finish:
    tokens, forwards = (sum(getattr(s, name) for s in served) for name in ("tokens", "forwards"))
    return Finish("stop", 2, tokens, forwards, 0, 1.0, served=served)


def test_a_reply_names_its_adapter():
    """One is a name; of several the last, and what each has served, over all choices."""
    one = usage(CALL, [finished(Served(A, 9, 3))])["mars"]
    assert (one["adapter"], "by_adapter" in one) == (A, False)
    two = usage(replace(CALL, n=2), [finished(*SERVED), finished(Served(B, 1, 1))])["mars"]
    assert two["adapter"] == B
    assert two["by_adapter"] == [
        {"adapter": A, "completion_tokens": 6, "forwards": 3},
        {"adapter": None, "completion_tokens": 2, "forwards": 2},
        {"adapter": B, "completion_tokens": 10, "forwards": 3},
    ]
    for made in (one, two):
        TypeAdapter(MarsUsage).validate_python(made)
    assert two["forwards"] == sum(each["forwards"] for each in two["by_adapter"])


def test_a_reply_says_how_it_was_decoded():
    """Where the service's own mode needs drafts that nobody makes; `exact` has no threshold."""
    made = usage(CALL, [replace(finished(Served(None, 3, 3)), threshold=None, mode="exact")])
    assert (made["mars"]["mode"], made["mars"]["threshold"]) == ("exact", None)
