"""What vLLM calls in each of its processes, by the entry point group `vllm.general_plugins`."""

from functools import wraps
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from mars_ray.vllm.settings import asked_for

_registered = False


def register() -> None:
    """Let masks pass through the scheduler's check of drafts by a grammar.

    Nothing changes for engines that were not asked for MARS. What the model runner needs is done by
    the proposer, in the processes that have one.
    """
    global _registered
    if _registered:
        return
    _registered = True
    original = StructuredOutputManager.validate_tokens

    @wraps(original)
    def validate_tokens(manager: Any, request: Any, spec_tokens: list[int]) -> list[int]:
        valid = original(manager, request, spec_tokens)
        if not request.use_structured_output or not asked_for(manager.vllm_config):
            return valid
        # A grammar ends at the first padding; masks behind shorter drafts are as good.
        masks = spec_tokens[len(strip_speculative_padding(spec_tokens)) :]
        return [*valid, *masks]

    StructuredOutputManager.validate_tokens = validate_tokens
