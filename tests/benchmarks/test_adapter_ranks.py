"""Draft adapters cut to a lower rank."""

import torch
from adapter_ranks import cut

from mars_ray.model.directory import DraftCard
from mars_ray.model.draft_adapter import DraftAdapter, Lora


def adapter() -> DraftAdapter:
    card = DraftCard(2, "base", "0", rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    torch.manual_seed(0)
    lora = {
        f"model.layers.0.self_attn.{name}": Lora(torch.randn(4, 12), torch.randn(10, 4))
        for name in card.targets
    }
    return DraftAdapter(card, torch.zeros(2, 12), lora, None)


def test_a_cut_adapter_is_the_nearest_of_its_rank():
    """As far from the whole as the singular values that are left out say (Eckart and Young)."""
    whole = adapter()
    for rank in (1, 3, 4):
        found = cut(whole, rank)
        assert (found.card.rank, found.card.scale) == (rank, whole.card.scale)
        for name, (down_RI, up_OR) in found.lora.items():
            assert down_RI.shape[0] == up_OR.shape[1] == rank
            product = whole.lora[name].up_OR @ whole.lora[name].down_RI
            left_out = torch.linalg.svdvals(product)[rank:4].square().sum().sqrt()
            distance = torch.linalg.norm(product - up_OR @ down_RI)
            torch.testing.assert_close(distance, left_out, atol=1e-4, rtol=1e-4)


def test_a_matrix_is_left_out():
    found = cut(adapter(), 2, "v_proj")
    assert found.card.targets == ("q_proj",)
    assert list(found.lora) == ["model.layers.0.self_attn.q_proj"]
