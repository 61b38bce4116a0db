"""Answers, with what their steps report besides the tokens; and how likely the references are.

Shape suffixes: R rows of a conversation, A rows that predict the answer, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import Mode
from mars_ray.core.statistics import is_looping
from mars_ray.data.chat import Plan, encoder_of
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import engine_model
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import DataError
from mars_ray.evaluate.tasks import Problem, reference_text
from mars_ray.model.directory import read_card
from mars_ray.model.forward import hidden_states, output_head
from mars_ray.model.load import read_config
from mars_ray.model.shape import most_positions


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished sequence."""

    completion: Completion
    disagreed: int  # tokens that the model itself would not have chosen
    log_p: float | None  # sum of the tokens' log-probabilities, if the request asks for them

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.tokens

    @property
    def is_looping(self) -> bool:
        """Whether the answer repeats itself at its end."""
        return is_looping(self.tokens)


@dataclass(frozen=True, slots=True)
class ModeAnswers:
    mode: Mode
    answers: list[Answer]
    texts: list[str]
    correct: list[bool | None]  # None for a problem without a reference answer
    seconds: float

    def first_differences(self, exact: "ModeAnswers") -> list[int | None]:
        """How many tokens each answer has in common with that of `exact` before the first that
        differs; None where none does."""
        pairs = [(a.tokens, b.tokens) for a, b in zip(self.answers, exact.answers, strict=True)]
        return [None if a == b else in_common(a, b) for a, b in pairs]


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements two sequences have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def answer_all(
    engine: Engine, requests: Sequence[Request], advance: Callable[[], None]
) -> list[Answer]:
    """Decode requests in batches; returns answers in the order of the requests.

    Raises RequestError, or the error of a request that failed; no request is left in the engine.
    """
    log_p = {request.id: 0.0 for request in requests}
    asked = {request.id: request.logprobs is not None for request in requests}
    done: dict[str, Answer] = {}
    try:
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if event.failure:
                    raise event.failure
                log_p[event.request_id] += sum(token.logprob for token in event.logprobs)
                if event.completion:
                    known = log_p[event.request_id] if asked[event.request_id] else None
                    done[event.request_id] = Answer(event.completion, event.disagreed, known)
                    advance()
    finally:
        for request in requests:
            engine.cancel(request.id)
    engine.check_integrity()
    return [done[request.id] for request in requests]


# A prompt and its reference, both as token ids.
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A reference answer: its length, and the sum of its tokens' negative log-probabilities."""

    tokens: int
    nll: float


def reference_pairs(
    job: EvaluateJob,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Pair]:
    """The prompts whose references are texts, with these. Raises DataError, naming the line, if a
    reference does not fit the model."""
    encoder, most = encoder_of(tokenizer), most_positions(read_config(job.checkpoint))
    pairs = []
    for problem, prompt in zip(problems, prompts, strict=True):
        text = None if problem.answer is None else reference_text(problem.answer)
        if not text:
            continue
        reference = encoder.encode([Plan(((text, True),))])[0].input_ids.tolist()
        if len(prompt) + len(reference) > most:
            raise DataError(
                f"{problem.origin}: the prompt and its reference are "
                f"{len(prompt) + len(reference)} tokens, and this model knows {most} positions: "
                "shorten the reference, or take the line out"
            )
        pairs.append((prompt, reference))
    return pairs


@torch.inference_mode()
def score_references(
    job: EvaluateJob, pairs: Sequence[Pair], advance: Callable[[], None]
) -> list[Scored]:
    """Score each reference behind its prompt, by the job's model as its engine has it."""
    model, mask = engine_model(job.checkpoint, job.engine), read_card(job.checkpoint).mask_token_id
    scored = []
    for prompt, reference in pairs:
        ids = torch.tensor([[*prompt, *reference]], device=model.device)
        rows = ids.shape[1]
        sees_RR = torch.ones(rows, rows, dtype=torch.bool, device=model.device).tril()
        position = torch.arange(rows, device=model.device)[None]
        hidden = hidden_states(model, ids, position, sees_RR[None, None])
        # The row of a token predicts the next one.
        logits_AV = output_head(model)(hidden[0, len(prompt) - 1 : -1]).float()
        if mask is not None:
            # As in the engine: it is never said.
            logits_AV[:, mask] = -torch.inf
        nll = torch.nn.functional.cross_entropy(logits_AV, ids[0, len(prompt) :], reduction="sum")
        scored.append(Scored(len(reference), nll.item()))
        advance()
    return scored
