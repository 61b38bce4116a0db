"""Counter-based draws."""

import torch

from mars_ray.core.sampling import uniform


def test_draws_are_uniform_and_differ_by_every_key():
    """Guards a mixer that forgets a key: the three samples would be equal or correlated."""
    index = torch.arange(20_000)
    first, second = uniform(7, 1, index), uniform(7, 2, index)
    other_order = uniform(1, 7, index)
    for draws in (first, second, other_order):
        assert draws.min() >= 0
        assert draws.max() < 1
        # Mean 0.5 with standard error 0.002: five of them.
        assert abs(float(draws.mean()) - 0.5) < 0.01
        assert torch.histc(draws, 10, 0, 1).min() > 1_700
    for a, b in ((first, second), (first, other_order)):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.04


def test_a_draw_does_not_depend_on_its_neighbours():
    """Guards generator state: the text of a request must not depend on its batch."""
    batch = uniform(3, torch.tensor([5, 6, 7]))
    assert float(batch[1]) == float(uniform(3, 6))
    assert float(uniform(-1)) != float(uniform((1 << 63) - 1))


def test_keys_broadcast():
    """Guards a flattening of tensor keys."""
    draws = uniform(0, torch.arange(2)[:, None], torch.arange(3)[None, :])
    assert draws.shape == (2, 3)
    assert float(draws[1, 2]) == float(uniform(0, 1, 2))
