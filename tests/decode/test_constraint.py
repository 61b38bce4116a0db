"""A grammar in the engine: what it forbids is never said, and nothing else changes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from decode.adapters import good_adapter
from decode.cases import MODES, SCARCE, SIZE
from decode.models import CARD, MASK, STOP, VOCABULARY, pattern

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.request import Request
from mars_ray.errors import RequestError
from mars_ray.model.directory import PLAIN

LENGTH = 18


class Rising:
    """Numbers 0 .. 19 whose parity changes from one to the next, `length` of them, then the stop.

    The first one is even and the last four are 2, 7, 2, 7: with the stop, five tokens are forced.
    """

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def start(self) -> "RisingState":
        return RisingState(self.length)


class RisingState:
    def __init__(self, length: int) -> None:
        self._length = length
        self._said: list[int] = []

    def _next(self, said: Sequence[int]) -> list[int]:
        if len(said) >= self._length:
            return [STOP] if len(said) == self._length else []
        if len(said) >= self._length - 4:
            return [(2, 7)[len(said) % 2]]
        return [number for number in range(20) if number % 2 == len(said) % 2]

    def allowed(self, back: int, tokens: Sequence[int]) -> np.ndarray:
        start = len(self._said) - back
        path = [*self._said[start:], *tokens]
        allowed_RV = np.ones((len(path) + 1, VOCABULARY), np.bool_)
        for row in range(len(path) + 1):
            following = self._next(self._said[:start] + path[:row])
            allowed_RV[row] = np.isin(np.arange(VOCABULARY), following)
            if row < len(path) and path[row] not in following:
                break
        return allowed_RV

    def admissible(self, tokens: Sequence[int]) -> int:
        said = list(self._said)
        for count, token in enumerate(tokens):
            if token not in self._next(said):
                return count
            said.append(token)
        return len(tokens)

    def forced(self) -> list[int]:
        said = list(self._said)
        while len(following := self._next(said)) == 1:
            said += following
        return said[len(self._said) :]

    def consume(self, tokens: Sequence[int]) -> None:
        assert self.admissible(tokens) == len(tokens)
        self._said += tokens


def request(name: str, mode, start: int = 3, **fields) -> Request:
    prompt = tuple(pattern(start, 1 + start % 3, 6))
    settings = {"sampling": Sampling(), "max_new_tokens": 30, "grammar": Rising()} | fields
    return Request(name, prompt, mode, stop_ids=frozenset({STOP}), **settings)


@torch.no_grad()
def greedy(model, prompt: Sequence[int], limit: int = 30) -> list[int]:
    """Token by token, each the best that the grammar allows."""
    state, tokens = Rising().start(), list(prompt)
    while len(tokens) - len(prompt) < limit:
        logits_V = model(torch.tensor([tokens])).logits[0, -1]
        logits_V[MASK] = -torch.inf
        logits_V[~torch.from_numpy(state.allowed(0, [])[0])] = -torch.inf
        tokens.append(int(logits_V.argmax()))
        if tokens[-1] == STOP:
            break
        state.consume(tokens[-1:])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_keeps_to_the_grammar(model, mode):
    """Guards a proposal that is committed though the grammar forbids it, at any threshold."""
    engine = Engine(model, CARD, SIZE)
    requests = [request(f"r{start}", mode, start) for start in range(6)]
    for done in generate_all(engine, requests):
        assert done.finish_reason == "stop"
        state = Rising().start()
        assert state.admissible(done.tokens) == len(done.tokens) == LENGTH + 1


@pytest.mark.parametrize(
    "mode", [m for m in MODES if isinstance(m, ExactMode) or str(m).startswith("threshold=1")]
)
def test_lossless_modes_say_what_plain_decoding_under_the_grammar_says(model, mode):
    """Drafts, forced tokens and the lack of pages change how long it takes, not what is said."""
    engine = Engine(model, CARD, SCARCE)
    requests = [request(f"r{start}", mode, start, max_new_tokens=22) for start in range(8)]
    for asked, done in zip(requests, generate_all(engine, requests), strict=True):
        assert list(done.tokens) == greedy(model, asked.prompt, 22)


@pytest.mark.parametrize("mode", [VerifiedMode(), ConfidenceMode(threshold=0.2)], ids=str)
def test_a_head_proposes_and_the_grammar_cuts(model, mode):
    """As of masks by themselves: what is forbidden is no draft and never said."""
    engine = Engine(model, PLAIN, SIZE, adapter=good_adapter(model))
    requests = [request(f"r{start}", mode, start) for start in range(6)]
    for asked, done in zip(requests, generate_all(engine, requests), strict=True):
        assert Rising().start().admissible(done.tokens) == len(done.tokens) == LENGTH + 1
        if mode == VerifiedMode():
            assert list(done.tokens) == greedy(model, asked.prompt)


def test_sampled_verified_is_sampled_exact(model):
    """The noise is drawn before the grammar cuts, so it is the same for both."""
    engine = Engine(model, CARD, SIZE)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    plain = generate_all(engine, [request("a", ExactMode(), sampling=sampling)])[0]
    drafted = generate_all(engine, [request("b", VerifiedMode(), sampling=sampling)])[0]
    assert drafted.tokens == plain.tokens
    assert drafted.forwards < plain.forwards


def test_forced_tokens_need_no_forwards_of_their_own(model):
    """Four drafts and the row's own: five forced tokens span two forwards at most."""
    engine = Engine(model, CARD, SIZE)
    for done in generate_all(engine, [request(f"r{n}", VerifiedMode(), n) for n in range(6)]):
        assert len(set(done.token_forward[-5:])) <= 2


def test_a_request_without_a_grammar_is_not_touched(model):
    """Batch-mates of a constrained request say what they say alone."""
    engine = Engine(model, CARD, SIZE)
    free = request("free", ConfidenceMode(threshold=0.5), grammar=None)
    alone = generate_all(engine, [free])[0]
    together = generate_all(engine, [request("bound", VerifiedMode()), free])[1]
    assert together == alone


def test_a_least_length_and_a_grammar_exclude_each_other(model):
    """Guards a row in which no token is left."""
    engine = Engine(model, CARD, SIZE)
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", ExactMode(), sampling=Sampling(min_new_tokens=3)))
    assert caught.value.field == "min_tokens"
