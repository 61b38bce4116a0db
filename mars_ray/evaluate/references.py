"""How likely a model finds the reference answers: their negative log-likelihood.

Shape suffixes: R rows of a conversation, A rows that predict the answer, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.data.chat import Plan, encoder_of
from mars_ray.decode.loading import engine_model
from mars_ray.errors import DataError
from mars_ray.evaluate.grading import reference_text
from mars_ray.evaluate.tasks import Problem
from mars_ray.model.card import read_card
from mars_ray.model.forward import hidden_states, output_head
from mars_ray.model.load import read_config
from mars_ray.model.shape import most_positions

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
