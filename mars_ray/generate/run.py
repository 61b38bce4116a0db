"""Writes a model's own answers with engines across the cluster; run again to resume.

    answers.jsonl.part   during the run: what it is made from, then answers in order of arrival
    answers.jsonl        the conversations, once all are done; a `files` source reads them
    answers.json         what it is made from, and the counts

It is made from a job, and from the prompts and the checkpoint as they were at the first start. The
number of engines does not matter. `Worker` is one of them, without Ray: it keeps its batch full
while there is work.
"""

import hashlib
import json
import math
import platform
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from itertools import chain, count, takewhile
from os.path import expanduser
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import TaskID

from mars_ray.cluster.connection import Connect, already
from mars_ray.config.decode import EngineConfig
from mars_ray.config.generate import GenerateJob, OwnPrompts
from mars_ray.core.frontier import FRONTIER_FILE
from mars_ray.data.chat import ChatEncoder, UserTurn, beginning_key, encoder_of
from mars_ray.data.sources import BadRows
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import check_engine, load_engine, with_room
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import ConfigError, DataError, EngineError
from mars_ray.files import sole_writer, write_whole
from mars_ray.generate.answers import (
    Answer,
    Generated,
    Line,
    Part,
    SkippedPrompts,
    check_same,
    has_room,
    not_ours,
    summary,
    write_answers,
)
from mars_ray.generate.prompts import (
    Choice,
    Prompt,
    SourcePrompts,
    encoded,
    excluded_keys,
    read_sources,
    requests_of,
    tried,
)
from mars_ray.model.directory import check_complete, read_card
from mars_ray.model.load import load_tokenizer, stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance
from mars_ray.storage.copies import Directory, wanted

# So many requests are decoded however late it is: fewer answers cannot be divided into a part that
# trains and one that is held out.
LEAST = 10
# Finished answers are returned this often, so that the driver records them.
_RETURN_EVERY_S = 5.0


class Engines(Protocol):
    """Decodes requests with any number of engines, local or remote."""

    def start(self, requests: int) -> None:
        """Starts as many engines as so many requests need, and waits until one is ready. Raises
        MarsError."""
        ...

    def decode(
        self, requests: Iterable[Request], until: float = math.inf
    ) -> Iterator[list[Completion]]:
        """Yields all requests, for which engines were started, as they finish, in any order; after
        `until` (on the clock of `time.monotonic`) none is begun but the first `LEAST`. Raises
        MarsError."""
        ...


class Worker:
    """One engine that decodes the requests it is given, some seconds at a time."""

    def __init__(self, checkpoint: str, config: EngineConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._engine: Engine | None = None
        self._stops: frozenset[int] = frozenset()

    def load(self) -> str:
        """Makes the engine ready; returns the type in which it computes. Raises MarsError."""
        with self._failing("loading the model"):
            self._engine, _ = load_engine(self._checkpoint, self._config)
            self._stops = stop_ids(self._engine.model)
        return str(self._engine.model.dtype).removeprefix("torch.")

    def advance(self, requests: Sequence[Request], leave: int) -> list[Completion]:
        """Adds requests and decodes until only `leave` of all its requests are left or some seconds
        are over. Requests end at the model's own stop tokens as well as at theirs.

        Raises MarsError; its requests are lost then.
        """
        engine = self._engine
        assert engine is not None, "load first"
        finished: list[Completion] = []
        due = time.monotonic() + _RETURN_EVERY_S
        with self._failing("decoding"):
            for request in requests:
                engine.submit(replace(request, stop_ids=request.stop_ids | self._stops))
            while engine.running + engine.waiting > leave and time.monotonic() < due:
                for event in engine.step():
                    if event.failure:
                        failure = f"request {event.request_id} failed: {event.failure}"
                        raise EngineError(failure) from event.failure
                    if event.completion:
                        finished.append(event.completion)
        return finished

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Turns torch's errors, such as out-of-memory, into EngineErrors that say what to do."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise EngineError(
                f"{doing} failed on {platform.node()}: {error}. If memory is short there, lower "
                "workers, engine.max_batch or engine.max_context"
            ) from error


# Settings of place and speed, on which the answers do not depend.
_HARMLESS = {"minutes", "least_answers", "workers", "cpus_per_worker", "gpus_per_worker"}
Start = Callable[[GenerateJob, Callable[[str], None]], AbstractContextManager[Engines]]


def run_generation(
    job: GenerateJob, console: Console, start: Start, connect: Connect = already
) -> Generated:
    """Write the output, or the rest of it, with the engines that `start` gives on the cluster to
    which `connect` connects, once everything that can be refused without engines is checked.

    Raises DataError if the prompts cannot be read, if too many are bad, if the model should write
    some and writes none, or if none has room for an answer. Raises it also if existing output is
    not of this job, these prompts and this model. Raises ConfigError if another process is writing
    the output, EngineError if the engines cannot be started or fail, and ModelError.
    """
    output = Path(expanduser(job.output))
    read_card(job.checkpoint)
    check_complete(Path(job.checkpoint))
    check_engine(job.checkpoint, job.engine, (job.mode,))
    generation = _Generation(job, encoder_of(load_tokenizer(job.checkpoint)), start)
    # One lock per file: several outputs may share a directory.
    lock = output.with_name(f"{output.name}.part.lock")
    with sole_writer(output, lock, "output"):
        return generation.run(output, console, connect)


_OWN = "prompts of its own"  # what progress calls them
# More than a template writes behind a prompt.
_TEMPLATE_TOKENS = 64
# Shares of a job's minutes that are over when the first answers end, to prompts that are there, and
# when the model has written prompts itself. A model that is slow here has answers then.
_FIRST_SHARE, _OWN_SHARE = 0.25, 0.5
# Speed is measured with so many tokens of each answer; with a whole batch only if a few answers
# took less than these seconds.
_PROBE_TOKENS, _PROBE_REQUESTS, _QUICK_S = 16, (1, 8), 2.0


class _Clock:
    """Measures when a job's minutes are over, counted over all its runs. The time in which engines
    start is left out: beside other work it may be longer than all the minutes."""

    def __init__(self, minutes: float | None, part: Part) -> None:
        self._limit_s = math.inf if minutes is None else 60 * minutes
        self._part = part
        self._noted = time.monotonic()

    def until(self, share: float) -> float:
        """The time on `time.monotonic` at which this share of the minutes is over."""
        return self._noted + share * self._limit_s - self._part.seconds

    def note(self) -> None:
        """Counts the time that has passed; also in the file, if a resumed job must count it."""
        now = time.monotonic()
        passed_s, self._noted = now - self._noted, now
        if self._limit_s < math.inf:
            self._part.add_seconds(passed_s)
        else:
            self._part.seconds += passed_s

    def skip(self) -> None:
        """Leaves out the time that has passed since the last note."""
        self._noted = time.monotonic()


class _Counts:
    """Tells how far a job is: prompts and answers of how many, or under a limit of minutes, which
    leaves it open how many there will be, their number so far and the minutes."""

    def __init__(self, bars: Bars, part: Part, minutes: float | None) -> None:
        self._bars, self._part, self._minutes = bars, part, minutes
        self._tasks: dict[str, TaskID] = {}

    def tell(self, what: str, count: int, total: int) -> None:
        """Tells that there are `count` of at most `total`."""
        if self._minutes is None:
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what)
            self._bars.update(self._tasks[what], completed=count, total=total)
            return
        if not self._tasks:
            self._tasks[""] = self._bars.add_task(what, total=self._minutes)
        told, done = f"{count:,} {what}; minutes", self._part.seconds / 60
        self._bars.update(self._tasks[""], description=told, completed=done)


class _Generation:
    """A job with its inputs; everything that can be refused without a model is refused at once."""

    def __init__(self, job: GenerateJob, encoder: ChatEncoder, start: Start) -> None:
        self._encoder = encoder
        self._start = start
        self._turns: dict[int, UserTurn] = {
            place: encoder.user_turn(source.system)
            for place, source in enumerate(job.prompts)
            if isinstance(source, OwnPrompts)
        }
        self._excluded = excluded_keys(job.exclude)
        self._asked = read_sources(job, encoder, self._excluded)
        self._made_from = _made_from(job, self._asked, self._excluded)
        # The longest prompt; of own prompts at most.
        lengths = [len(prompt.ids) for prompt in self._asked.prompts]
        for place, turn in self._turns.items():
            source = job.prompts[place]
            assert isinstance(source, OwnPrompts)
            lengths.append(len(turn.before) + source.max_new_tokens + _TEMPLATE_TOKENS)
        needed = max(lengths, default=0) + job.max_new_tokens
        engine = with_room(job.engine, job.checkpoint, needed)
        self._job = job.model_copy(update={"engine": engine})

    def run(self, output: Path, console: Console, connect: Connect) -> Generated:
        done = output.with_suffix(".json")
        part_file = output.with_name(f"{output.name}.part")
        # The part is deleted last: while it exists, the other files belong to this command.
        if not part_file.exists() and (generated := _finished(output, done, self._made_from)):
            return generated
        part = Part(part_file, self._made_from)
        connect()
        clock = _Clock(self._job.minutes, part)
        with Bars(console) as bars, self._start(self._job, bars.say) as engines:
            counts, is_over = _Counts(bars, part, self._job.minutes), False
            if self._job.minutes is not None and not part.answers:
                try:
                    answers = self._check_minutes(self._job.minutes, clock, engines, bars)
                except ConfigError:
                    part_file.unlink()
                    raise
                if self._turns:
                    first = self._asked.prompts[: max(LEAST, int(_FIRST_SHARE * answers))]
                    is_over = self._answer(first, part, clock, engines, counts)
            prompts, choices = list(self._asked.prompts), list[Choice]()
            if not is_over:
                for place in self._turns:
                    own = self._own_prompts(place, prompts, part, clock, engines, bars, counts)
                    choices.append(own)
                    prompts += encoded(own.records, self._encoder, BadRows())
                self._answer(prompts, part, clock, engines, counts)
        clock.note()
        if not part.answers:
            # Nothing to resume, so a job with other settings may begin.
            part_file.unlink()
            raise DataError(
                f"no prompt has room for {self._job.max_new_tokens} tokens of an answer in "
                f"engine.max_context {self._job.engine.context}: lower max_new_tokens, or "
                "raise it"
            )
        left_out = SkippedPrompts(self._asked)
        count = write_answers(output, prompts, part.answers, self._encoder, self._job, left_out)
        excluded = len(self._asked.excluded)
        generated = summary(output, count, prompts, part, choices, excluded, left_out.counts)
        for line in left_out.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        table = self._made_from | {"generated": asdict(generated), "provenance": provenance()}
        table |= {"left_out": left_out.origins}
        write_whole(done, json.dumps(table, indent=1) + "\n")
        part_file.unlink()
        return generated

    def _check_minutes(self, minutes: float, clock: _Clock, engines: Engines, bars: Bars) -> float:
        """How many answers the minutes would give without own prompts, by the tokens a second that
        are measured. Raises ConfigError if there will be fewer than the job wants."""
        job = self._job
        rate = self._tokens_per_s(clock, engines)
        most = 60 * minutes * rate / job.max_new_tokens
        answers = most * (1 - (_OWN_SHARE - _FIRST_SHARE) * bool(self._turns))
        told = (
            f"{rate:.0f} tokens a second: {minutes:.1f} minutes give about {answers:.0f} answers "
            f"of {job.max_new_tokens} tokens"
        )
        bars.say(told)
        if answers < job.least_answers:
            times = math.ceil(10 * job.least_answers / answers) / 10
            raise ConfigError(
                f"{told}, and at least {job.least_answers} are wanted: give {times:.1f} times as "
                "many minutes, or lower max_new_tokens"
            )
        return most

    def _tokens_per_s(self, clock: _Clock, engines: Engines) -> float:
        """New tokens a second of all engines, the reading of prompts included. The time that this
        takes is none of the job's minutes."""
        job = self._job
        asked = (prompt for prompt in self._asked.prompts if has_room(prompt, job))
        prompts = [tuple(prompt.ids.tolist()) for prompt in asked]
        prompts = prompts or [turn.before for turn in self._turns.values()]
        if not prompts:
            return math.inf
        engines.start(job.engine.max_batch)
        rate = 0.0
        for requested in (*_PROBE_REQUESTS, job.engine.max_batch):
            requests = [
                Request(
                    str(number),
                    prompts[number % len(prompts)],
                    job.mode,
                    job.sampling,
                    min(_PROBE_TOKENS, job.max_new_tokens),
                    frozenset(),
                )
                for number in range(requested)
            ]
            begun = time.monotonic()
            done = list(chain.from_iterable(engines.decode(requests)))
            seconds = time.monotonic() - begun
            rate = sum(len(each.tokens) for each in done) / seconds
            # The first answer waits for engines that start later.
            if seconds > _QUICK_S and requested > 1:
                break
        clock.skip()
        return rate

    def _own_prompts(
        self,
        place: int,
        prompts: list[Prompt],
        part: Part,
        clock: _Clock,
        engines: Engines,
        bars: Bars,
        counts: _Counts,
    ) -> Choice:
        source, turn = self._job.prompts[place], self._turns[place]
        assert isinstance(source, OwnPrompts)
        seen = {beginning_key(prompt.messages[-1].content) for prompt in prompts}
        choice = Choice(source, self._excluded, seen)
        known = part.tries.setdefault(place, {})
        # What an earlier run has tried, whatever is left of the minutes.
        choice.take(map(known.__getitem__, takewhile(known.__contains__, count())))
        while more := choice.more:
            if time.monotonic() >= clock.until(_OWN_SHARE):
                # Late, but prompts that are too few would be answers that are too few.
                if len(prompts) + len(choice.records) >= LEAST or not choice.is_promising:
                    break
                more = min(more, LEAST)
            numbers = range(choice.tries, choice.tries + more)
            requests = requests_of(source, self._job, turn, (n for n in numbers if n not in known))
            usable = len(choice.records)
            for completions in _decode(list(requests), _OWN_SHARE, clock, engines):
                tries = {int(c.request_id): tried(c, turn, self._encoder) for c in completions}
                part.add_tries(place, tries)
                # An estimate: which of them are new is decided in order, once all are done.
                usable += sum(not each.fault for each in tries.values())
                counts.tell(_OWN, usable, source.count)
            # Without gaps, because the next tries are numbered from the last one taken.
            choice.take(map(known.__getitem__, takewhile(known.__contains__, numbers)))
            counts.tell(_OWN, len(choice.records), source.count)
        counts.tell(_OWN, len(choice.records), len(choice.records))
        # Once time has run out, the prompts so far suffice.
        if not (choice.records or prompts) or time.monotonic() < clock.until(_OWN_SHARE):
            choice.check()
        if len(choice.records) < source.count:
            bars.say(f"{choice.tries} tries gave {len(choice.records)} of {source.count} prompts")
        return choice

    def _answer(
        self,
        prompts: Sequence[Prompt],
        part: Part,
        clock: _Clock,
        engines: Engines,
        counts: _Counts,
    ) -> bool:
        """Answers the prompts that have no answer yet, until the minutes are over. Returns whether
        they are; requests in progress are then dropped with the engines."""
        job, requests = self._job, list[Request]()
        for number, prompt in enumerate(prompts):
            if number in part.answers or not has_room(prompt, job):
                continue
            # With one seed for all, the same noise would favour the same tokens at each position.
            seed = (job.sampling.seed + number + 2**63) % 2**64 - 2**63
            sampling = job.sampling.model_copy(update={"seed": seed})
            ids, limit = tuple(prompt.ids.tolist()), job.max_new_tokens
            requests.append(Request(str(number), ids, job.mode, sampling, limit, frozenset()))
        known = len(prompts) - len(requests)
        counts.tell("answers", known, len(prompts))
        if job.minutes is not None:
            # In random order, so that all sources get equal shares however far it gets.
            requests.sort(key=lambda request: hashlib.sha256(request.id.encode()).digest())
        for completions in _decode(requests, 1.0, clock, engines):
            part.add_answers(
                {
                    int(c.request_id): Answer(array("i", c.tokens), c.finish_reason, c.forwards)
                    for c in completions
                }
            )
            known += len(completions)
            counts.tell("answers", known, len(prompts))
            if time.monotonic() > clock.until(1.0) and len(part.answers) >= LEAST:
                return True
        return False


def _decode(
    requests: Sequence[Request], share: float, clock: _Clock, engines: Engines
) -> Iterator[list[Completion]]:
    """Yields the requests as they finish, until this share of the minutes is over."""
    clock.note()
    engines.start(len(requests))
    clock.skip()
    for completions in engines.decode(requests, clock.until(share)):
        clock.note()
        yield completions


def _made_from(job: GenerateJob, asked: SourcePrompts, excluded: frozenset[bytes]) -> Line:
    """The job, and digests of the inputs that it names, which may change under the same name."""
    prompts = hashlib.sha256()
    for prompt in asked.prompts:
        turns = [turn.key for turn in prompt.messages]
        prompts.update(json.dumps(turns).encode() + b"\n")
    content = {
        "prompts": prompts.hexdigest(),
        "exclude": hashlib.sha256(b"".join(sorted(excluded))).hexdigest(),
        "checkpoint": _model(job),
    }
    return {"job": job.model_dump(mode="json", exclude=_HARMLESS), "content": content}


def _model(job: GenerateJob) -> str:
    """A digest of all files that loading reads: a template or a stop token matters as weights do.

    It costs one read of the files. Their times would not do, as they differ between copies.
    """
    directory = Path(job.checkpoint).resolve()
    output = Path(expanduser(job.output)).resolve()
    # Excluded are files that may appear in the model's directory meanwhile: an evaluation's
    # frontier, outputs of this and other jobs with their tables, and temporary files of all these.
    others = {directory / FRONTIER_FILE, output.with_suffix(".json")}
    others |= {path.with_suffix(".json") for path in directory.glob("*.jsonl")}
    others |= set(directory.glob(".*"))
    digest = hashlib.sha256()
    for name in sorted(file.name for file in wanted(Directory.at(str(directory)))):
        if directory / name not in others:
            with (directory / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(json.dumps([name, content]).encode())
    return digest.hexdigest()


def _finished(output: Path, done: Path, made_from: Line) -> Generated | None:
    """The result of an earlier run that finished, or None if there is none.

    Raises DataError rather than replace a file that is not of this job.
    """
    if done.exists():
        try:
            table = json.loads(done.read_text("utf-8"))
        except ValueError:
            raise not_ours(done) from None
        check_same(table, made_from, done)
        return Generated(**table["generated"]) if output.exists() else None
    if output.exists():
        raise not_ours(output)
    return None
