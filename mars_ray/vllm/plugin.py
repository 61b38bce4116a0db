"""What vLLM calls in each of its processes, by the entry point group `vllm.general_plugins`."""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from functools import wraps
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from mars_ray.errors import ConfigError
from mars_ray.vllm.settings import PROPOSER, asked_for, request_options

_registered = False


def register() -> None:
    """Extend what checks requests and drafts, in the processes that do.

    Nothing changes for engines that were not asked for MARS. What the model runner needs is done by
    the proposer, in the processes that have one.
    """
    global _registered
    if not _registered:
        _registered = True
        _let_masks_pass()
        _check_requests()


def _let_masks_pass() -> None:
    """The scheduler drops drafts that a grammar refuses, and everything behind; but not masks."""
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


def _check_requests() -> None:
    """A request with a setting of ours that cannot be meant is refused, as vLLM refuses its own."""
    original = SamplingParams._validate_spec_decode

    @wraps(original)
    def validate(params: Any, speculative_config: Any) -> None:
        original(params, speculative_config)
        if speculative_config is None or speculative_config.model != PROPOSER:
            return
        try:
            request_options(params)
        except ConfigError as error:
            raise VLLMValidationError(str(error), parameter="extra_args") from error

    SamplingParams._validate_spec_decode = validate
