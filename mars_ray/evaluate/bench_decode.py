"""Compares the decoding speed of this engine and of others on the same checkpoint and prompts.

Every peer is a process that waits while the others work. One round runs each (peer, batch) once, in
the same order. Rounds are repeated and medians taken, so that a drift of the machine affects all.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.config.bench import BenchDecodeJob
from mars_ray.config.decode import EngineConfig
from mars_ray.config.model import PresetModel, PresetName
from mars_ray.core.frontier import mode_label
from mars_ray.data.chat import Message, encode_prompt
from mars_ray.data.corpus import problems
from mars_ray.decode.loading import drafting_card
from mars_ray.decode.request import window_of
from mars_ray.errors import ConfigError, MarsError
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of
from mars_ray.model.card import ModelCard, read_card, write_card
from mars_ray.model.create import create_model
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.stop import stop_at_turn_end, stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

_PEERS = Path(__file__).parent / "peers"
# Differs from the seeds of training, evaluation and the demo question.
_PROMPT_SEED = 77
# Masks per step of an untrained model.
_RANDOM_DEPTH = 4


@dataclass(frozen=True, slots=True)
class _Contender:
    """A row of the result: a peer, and its settings besides the prompts."""

    label: str
    peer: str
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Measured:
    """One contender at one batch size over all rounds."""

    seconds: list[float] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)


def run_bench_decode(job: BenchDecodeJob, console: Console) -> dict[str, Any]:
    """Measure, print a table, return all figures. Raises MarsError if a peer fails."""
    contenders = _contenders(job)
    measured = {(c.label, batch): _Measured() for c in contenders for batch in job.batch_sizes}
    with ExitStack() as stack:
        bars = stack.enter_context(Bars(console))
        checkpoint = stack.enter_context(_checkpoint(job))
        card = drafting_card(checkpoint, EngineConfig(draft_adapter=job.draft_adapter))
        _check_modes(job, card)
        tasks = _tasks(job, checkpoint)
        peers = {
            peer: stack.enter_context(_running(peer, job, checkpoint, card.block_size))
            for peer in dict.fromkeys(contender.peer for contender in contenders)
        }
        steps: dict[tuple[int, int], list[float]] = {
            (batch, positions): [] for batch in job.batch_sizes for positions in job.step_positions
        }
        total = (1 + job.repeats) * (len(measured) + len(steps))
        task = bars.add_task("rounds, the first one to warm up", total=total)
        for round_ in range(1 + job.repeats):
            for batch in job.batch_sizes:
                for contender in contenders:
                    answer = peers[contender.peer].ask(tasks[batch] | contender.task)
                    bars.advance(task)
                    if round_:
                        cell = measured[contender.label, batch]
                        cell.seconds.append(answer["seconds"])
                        cell.answer = answer
            for (batch, positions), seconds in steps.items():
                answer = peers["mars"].ask({"step": (batch, positions)})
                bars.advance(task)
                seconds += [answer["seconds"]] * bool(round_)
        versions = {name: peer.hello["version"] for name, peer in peers.items()}
        ours = peers["mars"].hello
    result = {
        # Paths of peers on this machine do not belong in a result.
        "job": job.model_dump(mode="json", exclude={"peer_pythons"}),
        "peers": versions,
        "draft_adapter": ours["draft_adapter"],
        "roofline": ours["roofline"],
        "cases": _cases(contenders, measured, job),
        "steps": [
            {"batch": batch, "positions": positions, "seconds": statistics.median(seconds)}
            for (batch, positions), seconds in steps.items()
        ],
        "provenance": provenance(),
    }
    _print(result, console)
    return result


class _Peer:
    """The other end of a peer's pipes."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name, self._process = name, process
        self.hello = self._receive()

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> MarsError:
        return MarsError(f"the peer {self._name} ended; what it said is above")


@contextmanager
def _checkpoint(job: BenchDecodeJob) -> Iterator[str]:
    """The job's checkpoint, or a temporary one with random weights."""
    if job.checkpoint:
        yield job.checkpoint
        return
    assert job.random_weights
    with random_checkpoint(job.random_weights) as directory:
        yield directory


def _check_modes(job: BenchDecodeJob, card: ModelCard) -> None:
    """Check, before any peer starts, that the model has the masks that modes need. Raises
    RequestError or ConfigError."""
    for mode in job.modes:
        window_of(mode, card)
    if job.lockstep and card.mask_token_id is None:
        raise ConfigError(
            "lockstep needs a model that `mars-ray train` has given a mask token: leave it out"
        )
    if "vllm-mars" in job.peers and not card.block_size:
        raise ConfigError(
            "the peer vllm-mars needs masks: name a draft_adapter, or a checkpoint that "
            "`mars-ray train` has trained"
        )


@contextmanager
def random_checkpoint(preset: PresetName) -> Iterator[str]:
    """A checkpoint with random weights that claims to be trained, for as long as it is needed."""
    solved = problems("train", 500, 0)
    with TemporaryDirectory() as directory:
        create_model(
            PresetModel(preset=preset),
            lambda: (text for item in solved for text in (item.question, item.solution)),
            directory,
            seed=0,
        )
        write_card(directory, replace(read_card(directory), block_size=_RANDOM_DEPTH))
        yield directory


@contextmanager
def _running(name: str, job: BenchDecodeJob, checkpoint: str, depths: int) -> Iterator[_Peer]:
    """A peer's process while it is needed; `depths` are those of the drafts."""
    pythons: dict[str, str] = {**job.peer_pythons}
    python = pythons.get(name, sys.executable)
    script = f"{name.replace('-', '_')}_peer.py"
    limits = (job.max_context, max(job.batch_sizes))
    command = [python, str(_PEERS / script), checkpoint, job.dtype, *map(str, limits)]
    if name == "vllm-mars":
        command.append(str(depths))
    if name in ("mars", "vllm-mars") and job.draft_adapter:
        command.append(job.draft_adapter)
    threads = {"OMP_NUM_THREADS": str(job.threads)}
    pipe, environment = subprocess.PIPE, os.environ | threads
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    except OSError as error:
        raise ConfigError(
            f"peer_pythons.{name} {python} cannot be run: {error.strerror}; name the interpreter "
            "of an environment that has the peer"
        ) from error
    try:
        yield _Peer(name, process)
    finally:
        assert process.stdin
        # Closing sends what is buffered, which fails if the peer is gone.
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _contenders(job: BenchDecodeJob) -> list[_Contender]:
    modes = [mode.model_dump() for mode in job.modes]
    ours = [_Contender(f"mars-ray {mode_label(mode)}", "mars", {"mode": mode}) for mode in modes]
    lockstep = [
        _Contender(f"lockstep {own.threshold:g}, cache: {own.cache}", "lockstep", own.model_dump())
        for own in job.lockstep
    ]
    return ours + lockstep + [_Contender(peer, peer) for peer in job.peers]


def _tasks(job: BenchDecodeJob, checkpoint: str) -> dict[int, dict[str, Any]]:
    """The tasks by batch size: the same prompts for every peer, and shared between batch sizes.

    Raises ConfigError if a prompt has no room.
    """
    count = max(job.prompts, *job.batch_sizes)
    if job.random_prompt_tokens:
        prompts = [
            [(7 * i + j) % 200 + 5 for j in range(job.random_prompt_tokens)] for i in range(count)
        ]
        stops: Sequence[int] = ()
    else:
        tokenizer = load_tokenizer(checkpoint)
        prompts = [encode_prompt(messages, tokenizer) for messages in _asked(job, count)]
        model = load_model(checkpoint, dtype=None)
        stop_at_turn_end(model, tokenizer)
        stops = sorted(stop_ids(model))
    needed = max(map(len, prompts)) + job.max_new_tokens
    if needed > job.max_context:
        raise ConfigError(
            f"max_context {job.max_context} is too small: the longest prompt and its answer take "
            f"{needed} tokens; set it to that at least, or lower max_new_tokens"
        )
    return {
        batch: {
            "batches": [prompts[i : i + batch] for i in range(0, max(job.prompts, batch), batch)],
            "max_new_tokens": job.max_new_tokens,
            "stop_ids": list(stops),
        }
        for batch in job.batch_sizes
    }


def _asked(job: BenchDecodeJob, count: int) -> list[list[Message]]:
    """`count` prompts: equally many of each kind from the job's files, or from the corpus. Raises
    DataError and ConfigError."""
    if job.task is None:
        return [[Message("user", p.question)] for p in problems("test", count, _PROMPT_SEED)]
    asked = kinds_in_turn(problems_of(job.task))
    if len(asked) < count:
        raise ConfigError(f"the task has {len(asked)} prompts: set prompts to that at most")
    return [problem.messages for problem in asked[:count]]


def _cases(
    contenders: Sequence[_Contender],
    measured: dict[tuple[str, int], _Measured],
    job: BenchDecodeJob,
) -> list[dict[str, Any]]:
    base = contenders[0].label
    return [
        _case(contender.label, batch, measured[contender.label, batch], measured[base, batch])
        for batch in job.batch_sizes
        for contender in contenders
    ]


def _case(label: str, batch: int, cell: _Measured, base: _Measured) -> dict[str, Any]:
    tokens = sum(map(len, cell.answer["tokens"]))
    base_tokens = sum(map(len, base.answer["tokens"]))
    same = [a == b for a, b in zip(cell.answer["tokens"], base.answer["tokens"], strict=True)]
    # Compared round by round, so that a drift of the machine affects both.
    speed_ups = [
        (tokens / own) / (base_tokens / theirs)
        for own, theirs in zip(cell.seconds, base.seconds, strict=True)
    ]
    case = {
        "label": label,
        "batch": batch,
        "tokens": tokens,
        "tokens_per_s": tokens / statistics.median(cell.seconds),
        "speed_up": statistics.median(speed_ups),
        "same_output": sum(same) / len(same),
        "seconds": cell.seconds,
    }
    if "steps" in cell.answer:
        case |= {
            "ms_per_step": 1e3 * statistics.median(cell.seconds) / cell.answer["steps"],
            "tokens_per_forward": tokens / cell.answer["forwards"],
        }
    if "rows" in cell.answer:
        case["positions_per_token"] = cell.answer["rows"] / tokens
    if "model_seconds" in cell.answer:
        # In the last round, the share of a step's time outside the model's forward.
        case["own_share"] = 1 - cell.answer["model_seconds"] / cell.seconds[-1]
    return case


def _print(result: dict[str, Any], console: Console) -> None:
    name = result["job"]["checkpoint"] or result["job"]["random_weights"]
    table = Table(title=f"decoding {name}")
    columns = ("batch", "decoder", "tokens/s", "x", "same output")
    columns += ("ms/step", "ours", "T/F", "pos./token")
    for column in columns:
        table.add_column(column, justify="left" if column == "decoder" else "right")
    for case in result["cases"]:
        table.add_row(
            str(case["batch"]),
            case["label"],
            f"{case['tokens_per_s']:.0f}",
            f"{case['speed_up']:.2f}",
            f"{case['same_output']:.0%}",
            *(
                format(case[key], form) if key in case else "-"
                for key, form in (
                    ("ms_per_step", ".2f"),
                    ("own_share", ".0%"),
                    ("tokens_per_forward", ".2f"),
                    ("positions_per_token", ".1f"),
                )
            ),
        )
    console.print(table)
