"""Answers of a generation: the journal that keeps them, and the conversations that become of them.

The journal is a file that is only appended to, and read to resume:

first line   what the generation is made from
other lines  in order of arrival: an answer with its prompt's number, a try to write a prompt, or
             the working time of the engines

The results are conversations as token ids and as text, reasons of prompts that have none, and a
summary.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mars_ray.config.generate import GenerateJob
from mars_ray.core.statistics import is_looping
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.sources import Message
from mars_ray.errors import DataError
from mars_ray.files import append, changed_keys, read_journal, replaced
from mars_ray.generate.prompts import Choice, Prompt, SourcePrompts, Try

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to a prompt."""

    tokens: "array[int]"  # compact, because there may be many
    finish_reason: str
    forwards: int


class Part:
    """The file and its content: answers by the number of their prompt, tries by the index of their
    source in the job and their own number."""

    def __init__(self, path: Path, made_from: Line) -> None:
        """Raises DataError if the file belongs to another job or is inconsistent."""
        self.path = path
        self.answers: dict[int, Answer] = {}
        self.tries: dict[int, dict[int, Try]] = {}
        self.seconds = 0.0  # working time of the engines over all runs so far
        lines = read_journal(path)
        if not lines:
            append(path, made_from)
        else:
            check_same(lines[0], made_from, path)
        for line in lines[1:]:
            self._take(line)

    def add_answers(self, answers: Mapping[int, Answer]) -> None:
        """Records answers by the number of their prompt."""
        self._append(
            {
                "prompt": number,
                "answer_ids": answer.tokens.tolist(),
                "finish_reason": answer.finish_reason,
                "forwards": answer.forwards,
            }
            for number, answer in answers.items()
        )

    def add_tries(self, place: int, tries: Mapping[int, Try]) -> None:
        """Records tries of a source by their number."""
        self._append(
            {"source": place, "try": number, "text": each.text, "fault": each.fault}
            for number, each in tries.items()
        )

    def add_seconds(self, seconds: float) -> None:
        """Records working time of the engines."""
        self._append([{"seconds": seconds}])

    def _append(self, lines: Iterable[Line]) -> None:
        new = list(lines)
        for line in new:
            self._take(line)
        append(self.path, *new)

    def _take(self, line: Line) -> None:
        if "seconds" in line:
            self.seconds += line["seconds"]
            return
        if "try" in line:
            number, content = line["try"], Try(line["text"], line["fault"])
            known: dict[int, Any] = self.tries.setdefault(line["source"], {})
        else:
            tokens = array("i", line["answer_ids"])
            content = Answer(tokens, line["finish_reason"], line["forwards"])
            known, number = self.answers, line["prompt"]
        if number in known:
            raise DataError(
                f"{self.path} has answers twice, as two processes leave them: delete it"
            )
        known[number] = content


def check_same(before: Any, now: Line, place: Path) -> None:
    """Raises DataError if the existing output was made from something else."""
    if not isinstance(before, dict) or not before.keys() >= now.keys():
        raise not_ours(place)
    changed = changed_keys(before["job"], now["job"])
    changed += [f"content of {key}" for key in changed_keys(before["content"], now["content"])]
    if changed:
        raise DataError(
            f"{place} was written by another job, with another {', '.join(changed)}: choose "
            "another output, or delete it"
        )


def not_ours(place: Path) -> DataError:
    """The error for a file at this place that is not of this job."""
    return DataError(f"{place} is there and is not of mars-ray generate: choose another output")


# Messages name this many places for a reason; the table beside the output has all.
_TOLD = 5


class SkippedPrompts:
    """The origins of what is left out, by reason."""

    def __init__(self, asked: SourcePrompts) -> None:
        """With what was left out when the sources were read."""
        self.origins: dict[str, list[str]] = {}
        for origin, reason in asked.bad:
            self.add(f"bad row: {reason}", origin)
        for origin in asked.excluded:
            self.add("excluded", origin)

    def add(self, reason: str, origin: str) -> None:
        self.origins.setdefault(reason, []).append(origin)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are for each reason."""
        return {reason: len(origins) for reason, origins in self.origins.items()}

    def lines(self) -> Iterator[str]:
        for reason, origins in self.origins.items():
            more = f" and {len(origins) - _TOLD} more" if len(origins) > _TOLD else ""
            yield f"left out: {len(origins)}, {reason} ({', '.join(origins[:_TOLD])}{more})"


def has_room(prompt: Prompt, job: GenerateJob) -> bool:
    """Whether the context holds the prompt and the longest answer."""
    return len(prompt.ids) + job.max_new_tokens <= job.engine.context


def why_left_out(prompt: Prompt, answer: Answer | None, text: str, job: GenerateJob) -> str:
    """Why a prompt with this answer gets no line; empty if it gets one."""
    if answer is None and not has_room(prompt, job):
        return (
            f"too long: no room for {job.max_new_tokens} new tokens in engine.max_context "
            f"{job.engine.context}"
        )
    if answer is None:
        return "minutes were over"
    if answer.finish_reason != "stop" and not job.keep_cut:
        return "the answer was cut off by max_new_tokens"
    return "" if text.strip() else "the answer is empty"


@dataclass(frozen=True, slots=True)
class Generated:
    """Counts of what a generation wrote.

    Looping answers count among the conversations. They are easy to draft, so their tokens and
    forwards are also given separately.
    """

    output: str
    conversations: int
    left_out: int  # prompts without room for an answer, empty answers, cut answers unless kept
    tokens: int
    tokens_per_forward: float
    finish_reasons: dict[str, int]  # all answers by "stop" or "length"
    looping: int
    looping_tokens: int
    looping_forwards: int
    source_prompts: int
    own_prompts: int
    excluded: int
    own_tries: int
    own_faults: dict[str, int]  # why tries gave no prompt
    # Working time of the engines; not compared, as equal output may take different times.
    seconds: float = field(default=0.0, compare=False)
    # Of prompts and rows without a line, by reason; the table beside the output has their origins.
    left_out_why: dict[str, int] = field(default_factory=dict)


def write_answers(
    output: Path,
    prompts: Sequence[Prompt],
    answers: Mapping[int, Answer],
    encoder: ChatEncoder,
    job: GenerateJob,
    left_out: SkippedPrompts,
) -> int:
    """Writes the conversations in the order of their prompts; returns how many there are. Prompts
    without one go to `left_out`."""
    count = 0
    with replaced(output) as draft, draft.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            answer = answers.get(number)
            text = encoder.decode(answer.tokens) if answer else ""
            why = why_left_out(prompt, answer, text, job)
            if why or answer is None:
                left_out.add(why, prompt.origin)
                continue
            turns = [*prompt.messages, Message("assistant", text)]
            line = {
                "messages": [_as_row(turn) for turn in turns],
                "prompt_ids": prompt.ids.tolist(),
                "answer_ids": answer.tokens.tolist(),
                "finish_reason": answer.finish_reason,
                "forwards": answer.forwards,
                "origin": prompt.origin,
            }
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def _as_row(turn: Message) -> dict[str, str]:
    """A turn as data sets have it; answers' thoughts stand in their text."""
    row = {"role": turn.role, "content": turn.content}
    row |= {"name": turn.name} if turn.name else {}
    return row | ({"reasoning_content": turn.reasoning} if turn.reasoning else {})


def summary(
    output: Path,
    conversations: int,
    prompts: Sequence[Prompt],
    part: Part,
    choices: Sequence[Choice],
    excluded: int,
    left_out_why: dict[str, int],
) -> Generated:
    """Counts over all answers of the journal; `excluded` are prompts of sources, and `choices` the
    tries of own prompts."""
    answers = part.answers
    faults = sum((choice.faults for choice in choices), Counter[str]())
    tokens = sum(len(answer.tokens) for answer in answers.values())
    forwards = sum(answer.forwards for answer in answers.values())
    looping = [answer for answer in answers.values() if is_looping(answer.tokens)]
    own = sum(prompt.is_own for prompt in prompts)
    return Generated(
        output=str(output),
        conversations=conversations,
        left_out=len(prompts) - conversations,
        tokens=tokens,
        tokens_per_forward=tokens / max(1, forwards),
        finish_reasons=dict(Counter(answer.finish_reason for answer in answers.values())),
        looping=len(looping),
        looping_tokens=sum(len(answer.tokens) for answer in looping),
        looping_forwards=sum(answer.forwards for answer in looping),
        source_prompts=len(prompts) - own,
        own_prompts=own,
        excluded=excluded + faults["excluded"],
        own_tries=sum(choice.tries for choice in choices),
        own_faults=dict(faults),
        seconds=part.seconds,
        left_out_why=left_out_why,
    )
