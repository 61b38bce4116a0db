"""Counter-based random numbers: a draw is a pure function of its keys.

Neither the batch a sample sits in, nor the rank, nor a restart can change a draw, because there is
no generator state. The mixer is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _signed(key: int) -> int:
    """Any Python integer as the int64 of its low 64 bits."""
    return (key + (1 << 63)) % (1 << 64) - (1 << 63)


def uniform(*keys: int | Tensor) -> Tensor:
    """Draws in [0, 1), float64, one for each element of the broadcast keys.

    Keys are integers or int64 tensors; their order matters.
    """
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        word = key if isinstance(key, Tensor) else torch.tensor(_signed(key), dtype=torch.int64)
        # A host number is added as it is: a copy to the device would be waited for.
        state = _mix(state + word + _GAMMA)
    # 53 bits: the mantissa of a double, so 1.0 is never reached.
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53
