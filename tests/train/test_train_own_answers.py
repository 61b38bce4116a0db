"""The noisy stream on the model's own answers, and the clean one held to the starting model."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from core.rows import MASK, batch_of
from pydantic import ValidationError
from train.small_jobs import make_job, make_model, make_plan, records, run_alone
from train.test_train_step import ROWS, make_step

from mars_ray.config.train import ConstantBlockSize, MarsObjective
from mars_ray.core.layout import Layout
from mars_ray.core.loss import row_coefficients
from mars_ray.data.corpus import problems
from mars_ray.train.model_step import StageObjective, TrainStep, layout_tensors, step_counts

PAIRS = ConstantBlockSize(size=2)


def objective(**settings) -> StageObjective:
    """Of the four conversations of `ROWS`, the last two are the model's own."""
    return StageObjective(MarsObjective(block_size=PAIRS, **settings), 0, MASK, own_from=2)


def loss_of(step: TrainStep, layout: Layout) -> torch.Tensor:
    coefficient_BR = row_coefficients(layout, step_counts([layout])[:2], 2.0)
    loss, _ = step(coefficient_BR=coefficient_BR, **layout_tensors(layout, torch.device("cpu")))
    return loss


def anchored(step: TrainStep, anchor: torch.nn.Module) -> TrainStep:
    return TrainStep(step.model, 0.0, anchor)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("noisy_on", "conversations"), [("own", [2, 3]), ("all", [0, 1, 2, 3])])
def test_whose_words_the_noisy_stream_learns(noisy_on, conversations):
    layout = objective(noisy_on=noisy_on).layout(batch_of(*ROWS), 0.0)
    noisy = layout.document_BR[(layout.depth_BR > 0) & (layout.weight_BR > 0)]
    assert noisy.unique().tolist() == conversations


def test_a_model_that_has_not_moved_pays_nothing_to_its_anchor():
    """KL to itself is 0, and so is its gradient; after a move it is not."""
    step = make_step()
    anchor = copy.deepcopy(step.model).requires_grad_(False)
    layout = objective(anchor_weight=1.0).layout(batch_of(*ROWS), 0.0)
    own = layout.document_BR >= 2
    only_own = replace(layout, weight_BR=layout.weight_BR * own * ~layout.is_noisy_BR)
    still = loss_of(anchored(step, anchor), only_own)
    still.backward()
    norm = torch.stack([p.grad.norm() for p in step.parameters() if p.grad is not None]).norm()
    assert still.item() == pytest.approx(0, abs=1e-6)
    assert norm.item() == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    assert loss_of(anchored(step, anchor), only_own).item() > 1e-3


def test_without_an_anchor_own_words_do_not_touch_the_clean_stream():
    """Guards the drift: the gradient of clean rows of own answers must be exactly nothing."""
    step = make_step()
    batch = batch_of(*ROWS)
    layout = objective().layout(batch, 0.0)
    own_clean = (layout.document_BR >= 2) & ~layout.is_noisy_BR
    assert not layout.weight_BR[own_clean].any()
    assert torch.isfinite(loss_of(step, layout))


def test_a_stage_trains_on_own_answers_from_a_file(tmp_path: Path):
    """End to end on one rank: finite losses, evaluation on data, the same losses when repeated."""
    model = make_model(tmp_path / "model")
    own = tmp_path / "own.jsonl"
    rows = [{"prompt": p.question, "response": p.solution} for p in problems("train", 32, 5)]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = []
    for name in ("first", "second"):
        job = make_job(model, tmp_path / name)
        table = job.model_dump(mode="json")
        table["data"]["own"] = {"type": "files", "paths": [str(own)]}
        table["stages"]["mars"]["objective"]["anchor_weight"] = 1.0
        table["stages"]["mars"]["steps"] = 4
        plan = make_plan(type(job).model_validate(table), model)
        assert plan.own_from == 64
        outcome = run_alone(plan)
        assert outcome.metrics["eval_tokens_per_forward"] >= 1
        curves.append([line["loss"] for line in records(plan)])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 4


def test_settings_without_own_answers_are_refused(tmp_path: Path):
    table = make_job(tmp_path, tmp_path).model_dump(mode="json")
    table["stages"]["mars"]["objective"]["anchor_weight"] = 1.0
    with pytest.raises(ValidationError, match="anchor_weight has no effect"):
        type(make_job(tmp_path, tmp_path)).model_validate(table)
