"""What the plug-in refuses when an engine starts, and in requests.

An engine that fails takes the process group of others with it, so this file comes last.
"""

from pathlib import Path
from typing import Any

import pytest
from decode.models import trained_model

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from in_vllm.conftest import WIDE
from in_vllm.engines import answers, mars_engine

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("wish", [{"threshold": 2}, {"treshold": 0.5}])
def test_a_request_that_cannot_be_meant(checkpoint: Path, wish: dict[str, Any]):
    """By name, as the service refuses a field, and before it reaches the engine."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=next(iter(wish))):
        answers(mars_engine(checkpoint), [[1, 2, 3]], extra_args={"mars": wish})


def test_an_adapter_of_another_base_is_refused(checkpoint: Path, good: Path, tmp_path: Path):
    """By the fingerprint of its weights, as in our own engine."""
    trained_model(steps=1, **WIDE).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="is another model"):
        mars_engine(tmp_path, mars={"adapter": str(good)})


@pytest.mark.parametrize(
    ("masks", "mars", "message"),
    [
        (5, {}, "at most 8"),
        (2, {"adaptor": "x"}, "adaptor"),
        (2, {"adapter": "/nowhere"}, "draft adapter"),
    ],
)
def test_wrong_settings_are_refused(checkpoint: Path, masks: int, mars: Any, message: str):
    """A setting that cannot be meant must not be dropped."""
    with pytest.raises(RuntimeError, match=message):
        mars_engine(checkpoint, masks, mars=mars)


def test_a_model_without_masks_is_refused(base: Path):
    """It would decode with masks that nobody has trained."""
    with pytest.raises(RuntimeError, match="name a draft adapter"):
        mars_engine(base)
