"""A model's own answers to training prompts, written with the engine; run again to resume.

    answers.jsonl.part   while it runs: the job, then one line a prompt, in their order
    answers.jsonl        the conversations, once all are there; a `files` source reads them
    answers.json         the job, and what it wrote

An answer that was cut off, or whose prompt is too long, would teach a wrong end: it is counted and
left out.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mars_ray.config.generate import GenerateJob
from mars_ray.data.chat import Message, encode_prompt
from mars_ray.data.journal import read_journal
from mars_ray.data.sources import BadRows, Record, read
from mars_ray.decode.engine import Engine, generate_all, load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import DataError
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generation wrote."""

    output: str
    conversations: int
    left_out: int
    tokens: int
    tokens_per_forward: float


def run_generation(job: GenerateJob, console: Console) -> Generated:
    """Write the output, or the rest of it.

    Raises DataError if the prompts cannot be read or if what is there is another job's, and
    ModelError.
    """
    output = Path(job.output)
    done = output.with_suffix(".json")
    if done.exists() and output.exists():
        table = json.loads(done.read_text())
        _check(table["job"], job, done)
        return Generated(**table["generated"])
    part = output.with_name(f"{output.name}.part")
    lines = _resume(part, job)
    records = list(read(job.prompts, BadRows()))
    with Bars(console) as bars:
        task = bars.add_task("answers", total=len(records), completed=len(lines))
        for chunk in _answers(job, records[len(lines) :], lambda: bars.advance(task)):
            _append(part, chunk)
            lines += chunk
            bars.update(task, completed=len(lines))
    generated = _summary(output, lines)
    _write(output, [line["messages"] for line in lines if line["messages"]])
    table = {"job": job.model_dump(mode="json"), "generated": asdict(generated)}
    done.write_text(json.dumps(table | {"provenance": provenance()}, indent=1) + "\n")
    part.unlink()
    return generated


def _answers(
    job: GenerateJob, records: list[Record], advance: Callable[[], None]
) -> Iterator[list[Line]]:
    if not records:
        return
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    rest = iter(records)
    while chunk := list(islice(rest, job.save_every)):
        yield _answer_all(engine, tokenizer, job, chunk, advance)


def _answer_all(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    job: GenerateJob,
    records: list[Record],
    advance: Callable[[], None],
) -> list[Line]:
    stops = stop_ids(engine.model)
    requests, lines = [], [_left_out() for _ in records]
    for index, record in enumerate(records):
        prompt = encode_prompt(_prompt(record), tokenizer)
        if len(prompt) + job.max_new_tokens <= job.engine.max_context:
            requests.append(
                Request(
                    str(index), tuple(prompt), job.mode, job.sampling, job.max_new_tokens, stops
                )
            )
    for completion in generate_all(engine, requests, lambda _: advance()):
        index = int(completion.request_id)
        lines[index] = _line(records[index], completion, tokenizer)
    return lines


def _prompt(record: Record) -> list[Message]:
    """Everything before the last turn of the assistant, whose place the answer takes."""
    last = max(i for i, message in enumerate(record.messages) if message.role == "assistant")
    return list(record.messages[:last])


def _line(record: Record, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Line:
    line = {"messages": None, "tokens": len(completion.tokens), "forwards": completion.forwards}
    text = str(tokenizer.decode(list(completion.tokens), skip_special_tokens=True))
    if completion.finish_reason == "stop" and text.strip():
        turns = [*_prompt(record), Message("assistant", text)]
        line["messages"] = [{"role": t.role, "content": t.content} for t in turns]
    return line


def _left_out() -> Line:
    return {"messages": None, "tokens": 0, "forwards": 0}


def _summary(output: Path, lines: list[Line]) -> Generated:
    tokens = sum(line["tokens"] for line in lines)
    kept = sum(line["messages"] is not None for line in lines)
    forwards = sum(line["forwards"] for line in lines)
    return Generated(str(output), kept, len(lines) - kept, tokens, tokens / max(1, forwards))


def _resume(part: Path, job: GenerateJob) -> list[Line]:
    """The lines that an earlier attempt wrote whole; the file is made if it is not there."""
    if not part.exists():
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(job.model_dump_json() + "\n")
        return []
    first, *lines = read_journal(part) or [{}]
    _check(first, job, part)
    return lines


def _check(before: dict[str, Any], job: GenerateJob, place: Path) -> None:
    now = job.model_dump(mode="json")
    changed = sorted(key for key in before | now if before.get(key) != now.get(key))
    if changed:
        raise DataError(
            f"{place} was written by another job, with another {', '.join(changed)}: choose "
            "another output, or delete it"
        )


def _append(part: Path, lines: list[Line]) -> None:
    with part.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _write(output: Path, conversations: list[list[Line]]) -> None:
    draft = output.with_name(f".{output.name}")
    rows = (json.dumps({"messages": turns}) + "\n" for turns in conversations)
    draft.write_text("".join(rows), encoding="utf-8")
    draft.replace(output)
