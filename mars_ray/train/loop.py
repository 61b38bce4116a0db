"""The training loop, without Ray: steps, evaluations, checkpoints, and the end of a stage.

An evaluation measures held-out losses and teacher-forced acceptance. It always masks the same
blocks, those of the schedule's end, so that evaluations can be compared.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from mars_ray.core.acceptance import acceptance_counts, survival
from mars_ray.core.layout import TokenBatch
from mars_ray.core.loss import loss_counts, row_coefficients
from mars_ray.data.loader import Loader
from mars_ray.errors import NonFiniteLossError
from mars_ray.model.load import not_finite, stored_weights
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import CheckpointManager, TrainState
from mars_ray.train.engine import Engine, learning_rate
from mars_ray.train.metrics import Flops, Meter, MetricsWriter, RankTimer
from mars_ray.train.model_step import COUNTS, StageObjective, step_counts
from mars_ray.train.plan import StagePlan, identity_hash
from mars_ray.train.ranks import Ranks, Watchdog

# Counts of a step by their place: what the clean and the noisy stream are divided by, and masks.
_STREAMS, _MASKS = slice(0, 2), COUNTS.index("masks")
# A stage whose length is given in minutes sets its number of steps when an attempt has done this
# many, and whenever they have doubled; unless epochs say how many there are at most, it has as many
# at least. The attempt's first step is not counted, because everything used for the first time
# makes it longer.
_TIMED_STEPS = 10
# Progress that evaluations pass to the mask schedule.
_EVAL_PROGRESS = 1.0

# Called on every rank after a checkpoint is complete.
Report = Callable[[Path, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """The end of a stage, the same on every rank: finished, or stopped before its last step."""

    step: int
    total_steps: int
    checkpoint: Path
    metrics: dict[str, float]
    seconds: float

    @property
    def finished(self) -> bool:
        return self.step == self.total_steps


@dataclass(frozen=True, slots=True)
class StageParts:
    """Everything that the loop works with."""

    plan: StagePlan
    ranks: Ranks
    engine: Engine
    objective: StageObjective
    loader: Loader  # an item is this rank's share of one step
    total_steps: int
    eval_batches: Callable[[], Iterable[TokenBatch]] | None
    write_model: Callable[[Path, TrainState], None]  # collective; writes on rank 0
    report: Report
    manager: CheckpointManager | None  # only on rank 0
    flops: Flops
    peak_flops: float  # FLOP/s of all ranks together
    timer: RankTimer  # the engine's
    watchdog: Watchdog


class TrainLoop:
    """One attempt at a stage, from the start or from a restored state."""

    def __init__(self, parts: StageParts, restored: TrainState | None) -> None:
        self._parts = parts
        self._step = restored.step if restored else 0
        self._metrics: dict[str, float] = dict(restored.metrics) if restored else {}
        self._saved_step = restored.step if restored else -1
        self._evaluated_step = -1
        self._seconds_before = restored.seconds if restored else 0.0
        self._started = time.monotonic()
        self._stop_wanted = False
        self._cannot_write = False
        self._mask_tokens = restored.mask_tokens if restored else 0
        self._begun, self._first_step_s = self._step, 0.0
        self._total_steps = parts.total_steps
        if self._is_timed and restored:
            self._total_steps = restored.total_steps
        elif self._is_timed and parts.plan.config.epochs is None:
            self._total_steps = max(parts.total_steps, _TIMED_STEPS)
        streams = parts.objective.streams
        self.meter = Meter(parts.ranks.device, parts.flops, parts.peak_flops, streams)
        self._writer: MetricsWriter | None = None
        if parts.ranks.is_main:
            self._writer = MetricsWriter(
                parts.plan.metrics_file, self._step, self._total_steps, parts.ranks.world_size
            )

    def run(self) -> StageOutcome:
        """Train to the end, or to the step in which the stop file is found.

        Raises NonFiniteLossError and CheckpointError on every rank at once.
        """
        try:
            self._train()
        finally:
            if self._writer is not None:
                self._writer.close()
        return StageOutcome(
            step=self._step,
            total_steps=self._total_steps,
            checkpoint=checkpoint.directory_of(self._parts.plan.run_dir, self._step),
            metrics=self._metrics,
            seconds=self._seconds(),
        )

    def _train(self) -> None:
        """The algorithm. A step is one batch: laid out, weighted by what all ranks hold, forwarded
        and back in micro-batches, then one update. What falls due after it follows."""
        parts, plan = self._parts, self._parts.plan
        batches = iter(parts.loader)
        if self._step == 0 and plan.config.adapter is not None:
            self._evaluate()  # the adapter before training
        started = time.monotonic()
        while self._step < self._total_steps and not self._stop_wanted:
            parts.watchdog.feed(f"step {self._step + 1}")
            with parts.timer.measure():
                batch = next(batches)
            progress = self._step / self._total_steps
            layouts = [parts.objective.layout(micro_batch, progress) for micro_batch in batch]
            counts = self._agree(step_counts(layouts))
            ar_weight = parts.objective.ar_weight(progress)
            local = torch.zeros(3, dtype=torch.float64, device=parts.ranks.device)
            for index, layout in enumerate(layouts, start=1):
                coefficient_BR = row_coefficients(layout, counts[_STREAMS], ar_weight)
                last = index == len(layouts)
                local += parts.engine.accumulate(layout, coefficient_BR, last=last)
            rate = learning_rate(plan.config.optimizer, self._step, self._total_steps)
            norm = parts.engine.step(rate)
            if not math.isfinite(norm):
                self._raise_non_finite(batch, local)
            self.meter.add(local, counts)
            self._mask_tokens += int(counts[_MASKS])
            self._step += 1
            if self._is_timed:
                self._set_length(time.monotonic() - started)
            if self._is_due(plan.job.log_every_steps):
                self._log(norm, rate)
            if self._is_due(plan.config.eval_every_steps):
                self._evaluate()
            if self._is_due(plan.job.checkpoint.every_steps):
                self._save()
        # A run that was restored at its end, or stopped at a checkpoint, has nothing more to save.
        if self._saved_step != self._step:
            self._save()

    @property
    def _is_timed(self) -> bool:
        return self._parts.plan.config.minutes is not None

    def _set_length(self, elapsed_s: float) -> None:
        """Set the number of steps that fit the minutes, but no more than epochs have if both are
        given. Rank 0's time of all steps but the attempt's first counts, when ten are done and
        whenever these have doubled; or at the end, if an earlier attempt did not come so far."""
        done = self._step - self._begun
        if done == 1:
            self._first_step_s = elapsed_s
        tens, rest = divmod(done, _TIMED_STEPS)
        is_resumed_early = 0 < self._begun < _TIMED_STEPS and done < _TIMED_STEPS
        is_end = is_resumed_early and self._step == self._total_steps
        if (rest or tens & (tens - 1)) and not is_end:
            return
        config = self._parts.plan.config
        assert config.minutes is not None
        step_s = (elapsed_s - self._first_step_s) / (done - 1) if done > 1 else elapsed_s
        left_s = 60 * config.minutes - self._seconds()
        wanted = self._step + max(0, int(left_s / step_s))
        if config.epochs is not None:
            wanted = max(self._step, min(wanted, self._parts.total_steps))
        own = torch.tensor([float(wanted if self._parts.ranks.is_main else 0)])
        self._total_steps = int(self._parts.ranks.sum(own).item())
        if self._writer is not None:
            self._writer.set_length(self._step, self._total_steps)

    def _agree(self, counts: Tensor) -> Tensor:
        """Global counts. A stop request is summed along, so that all ranks stop at one step."""
        ranks = self._parts.ranks
        asked = ranks.is_main and self._parts.plan.stop_file.exists()
        stop = asked or self._cannot_write
        agreed = ranks.sum(torch.cat([counts, torch.tensor([float(stop)])]))
        self._stop_wanted = agreed[-1].item() > 0
        return agreed[:-1]

    def _is_due(self, every_steps: int | None) -> bool:
        last = self._step == self._total_steps
        return last or (every_steps is not None and self._step % every_steps == 0)

    def _log(self, norm: Tensor, rate: float) -> None:
        metrics = self.meter.flush(self._parts.ranks)
        if self._mask_tokens:
            metrics["mask_tokens"] = self._mask_tokens
        metrics |= {"lr": rate, "grad_norm": float(norm), "seconds": self._seconds()}
        metrics |= self._parts.timer.slowest()
        self._publish("train", "", metrics)

    def _evaluate(self) -> None:
        parts = self._parts
        if parts.eval_batches is None:
            return
        parts.watchdog.feed(f"the evaluation after step {self._step}")
        metrics = evaluate(parts.engine, parts.objective, parts.eval_batches(), parts.ranks)
        self._publish("eval", "eval_", metrics)
        self._evaluated_step = self._step

    def _publish(self, kind: str, prefix: str, metrics: dict[str, float]) -> None:
        self._metrics |= {f"{prefix}{name}": value for name, value in metrics.items()}
        if self._writer is None:
            return
        try:
            self._writer.write(kind, self._step, metrics)
        except OSError as error:
            # The other ranks continue; all ranks end with the next step, and try to save it.
            print(f"cannot write {self._parts.plan.metrics_file}: {error}", flush=True)
            self._cannot_write = True

    def _save(self) -> None:
        parts = self._parts
        best = parts.plan.job.checkpoint.best
        if best is not None and self._evaluated_step != self._step:
            self._evaluate()
        directory = checkpoint.directory_of(parts.plan.run_dir, self._step)
        parts.watchdog.feed(f"the checkpoint of step {self._step}")
        state = TrainState(
            step=self._step,
            total_steps=self._total_steps,
            seconds=self._seconds(),
            world_size=parts.ranks.world_size,
            identity=identity_hash(parts.plan.job),
            loader=parts.loader.state(),
            metrics=self._metrics,
            data=parts.plan.data,
            mask_tokens=self._mask_tokens,
        )
        checkpoint.write(
            directory,
            parts.ranks,
            state,
            {
                "optimizer": parts.engine.optimizer_state(),
                "meter": self.meter.state(),
                "random": checkpoint.random_state(parts.ranks.device),
            },
            lambda model: parts.write_model(model, state),
        )
        self._saved_step = self._step
        if parts.manager is not None:
            parts.manager.saved()
        parts.report(directory, self._metrics | {"step": self._step})

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _raise_non_finite(self, batches: list[TokenBatch], local: Tensor) -> NoReturn:
        """Raise the error; every rank gets here in the same step, since all see the same norm."""
        documents = torch.cat([batch.document_BL.flatten() for batch in batches]).unique()
        mine = [index for index in documents.tolist() if index >= 0]
        ranks, start = self._parts.ranks, self._parts.plan.start_model
        # No step leaves weights that are not finite, so these began so.
        broken = not_finite(stored_weights(start)) if ranks.is_main else None
        everyone = ranks.gather((math.isfinite(local[0]), mine, broken))
        # If all losses are finite and only a gradient is not, no single rank can be blamed.
        bad = [found for finite, found, _ in everyone if not finite]
        bad = bad or [found for _, found, _ in everyone]
        indices = ", ".join(str(index) for found in bad for index in found)
        advice = "Lower the learning rate, or look at these conversations"
        if broken := next((name for *_, name in everyone if name), None):
            advice = f"The weight {broken} of {start} is not either: start from another copy of it"
        raise NonFiniteLossError(
            f"stage {self._parts.plan.stage!r}, step {self._step + 1}: the loss or its gradient is "
            f"not finite; its batch held conversations {indices}. {advice}; the last checkpoint is "
            "untouched"
        )


def evaluate(
    engine: Engine, objective: StageObjective, batches: Iterable[TokenBatch], ranks: Ranks
) -> dict[str, float]:
    """Metrics over all ranks' batches, the same on every rank; collective.

    Every rank must have equally many batches: under ZeRO-3 each forward is a collective too.
    """
    # All held-out conversations count as data, whatever their index.
    objective = replace(objective, own_from=None)
    depths = objective.depths
    # Metric prefixes of a mask row's predictions; that of the main one is empty.
    predictors = ("row_", "") if objective.has_head else ("",)
    totals = torch.zeros(4, dtype=torch.float64)  # two sums, then their divisors
    # For each predictor: blocks that reach each depth, and those that agree to it.
    counts = torch.zeros(len(predictors), 2, depths, dtype=torch.float64)
    for batch in batches:
        layout = objective.layout(batch, _EVAL_PROGRESS)
        sums, predicted = engine.predict(layout)
        totals[:2] += sums.cpu()
        totals[2:] += loss_counts(layout)
        if depths:
            by_predictor = predicted.cpu().view(-1, *layout.target_BR.shape)
            for index, predicted_BR in enumerate(by_predictor[: len(predictors)]):
                counts[index] += acceptance_counts(layout, predicted_BR, depths)
    totals, counts = ranks.sum(totals), ranks.sum(counts)
    means = {
        stream.name: (totals[stream.sum] / totals[2 + stream.count].clamp_min(1e-9)).item()
        for stream in objective.streams
    }
    metrics = {"loss": objective.loss(means, _EVAL_PROGRESS)} | means
    if depths:
        for prefix, count in zip(predictors, counts, strict=True):
            shares = survival(count)
            for depth, share in enumerate(shares, start=1):
                metrics[f"{prefix}acceptance_{depth}"] = share
            # Expected of greedy `verified` decoding that always has drafts.
            metrics[f"{prefix}tokens_per_forward"] = 1 + sum(shares)
    return metrics
