"""The results of a generation: conversations as token ids and as text, and a summary."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mars_ray.config.generate import GenerateJob
from mars_ray.core.loops import is_looping
from mars_ray.data.chat import ChatEncoder, Message
from mars_ray.files import replaced
from mars_ray.generate.left_out import LeftOut, why_left_out
from mars_ray.generate.part import Answer
from mars_ray.generate.prompts import Prompt

Line = dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class Found:
    """Counts of prompts that were excluded or tried, over the whole job."""

    excluded: int
    own_tries: int
    own_faults: Mapping[str, int]


def write_answers(
    output: Path,
    prompts: Sequence[Prompt],
    answers: Mapping[int, Answer],
    encoder: ChatEncoder,
    job: GenerateJob,
    left_out: LeftOut,
) -> int:
    """Writes the conversations in the order of their prompts; returns how many there are. Prompts
    without one go to `left_out`."""
    count = 0
    with replaced(output) as draft, draft.open("w", encoding="utf-8") as file:
        for line in _lines(prompts, answers, encoder, job, left_out):
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def _lines(
    prompts: Sequence[Prompt],
    answers: Mapping[int, Answer],
    encoder: ChatEncoder,
    job: GenerateJob,
    left_out: LeftOut,
) -> Iterator[Line]:
    for number, prompt in enumerate(prompts):
        answer = answers.get(number)
        text = encoder.decode(answer.tokens) if answer else ""
        why = why_left_out(prompt, answer, text, job)
        if why or answer is None:
            left_out.add(why, prompt.origin)
            continue
        turns = [*prompt.messages, Message("assistant", text)]
        yield {
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            "prompt_ids": prompt.ids.tolist(),
            "answer_ids": answer.tokens.tolist(),
            "finish_reason": answer.finish_reason,
            "forwards": answer.forwards,
            "origin": prompt.origin,
        }


def summary(
    output: Path,
    conversations: int,
    prompts: Sequence[Prompt],
    answers: Mapping[int, Answer],
    found: Found,
    seconds: float,
    left_out_why: dict[str, int],
) -> Generated:
    """Counts over all answers of the journal."""
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
        excluded=found.excluded,
        own_tries=found.own_tries,
        own_faults=dict(found.own_faults),
        seconds=seconds,
        left_out_why=left_out_why,
    )
