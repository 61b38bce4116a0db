"""Repairs vLLM's CPU build, whose speculation ignores the temperature, top-k and top-p.

Its stand-in for the kernel that repeats a request's value for each of its drafts writes into a copy
of the result, unless that is int64. Versions without the fault are left alone: it is looked for.

Shape suffixes: B requests, N drafts of all requests.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

log = init_logger(__name__)


def repair_expansion() -> None:
    """Replace the function in this process if it is at fault."""
    if current_platform.is_cpu() and not _works():
        log.info("vLLM's CPU build loses sampling parameters of drafts: repaired")
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _works() -> bool:
    value_B = torch.tensor([0.5, 0.25])
    end_B = torch.tensor([1, 3], dtype=torch.int32)
    found_N = rejection_sampler.expand_batch_to_tokens(value_B, end_B, 3)
    return torch.equal(found_N, torch.tensor([0.5, 0.25, 0.25]))


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each request's value, once for each of its drafts; `replace_from` becomes `replace_to`."""
    count_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    value_B = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return value_B.repeat_interleave(count_B.long(), output_size=num_tokens)
