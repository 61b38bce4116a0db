"""Training draft adapters: what is frozen, what goes on after a break, ranks, and what is left."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from model.small_hub import COMMIT, NAME, hub
from peft import PeftModel
from safetensors.torch import load_file
from train.draft_jobs import STEPS, draft_job, draft_plan, make_plain_model
from train.small_jobs import ignore_report, losses, make_plan, records, run_alone, spawn, try_alone

from mars_ray.config.train import TrainJob
from mars_ray.errors import MarsError, ModelError, NonFiniteLossError
from mars_ray.model.directory import ModelCard, fingerprint, write_card
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import directory_of
from mars_ray.train.plan import StagePlan, initial_model
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage

MASK = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_plain_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    """An undisturbed run."""
    plan = draft_plan(model, tmp_path_factory.mktemp("one"))
    run_alone(plan)
    return plan


def masters(plan: StagePlan, step: int = STEPS) -> dict[str, torch.Tensor]:
    """The adapter's float32 weights in a checkpoint."""
    return load_file(directory_of(plan.run_dir, step) / checkpoint.ADAPTERS)


def test_the_adapter_learns_and_says_how_it_was_made(model, one_rank):
    """Guards the way from steps to what is loaded for decoding, and its history."""
    directory = directory_of(one_rank.run_dir, STEPS) / checkpoint.MODEL
    adapter = read_draft_adapter(directory, model)
    for name, (_, up) in adapter.lora.items():
        assert up.any(), f"{name} has learned nothing"
    assert adapter.head is not None
    assert adapter.head.out_HK.any()
    first, last = records(one_rank)[0], records(one_rank)[-1]
    assert last["loss"] < 0.8 * first["loss"]
    told = adapter.card.training
    assert (told["job"], told["stage"], told["steps"]) == ("small", "draft", STEPS)
    assert told["mask_tokens"] == last["mask_tokens"] > 1000
    assert told["data"] == one_rank.data
    evaluated = records(one_rank, "eval")[-1]
    survived = sum(evaluated[f"acceptance_{depth}"] for depth in range(1, 5))
    assert evaluated["tokens_per_forward"] == pytest.approx(1 + survived)
    assert evaluated["row_tokens_per_forward"] >= 1


def test_the_base_is_untouched(model, tmp_path):
    """Guards the promise that answers stay the model's own: not one byte of its files changes."""

    def digests() -> dict[str, str]:
        files = sorted(path for path in model.rglob("*") if path.is_file())
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}

    before = digests()
    run_alone(draft_plan(model, tmp_path, stage={"steps": 2}))
    assert digests() == before


def test_a_resumed_run_equals_an_undisturbed_one(model, one_rank, tmp_path):
    """Guards float32 weights: those in `model/` are rounded to bfloat16."""
    resumed = draft_plan(model, tmp_path)
    run_alone(resumed, directory_of(one_rank.run_dir, 10))
    assert losses(resumed) == losses(one_rank)[10:]
    expected = masters(one_rank)
    for name, weight in masters(resumed).items():
        assert torch.equal(weight, expected[name]), name
    written = directory_of(resumed.run_dir, STEPS) / checkpoint.MODEL
    card, whole = (
        read_draft_card(directory_of(plan.run_dir, STEPS) / checkpoint.MODEL)
        for plan in (resumed, one_rank)
    )
    assert card.training["mask_tokens"] == whole.training["mask_tokens"]
    assert not list(written.glob("model*.safetensors"))


def test_other_loaders_find_an_ordinary_lora(model, one_rank):
    """Guards names, scale and transposition on disk: peft adds what mask rows were trained with."""
    directory = directory_of(one_rank.run_dir, STEPS) / checkpoint.MODEL
    adapter = read_draft_adapter(directory, model)
    plain = load_model(model, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    with_lora: Any = PeftModel.from_pretrained(plain, str(directory))
    after = with_lora.merge_and_unload().state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in adapter.lora}
    for name, (down, up) in adapter.lora.items():
        expected = before[f"{name}.weight"] + adapter.card.scale * up @ down
        torch.testing.assert_close(after[f"{name}.weight"], expected)


def test_mask_embeddings_may_stay_where_they_start(model, tmp_path):
    """What they bring is told by leaving them out; a resumed run finds them again."""
    adapter = {"rank": 4, "train_mask_embeddings": False}
    plan = draft_plan(model, tmp_path, stage={"adapter": adapter, "steps": 12})
    run_alone(plan)
    run_alone(plan, directory_of(plan.run_dir, 10))
    embedding_DH = masters(plan, 12)["mask_embedding_DH"]
    mean_H = load_model(model, dtype=torch.float32).get_input_embeddings().weight.mean(dim=0)
    torch.testing.assert_close(embedding_DH, mean_H.detach().expand_as(embedding_DH))
    assert masters(plan, 12)["head_out_HK"].any()


def test_a_mars_model_gets_a_head_alone(model, tmp_path):
    """Guards the head of a model that drafts by itself: it starts from the drafts that are there,
    and its rows stay what the fine-tuning has made of them."""
    base = shutil.copytree(model, tmp_path / "mars")
    token = load_tokenizer(base).convert_ids_to_tokens(MASK)
    write_card(base, ModelCard(token, MASK, 4))
    adapter = {"rank": 0, "train_mask_embeddings": False}
    stage = {"adapter": adapter, "objective": {"type": "draft", "row_loss_weight": 0}}
    plan = draft_plan(base, tmp_path / "run", stage=stage)
    run_alone(plan)
    row_H = load_model(base, dtype=torch.float32).get_input_embeddings().weight[MASK]
    written = read_draft_adapter(directory_of(plan.run_dir, STEPS) / checkpoint.MODEL, base)
    assert torch.equal(written.mask_embedding_DH.float(), row_H.bfloat16().float().expand(4, -1))
    assert not written.lora
    assert written.head is not None
    assert written.head.out_HK.any()
    first, last = records(plan)[0], records(plan)[-1]
    assert last["head_loss"] < first["head_loss"]
    assert last["row_loss"] == pytest.approx(first["row_loss"], rel=0.3)


def test_micro_batches_change_nothing(model, one_rank, tmp_path):
    """Guards the division by global counts: rows of short micro-batches would weigh more."""
    plan = draft_plan(model, tmp_path, stage={"micro_batch_size": 1})
    run_alone(plan)
    assert losses(plan) == pytest.approx(losses(one_rank), rel=1e-5)


def test_a_run_goes_on_from_an_adapter(model, one_rank, tmp_path):
    """Guards `start_from`: as good at once as what it starts from, also with more depths."""
    start = directory_of(one_rank.run_dir, STEPS) / checkpoint.MODEL
    adapter = {"rank": 4, "start_from": str(start), "alpha": 2.0}
    objective = {"type": "draft", "block_size": {"type": "constant", "size": 6}}
    stage = {"adapter": adapter, "objective": objective, "steps": 1}
    plan = draft_plan(model, tmp_path, stage=stage)
    run_alone(plan)
    assert records(plan)[0]["loss"] < 0.9 * records(one_rank)[0]["loss"]
    card = read_draft_card(directory_of(plan.run_dir, 1) / checkpoint.MODEL)
    assert card.depths == 6
    assert card.training["started_from"]["steps"] == STEPS


@pytest.mark.parametrize(
    ("adapter", "message"),
    [({"rank": 8}, "has rank 4, and the job's adapter 8"), ({"rank": 4, "head_size": 0}, "head")],
)
def test_an_adapter_of_another_shape_is_told(model, one_rank, tmp_path, adapter, message):
    """It could only be taken up in part."""
    start = directory_of(one_rank.run_dir, STEPS) / checkpoint.MODEL
    plan = draft_plan(model, tmp_path, stage={"adapter": adapter | {"start_from": str(start)}})
    error = try_alone(plan)
    assert isinstance(error, ModelError)
    assert message in str(error)


def test_numbers_that_are_none_end_the_run(model, tmp_path):
    """Guards a run that would go on with nothing; the last checkpoint must stay good."""
    rate = {"learning_rate": 1e30, "warmup_share": 0}
    plan = draft_plan(model, tmp_path, stage={"optimizer": rate})
    error = try_alone(plan)
    assert isinstance(error, NonFiniteLossError)
    assert "conversations" in str(error)


def test_bfloat16_trains_alike(model, one_rank, tmp_path):
    """Guards the types of the fast path: weights stay float32, losses are near float32's."""
    plan = draft_plan(model, tmp_path, precision="bfloat16")
    run_alone(plan)
    assert losses(plan) == pytest.approx(losses(one_rank), rel=0.1)
    assert {weight.dtype for weight in masters(plan).values()} == {torch.float32}


def test_a_base_of_the_hub_is_its_snapshot_on_every_node(model, tmp_path, monkeypatch):
    """Guards workers on nodes whose cache does not have what the driver has fetched."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub(model) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        named = {"type": "pretrained", "path": NAME}
        job = draft_job(model, tmp_path / "run", model=named, stage={"steps": 1})
        directory = initial_model(job)
        assert directory.name == COMMIT
        plan = make_plan(job, directory, "draft")
        shutil.rmtree(tmp_path / "hub")
        run_alone(plan)
    card = read_draft_card(directory_of(plan.run_dir, 1) / checkpoint.MODEL)
    assert card.base == NAME
    assert card.base_fingerprint == fingerprint(model)


def train_all(plans: list[tuple[StagePlan, Path | None]], results: Path) -> None:
    """Stages one after another on the ranks of one group."""
    ranks = Ranks.current(torch.device("cpu"))
    outcomes = [train_stage(plan, ranks, resume, ignore_report) for plan, resume in plans]
    if ranks.is_main:
        found = [str(o) if isinstance(o, MarsError) else o.step for o in outcomes]
        results.write_text(json.dumps(found))


def two_ranks(model: Path, output_dir: Path, **sections) -> StagePlan:
    """Micro-batches of one row, so that each rank accumulates two."""
    job = draft_job(model, output_dir, **sections).model_dump()
    job["cluster"]["workers"] = 2
    job["stages"]["draft"]["micro_batch_size"] = 1
    return make_plan(TrainJob.model_validate(job), model, "draft")


def test_two_ranks_equal_one(model, one_rank, tmp_path):
    """Guards the global division under DDP's average, and weights that start alike."""
    plan, resumed = two_ranks(model, tmp_path / "a"), two_ranks(model, tmp_path / "b")
    todo = [(plan, None), (resumed, directory_of(plan.run_dir, 10))]
    spawn(train_all, 2, todo, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == [STEPS, STEPS]
    assert losses(plan) == pytest.approx(losses(one_rank), rel=1e-5)
    one, two = (records(p, "eval")[-1] for p in (one_rank, plan))
    assert two["tokens_per_forward"] == pytest.approx(one["tokens_per_forward"])
    assert losses(resumed) == losses(plan)[10:]


@pytest.mark.long
def test_zero_stages_equal_plain_torch(model, one_rank, tmp_path):
    """Guards an adapter whose parts ZeRO-3 brings together only while their module is called."""
    todo: list[tuple[StagePlan, Path | None]] = []
    for stage in (1, 2, 3):
        engine = {"type": "deepspeed", "zero_stage": stage}
        plan = two_ranks(model, tmp_path / f"zero{stage}", engine=engine)
        resumed = two_ranks(model, tmp_path / f"resumed{stage}", engine=engine)
        todo += [(plan, None), (resumed, directory_of(plan.run_dir, 10))]
    rounded = two_ranks(model, tmp_path / "bf16", engine=engine, precision="bfloat16")
    spawn(train_all, 2, [*todo, (rounded, None)], tmp_path / "results.json")
    for (plan, _), (resumed, _) in zip(todo[::2], todo[1::2], strict=True):
        assert losses(plan) == pytest.approx(losses(one_rank), abs=1e-4)
        assert losses(resumed) == losses(plan)[10:]
        expected = masters(one_rank)
        for name, weight in masters(plan).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-3)
    assert losses(rounded) == pytest.approx(losses(one_rank), rel=0.1)
