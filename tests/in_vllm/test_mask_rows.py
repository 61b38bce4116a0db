"""The two forms of the rows that are masks do the same."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from mars_ray.model.draft_adapter import LoraProduct
from mars_ray.vllm.mask_rows import GatedRows, IndexedRows

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("places", [[3, 4, 5], [1, 2, 6], []], ids=["slice", "apart", "none"])
def test_a_gate_does_what_places_do(places: list[int]):
    """Guards the form that CUDA graphs record, which no CPU run uses: masks are changed, other rows
    keep every bit, and a row with infinities spoils nothing."""
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(8, 5, generator=generator)
    x_NI[7] = torch.inf
    product = LoraProduct(
        torch.randn(5, 2, generator=generator), torch.randn(2, 4, generator=generator)
    )
    mask_DH = torch.randn(3, 4, generator=generator)
    before_NO = torch.randn(8, 4, generator=generator)
    device = torch.device("cpu")
    found = []
    for rows in (IndexedRows(device), GatedRows(16, device)):
        rows.begin(places, list(range(len(places))))
        added_NO, embedded_NH = before_NO.clone(), before_NO.clone()
        rows.add(added_NO, x_NI, product)
        rows.embed(embedded_NH, mask_DH)
        found.append((added_NO, embedded_NH))
        rows.end()
        after_NO = before_NO.clone()
        rows.add(after_NO, x_NI, product)
        assert torch.equal(after_NO, before_NO)
    (added_NO, embedded_NH), gated = found
    torch.testing.assert_close(gated, (added_NO, embedded_NH))
    others = [row for row in range(8) if row not in places]
    assert torch.equal(added_NO[others], before_NO[others])
    assert torch.equal(embedded_NH[places], mask_DH[: len(places)])
    if places:
        expected_MO = before_NO[places] + x_NI[places] @ product.down_IK @ product.up_KO
        torch.testing.assert_close(added_NO[places], expected_MO)
