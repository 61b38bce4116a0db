"""What a job of draft adapters may say, and what of it would have no effect."""

import pytest
from pydantic import ValidationError

from mars_ray.config.train import TrainJob, evaluated_metrics

DRAFT = {
    "objective": {"type": "draft"},
    "adapter": {},
    "optimizer": {"learning_rate": 4e-3},
    "steps": 10,
    "global_batch_size": 1,
}
AR = {
    "objective": {"type": "ar"},
    "optimizer": {"learning_rate": 1e-3},
    "steps": 1,
    "global_batch_size": 1,
}
PRESET = {"type": "preset", "preset": "tiny"}


def job_of(stages: dict | None = None, **changes) -> TrainJob:
    table = {
        "name": "t",
        "output_dir": "runs/t",
        "model": {"type": "pretrained", "path": "org/name"},
        "data": {"train": {"type": "corpus", "count": 10}},
        "stages": stages or {"draft": DRAFT},
    }
    return TrainJob.model_validate(table | changes)


def test_a_job_survives_json():
    """Guards what is kept with every checkpoint: defaults written out are no contradiction."""
    for adapter in ({}, {"rank": 0}, {"head_size": 0}):
        job = job_of({"draft": DRAFT | {"adapter": adapter}})
        assert TrainJob.model_validate_json(job.model_dump_json()) == job


def test_drafts_follow_what_is_trained_before():
    """A stage may train the model first, whatever it started from."""
    job_of({"ar": AR, "draft": DRAFT, "deeper": DRAFT}, model=PRESET)


def test_the_best_may_be_the_fastest():
    """Guards `checkpoint.best`, which is checked against what a stage evaluates."""
    job = job_of(
        data={"train": {"type": "corpus", "count": 10}, "eval": {"type": "corpus", "count": 5}},
        checkpoint={"best": {"metric": "eval_tokens_per_forward"}},
    )
    assert "eval_acceptance_4" in evaluated_metrics(job.stages["draft"].objective)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": None}, "needs a section"),
        ({"objective": {"type": "ar"}}, "only objective draft trains one"),
        ({"lora": {}}, "adapter.rank is its LoRA"),
        ({"adapter": {"rank": 0, "alpha": 8}}, "no effect with rank 0"),
        (
            {"adapter": {"rank": 0, "head_size": 0, "train_mask_embeddings": False}},
            "adapter has nothing to train",
        ),
        (
            {
                "objective": {"type": "draft", "head_loss_weight": 0},
                "adapter": {"rank": 0, "train_mask_embeddings": False},
            },
            "head_loss_weight 0 would train nothing",
        ),
        ({"adapter": {"targets": ["q_proj", "q_proj"]}}, "named twice"),
        ({"adapter": {"targets": ["lm_head"]}}, "targets"),
        ({"objective": {"type": "draft", "grids": 5}}, "more than the block size 4"),
        (
            {"objective": {"type": "draft", "row_loss_weight": 0, "head_loss_weight": 0}},
            "are both 0",
        ),
        (
            {
                "objective": {"type": "draft", "head_loss_weight": 2},
                "adapter": {"head_size": 0},
            },
            "head_loss_weight has no effect",
        ),
        (
            {"objective": {"type": "draft", "row_loss_weight": 0}, "adapter": {"head_size": 0}},
            "would train nothing",
        ),
        (
            {"objective": {"type": "draft", "depth_weights": [0, 0, 0, 0, 1]}},
            "depth_weights are zero",
        ),
    ],
)
def test_stages_that_contradict_themselves_are_refused(change, message):
    """Guards settings that would be ignored."""
    with pytest.raises(ValidationError, match=message):
        job_of({"draft": DRAFT | change})


@pytest.mark.parametrize(
    ("stages", "changes", "message"),
    [
        ({"draft": DRAFT}, {"model": PRESET}, "needs model.type pretrained"),
        ({"draft": DRAFT, "ar": AR}, {}, "come last"),
        ({"draft": DRAFT}, {"compile": True}, "compile has no effect"),
    ],
)
def test_jobs_that_contradict_themselves_are_refused(stages, changes, message):
    """Guards a preset's random weights as the model that must stay as it is, and the like."""
    with pytest.raises(ValidationError, match=message):
        job_of(stages, **changes)
