"""The plan of a stage: plain data that is sent from the driver to every worker."""

import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from mars_ray.config.base import found
from mars_ray.config.inputs import FilesSource, PretrainedModel, Source
from mars_ray.config.train import DraftObjective, MarsObjective, StageConfig, TrainJob
from mars_ray.data.rows import Conversations, Joined, tokenize
from mars_ray.data.sources import BadRows, read
from mars_ray.errors import ConfigError
from mars_ray.model.create import create_model
from mars_ray.model.directory import CARD_FILE
from mars_ray.model.load import load_tokenizer, read_config
from mars_ray.model.places import local_copy
from mars_ray.model.shape import most_positions, sliding_window
from mars_ray.storage.place import Place

log = logging.getLogger(__name__)

# Settings that may change between a run and its resumption: where and how fast it runs and how much
# it prints, not what it computes. (Other workers or micro-batches change the order of float
# additions, and the forward over which weights by acceptance have a mean of 1.)
_HARMLESS = frozenset(
    {
        "output_dir",
        "cluster",
        "checkpoint",
        "log_every_steps",
        "data.cache_dir",
        "engine.zero_stage",
        "engine.offload",
        "gradient_checkpointing",
    }
)
# Keys of inputs that a submitted job finds in another directory at each start.
_PATHS = re.compile(r"data\.\w+\.paths|model\.path|stages\.[^.]+\.adapter\.start_from")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a job whose paths are absolute."""

    job: TrainJob
    stage: str
    start_model: Path  # the model directory the stage starts from
    run_dir: Path  # checkpoints, metrics and the stop file of this stage
    train: Conversations  # pickled as the path of its cache
    eval: Conversations | None
    own_from: int | None = None  # the first conversation whose answer is the model's own
    start_adapter: Path | None = None  # the draft adapter that the stage continues from

    @property
    def config(self) -> StageConfig:
        return self.job.stages[self.stage]

    @property
    def seed(self) -> int:
        """The stage's seed; stages have different ones, so that none repeats another's order."""
        return self.job.seed + 1_000_003 * list(self.job.stages).index(self.stage)

    @property
    def data(self) -> str:
        """Fingerprints of the conversations, to notice different ones at the same paths."""
        return "-".join(rows.fingerprint for rows in (self.train, self.eval) if rows is not None)

    @property
    def stop_file(self) -> Path:
        """The stop file: when it exists, the workers write a checkpoint and end."""
        return self.run_dir / "stop"

    @property
    def stacks_dir(self) -> Path:
        """The directory of the stacks that ranks write when a step takes too long."""
        return self.run_dir / "stacks"

    @property
    def metrics_file(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def micro_batch_size(self, world_size: int) -> int:
        """Rows of one forward on one worker."""
        share = math.ceil(self.config.global_batch_size / world_size)
        return min(self.config.micro_batch_size or share, share)

    def total_steps(self, steps_per_epoch: int) -> int:
        if self.config.steps is not None:
            return self.config.steps
        if self.config.epochs is None:
            # A stage whose length is in minutes does not know its number of steps yet.
            return steps_per_epoch
        return max(1, round(self.config.epochs * steps_per_epoch))


def stage_plan(
    job: TrainJob, stage: str, start_model: Path, start_adapter: Path | None = None
) -> StagePlan:
    """A stage of a job with absolute paths; its data is tokenised now if it is not in the cache.

    `start_adapter` comes from an earlier stage; the stage's own `start_from` takes precedence.
    """
    given = job.stages[stage].adapter
    if given is not None and given.start_from is not None:
        start_adapter = Path(given.start_from)
    output_dir, data = Path(job.output_dir), job.data
    cache_dir = Path(data.cache_dir) if data.cache_dir else output_dir / "cache"
    tokenizer = load_tokenizer(start_model)
    train, own_from = tokenize(data.train, tokenizer, data, cache_dir), None
    if data.own and isinstance(job.stages[stage].objective, MarsObjective):
        own_from = len(train)
        train = Joined(train, tokenize(data.own, tokenizer, data, cache_dir))
    config = read_config(start_model)
    window, longest = sliding_window(config), int(train.lengths.max(initial=0))
    if window is not None and longest > window:
        raise ConfigError(
            f"the longest conversation has {longest} tokens, and a row of this model sees only the "
            f"{window} before it, which training does not follow: set data.max_length={window}"
        )
    positions = most_positions(config)
    if longer := int((train.lengths > positions).sum()):
        # Rotary embeddings accept any position silently.
        log.warning(
            "%d of %d conversations are longer than the %d positions that the model was made for, "
            "and serving refuses such contexts; lower data.max_length",
            longer,
            len(train),
            positions,
        )
    return StagePlan(
        job=job,
        stage=stage,
        start_model=start_model,
        run_dir=output_dir / "stages" / stage,
        train=train,
        eval=tokenize(data.eval, tokenizer, data, cache_dir) if data.eval else None,
        own_from=own_from,
        start_adapter=start_adapter,
    )


def absolute_files(source: FilesSource) -> FilesSource:
    """A source that finds its files from any working directory."""
    paths = tuple(absolute_path(str(found(path))) for path in source.paths)
    return source.model_copy(update={"paths": paths})


def with_absolute_paths(job: TrainJob) -> TrainJob:
    """The same job with absolute paths, because workers run in another working directory."""

    def absolute(source: Source | None) -> Source | None:
        return absolute_files(source) if isinstance(source, FilesSource) else source

    data = job.data.model_copy(
        update={
            "train": absolute(job.data.train),
            "eval": absolute(job.data.eval),
            "own": absolute(job.data.own),
            "cache_dir": absolute_path(job.data.cache_dir) if job.data.cache_dir else None,
        }
    )
    model = job.model
    if isinstance(model, PretrainedModel) and Path(model.path).is_dir():
        model = model.model_copy(update={"path": absolute_path(model.path)})
    stages = dict(job.stages)
    for name, stage in stages.items():
        if stage.adapter is not None and stage.adapter.start_from is not None:
            start = {"start_from": absolute_path(stage.adapter.start_from)}
            adapter = stage.adapter.model_copy(update=start)
            stages[name] = stage.model_copy(update={"adapter": adapter})
    update = {
        "data": data,
        "model": model,
        "output_dir": absolute_path(job.output_dir),
        "stages": stages,
    }
    return job.model_copy(update=update)


def identity(job: TrainJob) -> dict[str, Any]:
    """Everything of a job that decides what it computes, as flat `section.key` entries."""
    kept: dict[str, Any] = {}
    for key, value in _flatten(job.model_dump(mode="json")).items():
        parts = key.split(".")
        sections = {".".join(parts[: length + 1]) for length in range(len(parts))}
        is_micro_batch = parts[0] == "stages" and parts[-1] == "micro_batch_size"
        if not is_micro_batch and _HARMLESS.isdisjoint(sections):
            kept[key] = value
    return kept


def identity_hash(job: TrainJob) -> str:
    """A short digest of `identity` without paths: what lies there is told by `StagePlan.data`, and
    the claim of output_dir tells other names."""
    return _digest({k: v for k, v in identity(job).items() if not _PATHS.fullmatch(k)})


def known_hashes(job: TrainJob) -> tuple[str, str]:
    """The digests by which a checkpoint is of this job: older ones have one with paths."""
    return identity_hash(job), _digest(identity(job))


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def absolute_path(path: str) -> str:
    """The path in a form that holds in every working directory."""
    return str(Path(expanduser(path)).absolute())


def initial_model(job: TrainJob) -> Path:
    """The model directory that the first stage starts from, created if necessary.

    A draft adapter's base is used as it is, wherever it lies; for a hub name that is its snapshot.
    Raises ModelError.
    """
    first = next(iter(job.stages.values()))
    if isinstance(first.objective, DraftObjective):
        assert isinstance(job.model, PretrainedModel), "the config demands a pretrained model"
        source = Place(job.model.path, job.model.revision)
        directory = local_copy(source, cache="")
        read_config(directory, called=job.model.path)
        return directory
    model = Path(job.output_dir) / "initial"
    if not (model / CARD_FILE).exists():
        # Unfinished directories of killed attempts.
        for draft in model.parent.glob(f".{model.name}-*"):
            shutil.rmtree(draft, ignore_errors=True)

        def texts() -> Iterator[str]:
            """Every message of the training data. Raises DataError if too many rows are bad: a
            tokenizer made from the rest would remain after the data are repaired."""
            report = BadRows()
            for record in read(job.data.train, report):
                for message in record.messages:
                    yield message.content
            report.check(job.data.max_bad_share)

        create_model(job.model, texts, model, job.seed)
    return model
