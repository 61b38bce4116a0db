"""Compares the decoding speed of this engine and of others on the same checkpoint and prompts.

    python benchmarks/compare_decoders.py JOB.toml --output RESULT.json [KEY=VALUE ...]

with a job of `benchmarks/decoders/`. Every peer is a process that waits while the others work. One
round runs each (peer, batch) once, in the same order. Rounds are repeated and medians taken, so
that a drift of the machine affects all. What a stopped run has measured is kept, and the next one
goes on from there.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from decoders.job import ALONE, KINDS, BenchDecodeJob
from rich.console import Console

from mars_ray.config.decode import EngineConfig
from mars_ray.config.inputs import PresetModel, PresetName
from mars_ray.config.load import load_job
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.core.frontier import mode_label
from mars_ray.data.chat import encode_prompt
from mars_ray.data.corpus import problems
from mars_ray.decode.loading import drafting_card
from mars_ray.decode.request import window_of
from mars_ray.errors import ConfigError, MarsError
from mars_ray.evaluate.bench import (
    asked_problems,
    check_room,
    counted,
    in_batches,
    most_ratio,
    print_cases,
    timed,
)
from mars_ray.files import ResultCache, check_writable
from mars_ray.model.create import create_model
from mars_ray.model.directory import ModelCard, read_card, write_card
from mars_ray.model.load import load_model, load_tokenizer, stop_at_turn_end, stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

_PEERS = Path(__file__).parent / "decoders"
# Variants of a peer by what comes before the hyphen, but for those with a script of their own.
_VARIANTS = ("vllm-ngram", "transformers-lookup", "llamacpp-q8", "llamacpp-lookup")
# Peers with drafts.
_DRAFTING = ("vllm-ngram", "vllm-mars", "transformers-lookup", "llamacpp-lookup")
# What peers with environments of their own import, and what makes these environments.
_ENVIRONMENTS = {
    "vllm": ("vllm", "tools/vllm_cpu_env.sh"),
    "llamacpp": ("llama_cpp", "tools/llamacpp_env.sh"),
    "pace": ("pace", "tools/pace_env.sh"),
}
# Least context by default; where steps are timed, sequences are so long.
_CONTEXT = 512
# Masks per step of an untrained model.
_RANDOM_DEPTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Contender:
    """A row of the result: a peer, and its settings besides the prompts."""

    label: str
    peer: str
    task: dict[str, Any] = field(default_factory=dict)
    replays: bool = False  # the first contender's answers, as drafts
    is_plain: bool = False  # a token from each forward


@dataclass(frozen=True, slots=True)
class _Cell:
    """What a round measures once."""

    contender: _Contender
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"{self.contender.label}, temperature {self.temperature:g}, batch {self.batch}"


@dataclass(slots=True)
class _Measured:
    """All cells' answers by round, the bytes read a second, and the seconds of steps."""

    answers: dict[_Cell, list[dict[str, Any]]]
    steps: dict[tuple[int, int], list[float]]
    read_bytes_per_s: list[float] = field(default_factory=list)


def run_bench_decode(
    job: BenchDecodeJob, console: Console, output: Path | None = None
) -> dict[str, Any]:
    """Measure, print a table, return all figures. Raises MarsError if a peer fails.

    Until it has all, what it has lies beside `output`, and the next run of this job begins there.
    """
    left_out = {peer: reason for peer in job.peers if (reason := _not_installed(peer, job))}
    contenders = [own for own in _contenders(job) if own.peer not in left_out]
    with ExitStack() as stack:
        bars = stack.enter_context(Bars(console))
        checkpoint = stack.enter_context(_checkpoint(job))
        card = drafting_card(checkpoint, EngineConfig(draft_adapter=job.draft_adapter))
        _check_modes(job, card)
        tasks, needed = _tasks(job, checkpoint)
        if job.max_context is None:
            job = job.model_copy(update={"max_context": max(_CONTEXT, needed)})
        peers = {
            peer: stack.enter_context(_running(peer, job, checkpoint, card.block_size))
            for peer in dict.fromkeys(contender.peer for contender in contenders)
        }
        bars.say(peers["mars"].hello["info"])
        parts = output and output.with_name(f".{output.name}.parts")
        kept = ResultCache(parts, _work(job))
        measured = _measure(job, _cells(job, contenders), tasks, peers, kept, bars)
        hellos = {name: peer.hello for name, peer in peers.items()}
    result = {
        # Paths of peers on this machine do not belong in a result.
        "job": job.model_dump(mode="json", exclude={"peer_pythons"}),
        "peers": {name: hello["version"] for name, hello in hellos.items()},
        "left_out": left_out,
        "draft_adapter": hellos["mars"]["draft_adapter"],
        "weight_bytes": {
            name: hello["weight_bytes"] for name, hello in hellos.items() if "weight_bytes" in hello
        },
        "read_bytes_per_s": measured.read_bytes_per_s,
        "cases": [_case(cell, measured, hellos, job) for cell in measured.answers],
        "steps": [
            {"batch": batch, "positions": positions, "seconds": statistics.median(seconds)}
            for (batch, positions), seconds in measured.steps.items()
        ],
        "provenance": provenance(),
    }
    _print(result, console)
    if parts:
        parts.unlink(missing_ok=True)
    return result


def _work(job: BenchDecodeJob) -> str:
    """What a measurement that is kept must be of: the same settings, code and machine."""
    settings = job.model_dump(mode="json", exclude={"repeats", "peers", "peer_pythons"})
    return json.dumps([settings, provenance()])


def _cells(job: BenchDecodeJob, contenders: Sequence[_Contender]) -> list[_Cell]:
    return [
        _Cell(contender, temperature, batch)
        for temperature in job.temperatures
        for batch in job.batch_sizes
        for contender in contenders
        if batch == 1 or contender.peer not in ALONE
    ]


def _measure(
    job: BenchDecodeJob,
    cells: Sequence[_Cell],
    tasks: dict[int, dict[str, Any]],
    peers: dict[str, "_Peer"],
    kept: ResultCache,
    bars: Bars,
) -> _Measured:
    """Rounds of all cells, behind one that warms up by the first batch of each. The answers of
    `exact` come before those that replay them."""
    steps = [(batch, positions) for batch in job.batch_sizes for positions in job.step_positions]
    measured = _Measured({cell: [] for cell in cells}, {step: [] for step in steps})
    exact: dict[tuple[float, int], list[list[int]]] = {}
    rounds = 1 + job.repeats
    bar = bars.add_task(
        "rounds, the first one to warm up", total=rounds * (1 + len(cells) + len(steps))
    )

    def ask(peer: str, task: dict[str, Any], name: str, round_: int) -> dict[str, Any]:
        bars.advance(bar)
        name = f"{name}, round {round_}"
        if not round_:
            return peers[peer].ask(task)
        if name not in kept:
            kept[name] = peers[peer].ask(task)
        return kept[name]

    weights = peers["mars"].hello["weight_bytes"]
    for round_ in range(rounds):
        seconds = ask("mars", {"read": weights}, "read", round_)["seconds"]
        measured.read_bytes_per_s += [weights / seconds] * bool(round_)
        for cell in cells:
            own, key = cell.contender, (cell.temperature, cell.batch)
            task: dict[str, Any] = tasks[cell.batch] | own.task | {"temperature": cell.temperature}
            if not round_:
                task["batches"] = task["batches"][:1]
            if own.replays:
                task["replayed"] = exact[key]
            answer = ask(own.peer, task, str(cell), round_)
            exact.setdefault(key, answer["tokens"])
            measured.answers[cell] += [answer] * bool(round_)
        exact.clear()
        for batch, positions in steps:
            name = f"step of {batch} x {positions}"
            answer = ask("mars", {"step": (batch, positions)}, name, round_)
            measured.steps[batch, positions] += [answer["seconds"]] * bool(round_)
    return measured


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


def _python(peer: str, job: BenchDecodeJob) -> str:
    """The interpreter of a peer: its own, or its family's, or ours."""
    pythons: dict[str, str] = {**job.peer_pythons}
    family = pythons.get(peer.partition("-")[0], sys.executable)
    return pythons.get(peer, family)


def _not_installed(peer: str, job: BenchDecodeJob) -> str | None:
    """Why a peer cannot take part; None if it can."""
    family = peer.partition("-")[0]
    if family not in _ENVIRONMENTS or _python(peer, job) != sys.executable:
        return None
    module, tool = _ENVIRONMENTS[family]
    if find_spec(module):
        return None
    return f"not installed: run {tool} DIR, and set peer_pythons.{family}=DIR/bin/python"


@contextmanager
def _running(name: str, job: BenchDecodeJob, checkpoint: str, depths: int) -> Iterator[_Peer]:
    """A peer's process while it is needed; `depths` are those of the drafts."""
    python = _python(name, job)
    script = name.partition("-")[0] if name in _VARIANTS else name.replace("-", "_")
    settings = {"peer": name, "checkpoint": checkpoint, "depths": depths}
    settings |= {"max_batch": max(job.batch_sizes)}
    settings |= {
        key: getattr(job, key)
        for key in ("dtype", "max_context", "threads", "draft_adapter", "window_control")
    }
    command = [python, str(_PEERS / f"{script}_peer.py"), json.dumps(settings)]
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
    ours = [
        _Contender(f"mars-ray {mode_label(own)}", "mars", {"mode": own}, is_plain=is_plain)
        for own, is_plain in ((m.model_dump(), isinstance(m, ExactMode)) for m in job.modes)
    ]
    plain = VerifiedMode(window=0, ngram=False).model_dump()
    oracles = [
        _Contender(f"oracle, {count} drafts", "mars", {"mode": plain, "drafts": count}, True)
        for count in job.oracle_drafts
    ]
    lockstep = [
        _Contender(f"lockstep {own.threshold:g}, cache: {own.cache}", "lockstep", own.model_dump())
        for own in job.lockstep
    ]
    peers = [_Contender(peer, peer, is_plain=peer not in _DRAFTING) for peer in job.peers]
    return ours + oracles + lockstep + peers


def _tasks(job: BenchDecodeJob, checkpoint: str) -> tuple[dict[int, dict[str, Any]], int]:
    """The tasks by batch size: the same prompts for every peer, and shared between batch sizes; and
    the tokens of the longest prompt and its answer.

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
        asked = asked_problems(job.task, count)
        prompts = [encode_prompt(problem.messages, tokenizer) for problem in asked]
        model = load_model(checkpoint, dtype=None)
        stop_at_turn_end(model, tokenizer)
        stops = sorted(stop_ids(model))
    needed = max(map(len, prompts)) + job.max_new_tokens
    check_room(needed, job.max_context or needed, "max_context")
    tasks = {
        batch: {
            "batches": in_batches(prompts, batch, job.prompts),
            "places": batch,
            "max_new_tokens": job.max_new_tokens,
            "stop_ids": list(stops),
        }
        for batch in job.batch_sizes
    }
    return tasks, needed


def _case(
    cell: _Cell, measured: _Measured, hellos: dict[str, Any], job: BenchDecodeJob
) -> dict[str, Any]:
    """A cell's figures, beside those of the first contender."""
    own, answers = cell.contender, measured.answers[cell]
    first = next(
        other
        for other in measured.answers
        if (other.temperature, other.batch) == (cell.temperature, cell.batch)
    )
    base = measured.answers[first]
    case: dict[str, Any] = {
        "label": own.label,
        "temperature": cell.temperature,
        "batch": cell.batch,
    } | counted(answers, base)
    if not job.window_control and own.peer == "mars" and not own.is_plain:
        return case | {"fault": "all masks are forced, also those that do not pay: no speed"}
    # Another engine may be any number of times as fast.
    is_bounded = own.peer == "mars" and first.contender.is_plain
    case |= timed(answers, base, most_ratio(answers[-1], base[-1]) if is_bounded else math.inf)
    if own.is_plain and cell.batch == 1:
        weights = hellos[own.peer].get("weight_bytes") or hellos["mars"]["weight_bytes"]
        read_per_s = statistics.median(measured.read_bytes_per_s)
        case["read_share"] = weights * case["tokens_per_s"] / read_per_s
    return case


def _print(result: dict[str, Any], console: Console) -> None:
    name = result["job"]["checkpoint"] or result["job"]["random_weights"]
    print_cases(f"decoding {name} in {result['job']['dtype']}", result["cases"], console)
    for peer, reason in result["left_out"].items():
        console.print(f"{peer} is left out: {reason}")


def main() -> None:
    """Run the comparison, print its table and its result as one line of JSON, and write that."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_intermixed_args()
    job = load_job(given.job, given.overrides, KINDS)
    assert isinstance(job, BenchDecodeJob)
    check_writable(given.output, "--output")
    result = run_bench_decode(job, Console(stderr=True), given.output)
    # First, so that it is somewhere if the disk is full.
    print(json.dumps(result), flush=True)
    given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
