"""Layers that share an input, as two products."""

import torch

from mars_ray.model.draft_adapter import Lora, side_by_side


def test_side_by_side_equals_one_by_one():
    """Guards the blocks: a layer without LoRA gets zeros, and no layer gets another's part."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, value = Lora(numbers(2, 5), numbers(4, 2)), Lora(numbers(3, 5), numbers(6, 3))
    product = side_by_side([query, None, value], [4, 3, 6], scale=0.5)
    assert product is not None
    x_MI = numbers(7, 5)
    expected_MO = torch.cat(
        [
            0.5 * (x_MI @ query.down_RI.T) @ query.up_OR.T,
            torch.zeros(7, 3),
            0.5 * (x_MI @ value.down_RI.T) @ value.up_OR.T,
        ],
        dim=1,
    )
    torch.testing.assert_close(product.inner(x_MI) @ product.up_KO, expected_MO)
    assert side_by_side([None, None], [4, 3], scale=0.5) is None
