"""Adapters and compilation: what is trained in another way is an ordinary model in the end."""

import pytest
import torch
from safetensors.torch import load_file
from train.small_jobs import losses, make_job, make_model, make_plan, run_alone
from transformers import AutoModelForCausalLM

from mars_ray.config.train import TrainJob
from mars_ray.model.adapters import adapter_weights, add_adapters, merged
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_model
from mars_ray.model.shape import shape_of
from mars_ray.train.checkpoint import directory_of
from mars_ray.train.plan import StagePlan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


def lora_plan(model, output_dir) -> StagePlan:
    job = make_job(model, output_dir).model_dump()
    job["stages"]["mars"]["lora"] = {"rank": 4, "alpha": 16}
    return make_plan(TrainJob.model_validate(job), model)


def test_adapters_train_resume_and_end_as_an_ordinary_model(model, tmp_path):
    """Guards the merge, which loses the adapters: a resumed run must not start them anew."""
    plan, again = lora_plan(model, tmp_path / "a"), lora_plan(model, tmp_path / "b")
    outcome = run_alone(plan)
    curve = losses(plan)
    assert sum(curve[-5:]) < 0.97 * sum(curve[:5])
    run_alone(again, directory_of(plan.run_dir, 10))
    assert losses(again) == curve[10:]
    before = load_file(model / "model.safetensors")
    after = load_file(outcome.checkpoint / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    embedding = "model.embed_tokens.weight"
    assert changed == {name for name in before if "_proj.weight" in name} | {embedding}
    rows = (before[embedding] != after[embedding]).any(dim=1).nonzero().flatten().tolist()
    assert rows == [read_card(model).mask_token_id]
    AutoModelForCausalLM.from_pretrained(outcome.checkpoint / "model")


def test_the_merged_model_computes_what_the_adapters_do(model):
    """Guards scale and transposition of the product that is added."""
    plain, adapted = (load_model(model, dtype=torch.float32) for _ in range(2))
    mask_id = read_card(model).mask_token_id
    add_adapters(adapted, mask_id, rank=4, alpha=8, dropout=0.0, seed=0)
    torch.manual_seed(1)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data.normal_(std=0.1)
    weights = adapted.state_dict()
    assert sum(p.numel() for p in adapter_weights(weights).values()) == sum(
        p.numel() for p in trained
    )
    size = adapted.config.hidden_size
    assert shape_of(model).adapter_parameters(4) + size == sum(p.numel() for p in trained)
    plain.load_state_dict(merged(adapted, weights, mask_id))
    ids = torch.tensor([[*range(20), mask_id]])
    found, expected = plain(ids).logits, adapted(ids).logits
    # The head shares the mask's row, and nothing predicts the mask.
    found[..., mask_id] = expected[..., mask_id] = 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_shape_counts_a_models_parameters(model):
    """Guards the memory estimate: biases, norms and a tied head."""
    loaded = load_model(model, dtype=torch.float32)
    assert shape_of(model).parameters == sum(p.numel() for p in loaded.parameters())


@pytest.mark.long
def test_a_compiled_model_has_the_same_curve(tmp_path):
    """Guards `compile`: names in checkpoints, batches of changing width, and the loss."""
    # One layer: the compiler's time grows with them.
    model = make_model(tmp_path / "model", layers=1)
    job = make_job(model, tmp_path / "a").model_dump()
    job["data"]["eval"] = None
    job["stages"]["mars"]["steps"] = 3
    plan = make_plan(TrainJob.model_validate(job), model)
    other = job | {"output_dir": str(tmp_path / "b"), "compile": True}
    compiled = make_plan(TrainJob.model_validate(other), model)
    run_alone(plan)
    outcome = run_alone(compiled)
    assert losses(compiled) == pytest.approx(losses(plan), rel=1e-4)
    names = load_file(outcome.checkpoint / "model" / "model.safetensors").keys()
    assert names == load_file(model / "model.safetensors").keys()
