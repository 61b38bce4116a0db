"""What steps of a vLLM engine cost, from a few timed answers before traffic comes.

vLLM itself runs every kernel when it starts; steps cannot be asked of it one by one.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import random
from collections.abc import Iterable, Iterator

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.core.step_cost import StepCost, row_counts
from mars_ray.decode.request import EngineFacts, Request
from mars_ray.serve.replica.vllm_counts import StepSeen

# Tokens of an answer, and so steps of each batch size that are timed.
_TOKENS = 8
# Tokens of its prompt; more would make a cold start with large batches long.
_PROMPT = 32
# Most rows of a prompt that are measured at once, as a cold start should be short.
_MOST_PROMPT = 512
# Steps of a prompt that are timed.
_PROMPTS = 3


def loads(facts: EngineFacts, step_tokens: int) -> Iterator[list[Request]]:
    """Requests to run together, one list after another: batches of every size that is measured,
    and prompts that fill a step alone."""
    tokens = min(_TOKENS, facts.max_context - 1)
    for sequences in row_counts(facts.max_batch):
        if sequences <= facts.max_batch:
            length = min(_PROMPT, facts.max_context - tokens)
            yield [_request(f"{sequences}-{n}", length, tokens, facts) for n in range(sequences)]
    for number in range(_PROMPTS):
        length = min(_MOST_PROMPT, step_tokens, facts.max_context - 1)
        yield [_request(f"prompt-{number}", length, 1, facts)]


def step_cost(seen: Iterable[StepSeen]) -> StepCost:
    """The least seconds of steps of so many rows: of decoding sequences alone, or of one prompt."""
    least: dict[int, float] = {}
    for step in seen:
        if step.prompt_rows == 0 or step.sequences == 0:
            least[step.rows] = min(step.seconds, least.get(step.rows, step.seconds))
    return StepCost(least)


def _request(name: str, length: int, tokens: int, facts: EngineFacts) -> Request:
    """A prompt that no other begins with, so that none is found in the prefix cache."""
    chosen = random.Random(name)
    prompt = tuple(chosen.randrange(facts.vocabulary) for _ in range(length))
    name = f"warm-up-{name}"
    return Request(name, prompt, ExactMode(), Sampling(), tokens, frozenset())
