"""A stage on Ray Train: the only file of this package that knows Ray.

Workers write checkpoints directly into the run directory, which all nodes share. So the manifest is
really the last file written, nothing is copied, and a run resumes from what lies there.
"""

import contextlib
import logging
import math
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import ray.train
import ray.util
import torch
from ray import PlacementGroupID
from ray.train import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    UserCallback,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api.config import LoggingConfig
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from mars_ray.cluster.connection import sentence, trained
from mars_ray.config.train import ClusterConfig
from mars_ray.errors import MarsError, TrainingError
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import fetch_copies
from mars_ray.train.loop import StageOutcome
from mars_ray.train.metrics import MetricsReader, StageProgress
from mars_ray.train.plan import StagePlan, known_hashes
from mars_ray.train.ranks import Ranks, stacks
from mars_ray.train.worker import resume_stage, unpacked

# Ray polls its workers this often (default 2 s): the delay before a dead worker is noticed, and
# what each stage waits for at its end.
_POLL_INTERVAL_S = 0.5
_RESIZE_CHECK_S = 60.0
# Elastic: a group that lacks resources after this time is tried again with those that exist. Ray's
# default of 60 s passes in full when a node is lost, since Ray first asks for the old resources.
_ELASTIC_START_TIMEOUT_S = 10
_RESOURCES = "placement_group"
_AGAIN = "run the same command again to resume"
# By so much a collective outlasts a step that hangs: the watchdog ends it, and writes its stacks.
_COLLECTIVE_MORE_S = 60
# Otherwise glibc returns and fetches pages at every step: with large activations, seconds of system
# time per step were seen. For CPU workers only, because it holds on to memory.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def fit_stage(plan: StagePlan) -> StageOutcome:
    """Run a stage to its end, resuming from the run directory's checkpoint.

    Ctrl-C (or SIGTERM) asks the workers to write a checkpoint and end; a second one aborts. Raises
    TrainingError if the stage was stopped or failed for good.
    """
    cluster = trained(plan.job.cluster)
    plan = replace(plan, job=plan.job.model_copy(update={"cluster": cluster}))
    _prepare(plan)
    reader = MetricsReader(plan.metrics_file)
    reader.new()  # skip lines that an earlier attempt logged and showed
    note = plan.run_dir / _RESOURCES
    if note.exists():
        # Of an attempt of this driver's job whose controller died: Ray frees its resources only
        # when the job ends; in a sweep that is after all other trials.
        ray.util.remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(note.read_text())))
        note.unlink()
    with StageProgress(plan.stage, reader) as progress, _stop_on_signal(plan, progress):
        workers = f"{cluster.workers} worker{'s' * (cluster.workers > 1)}"
        progress.say(sentence(workers, cluster.gpus_per_worker or 0))
        # No error, since an autoscaler may provide what is missing.
        have = ray.cluster_resources()
        for name, each in _resources(cluster).items():
            wanted = each * (cluster.min_workers or cluster.workers)
            if (found := have.get(name, 0.0)) < wanted:
                progress.say(
                    f"waiting for {wanted:g} {name}: the cluster has {found:g}. Unless it grows by "
                    "itself, stop and lower cluster.workers"
                )
        fit = _Fit(plan)
        fit.start()
        while fit.is_alive():
            fit.join(timeout=0.2)
            progress.update()
    return _checked(plan, fit)


def _prepare(plan: StagePlan) -> None:
    """Make the run directory, and fetch the newest checkpoint into it.

    Raises TrainingError or CheckpointError if the storage cannot be used.
    """
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        plan.stop_file.unlink(missing_ok=True)
        shutil.rmtree(plan.stacks_dir, ignore_errors=True)
        checkpoint.clear_unfinished(plan.run_dir)
    except OSError as error:
        raise TrainingError(
            f"the run directory {plan.run_dir} cannot be used: {error}. Mend or mount its "
            f"storage, or choose another output_dir; then {_AGAIN}"
        ) from error
    fetch_copies(plan.run_dir, plan.job.checkpoint, plan.stage, known_hashes(plan.job))


class _Fit(threading.Thread):
    """Runs `TorchTrainer.fit` in a thread; in the main thread it would take over Ctrl-C."""

    def __init__(self, plan: StagePlan) -> None:
        super().__init__(name="ray-train-fit", daemon=True)
        self._plan = plan
        self.outcome: StageOutcome | MarsError | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        settings = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(_POLL_INTERVAL_S)}
        if self._plan.job.cluster.min_workers is not None:
            settings["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(_ELASTIC_START_TIMEOUT_S)
        try:
            if len(ray.nodes()) == 1:
                # A pre-emption of the only node takes the driver with it; the watcher would only
                # log.
                settings["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
            with _environment(settings):
                returned: Any = _trainer(self._plan).fit().return_value
                self.outcome = pickle.loads(returned)
        except Exception as error:  # noqa: BLE001 - a thread's edge: `_checked` raises it
            self.error = error


class _Trainer(TorchTrainer):
    """A trainer without the actor that removes workers' resources once the controller looks dead.

    The actor asks "the" cluster of its machine. If there are two, it may ask the other one, find no
    controller there, and kill a healthy run; this was seen. Without the actor, resources of a dead
    controller are freed when the driver ends.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, PlacementGroupCleanerCallback)]


def _trainer(plan: StagePlan) -> TorchTrainer:
    cluster = plan.job.cluster
    fewest = cluster.min_workers
    environment = {"OMP_NUM_THREADS": str(_threads(cluster)), "TOKENIZERS_PARALLELISM": "false"}
    if not cluster.gpus_per_worker:
        environment |= _MALLOC
    return _Trainer(
        _work,
        # Pickled separately, or Ray's controller would open the plan's files, wherever it runs.
        train_loop_config={"plan": pickle.dumps(plan)},
        torch_config=TorchConfig(timeout_s=math.ceil(cluster.step_timeout_s) + _COLLECTIVE_MORE_S),
        scaling_config=ScalingConfig(
            num_workers=cluster.workers if fewest is None else (fewest, cluster.workers),
            use_gpu=bool(cluster.gpus_per_worker),
            resources_per_worker=_resources(cluster),
            placement_strategy=cluster.placement.upper(),
            elastic_resize_monitor_interval_s=cluster.resize_check_s or _RESIZE_CHECK_S,
        ),
        run_config=RunConfig(
            name=plan.run_dir.name,
            storage_path=str(plan.run_dir.parent),
            failure_config=FailureConfig(max_failures=cluster.max_failures),
            callbacks=[_failure_printer()],
            worker_runtime_env={"env_vars": environment},
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )


def _work(config: dict[str, Any]) -> bytes:
    """The training function, which runs in every worker; returns a pickled outcome or error."""
    # Ray logs every report, on every rank.
    logging.disable(logging.INFO)
    ranks = Ranks.current(get_device())
    try:
        plan = unpacked(config["plan"], ranks)
    except TrainingError as error:
        return pickle.dumps(error)
    if (group := get_current_placement_group()) is not None:
        (plan.run_dir / _RESOURCES).write_text(group.id.hex())  # for `fit_stage`
    torch.set_num_threads(_threads(plan.job.cluster))

    def report(directory: Path, metrics: dict[str, float]) -> None:
        # Every rank calls this equally often, since all save at the same steps. The checkpoint is
        # not passed to Ray, which would refuse to start again after we deleted one that it knows.
        ray.train.report(metrics)

    # Pickled here, or Ray's controller would import torch and transformers to read it.
    return pickle.dumps(resume_stage(plan, ranks, report))


def _failure_printer() -> UserCallback:
    """A callback that prints failures on the controller, whose output Ray shows to the driver.

    Its class is made here so that it is pickled by value. Otherwise the controller imports this
    module for it, with transformers and all of the model's code: 7 s of CPU in every stage.
    """

    class SayFailures(UserCallback):
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            for rank, error in sorted(worker_exceptions.items()):
                lines = str(error).strip().splitlines()
                print(f"worker {rank} failed: {lines[-1] if lines else type(error).__name__}")

    return SayFailures()


def _checked(plan: StagePlan, fit: _Fit) -> StageOutcome:
    """The outcome of a finished stage. For any other end, raises an error that says what to do."""
    if fit.error is not None:
        raise _explained(plan, fit.error) from fit.error
    outcome = fit.outcome
    assert outcome is not None, "fit returned neither an outcome nor an error"
    if isinstance(outcome, MarsError):
        raise outcome
    if not outcome.finished:
        raise TrainingError(
            f"stage {plan.stage!r} was stopped at step {outcome.step} of {outcome.total_steps}, "
            f"with a checkpoint; {_AGAIN}"
        )
    return outcome


def _explained(plan: StagePlan, error: Exception) -> MarsError:
    if isinstance(error, WorkerGroupError):
        for failure in error.worker_failures.values():
            if isinstance(failure, MarsError):
                return failure
    if isinstance(error, TrainingFailedError):
        why = stacks(plan.stacks_dir) or str(error)
        return TrainingError(f"stage {plan.stage!r} failed: {why}\nOnce it is mended, {_AGAIN}")
    return TrainingError(f"stage {plan.stage!r} could not run on the cluster: {error}")


@contextlib.contextmanager
def _stop_on_signal(plan: StagePlan, progress: StageProgress) -> Iterator[None]:
    """Write the stop file at the first signal, raise at the second; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if plan.stop_file.exists():
            raise KeyboardInterrupt
        plan.stop_file.touch()
        progress.say("stopping after a checkpoint; once more to abort")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set environment variables, for which Ray has no argument, unless the user has set them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _resources(cluster: ClusterConfig) -> dict[str, float]:
    resources = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        resources["GPU"] = cluster.gpus_per_worker
    return resources


def _threads(cluster: ClusterConfig) -> int:
    return cluster.threads_per_worker or max(1, int(cluster.cpus_per_worker))
