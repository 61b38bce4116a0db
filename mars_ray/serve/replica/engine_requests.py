"""The engine's requests for a call, once its prompts are tokens."""

import time
from collections.abc import Sequence

from mars_ray.decode.request import EngineFacts, Grammar, Request
from mars_ray.serve.protocol import GenerationRequest

_SEEDS = 1 << 64


def engine_requests(
    call: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    facts: EngineFacts,
    grammar: Grammar | None,
) -> list[Request]:
    """A request for each choice; those of one prompt differ in their seeds."""
    deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
    own_stops = frozenset[int]() if call.ignore_eos else facts.stop_ids
    return [
        Request(
            id=f"{call.id}-{number * call.n + copy}",
            prompt=prompt,
            mode=call.mode,
            sampling=call.sampling.model_copy(update={"seed": _seed(call.sampling.seed + copy)}),
            max_new_tokens=_max_new_tokens(call, prompt, facts),
            stop_ids=own_stops.union(call.stop_token_ids),
            priority=call.priority,
            logprobs=call.logprobs,
            prompt_logprobs=call.logprobs if call.is_echoed else None,
            grammar=grammar,
            quality=call.quality,
            deadline=deadline,
        )
        for number, prompt in enumerate(prompts)
        for copy in range(call.n)
    ]


def _max_new_tokens(call: GenerationRequest, prompt: Sequence[int], facts: EngineFacts) -> int:
    """What was asked for, or what the context has left behind the prompt if that is less."""
    # At least one, so that the engine refuses a prompt without room, or with too little for the
    # least length.
    least = max(1, call.sampling.min_new_tokens)
    room = max(least, facts.max_context - len(prompt))
    return min(room, call.max_new_tokens or call.new_tokens_limit)


def _seed(seed: int) -> int:
    """The seed within the range that a request's may have."""
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
