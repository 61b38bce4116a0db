"""A model's own answers to training prompts, written with the engine; run again to resume.

    answers.jsonl.part   while it runs: what it is made from, then one line a prompt, in their order
    answers.jsonl        the conversations, once all are there; a `files` source reads them
    answers.json         what it is made from, and what was written

It is made from a job, and from what prompts and checkpoint were at the first start.

An answer that was cut off, or whose prompt is too long, would teach a wrong end: it is counted and
left out.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mars_ray.config.generate import GenerateJob
from mars_ray.core.frontier import FRONTIER_FILE
from mars_ray.data.chat import ChatEncoder, Message, encode_prompt, encoder_of
from mars_ray.data.journal import read_journal
from mars_ray.data.sources import BadRows, Record, read
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import DataError
from mars_ray.model.card import read_card
from mars_ray.model.complete import check_complete
from mars_ray.model.load import load_tokenizer
from mars_ray.model.object_store import WANTED
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance
from mars_ray.writer import replaced, sole_writer

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

    Raises DataError if the prompts cannot be read, if too many of them are bad, if none of them has
    room for an answer, or if what is there is not of this job, these prompts and this model;
    ConfigError if another process is writing it; and ModelError.
    """
    output = _output(job)
    part = output.with_name(f"{output.name}.part")
    read_card(job.checkpoint)
    check_complete(Path(job.checkpoint))
    records = _records(job)
    made_from = _made_from(job, records)
    # By file: several outputs may share a directory.
    with sole_writer(output, part.with_name(f"{part.name}.lock"), "output"):
        return _generated(job, records, made_from, part, console)


def _generated(
    job: GenerateJob, records: list[Record], made_from: Line, part: Path, console: Console
) -> Generated:
    output = _output(job)
    done = output.with_suffix(".json")
    # The part goes last: while it is there, the others are of this command.
    if not part.exists() and (generated := _finished(output, done, made_from)):
        return generated
    lines = _resume(part, made_from)
    with Bars(console) as bars:
        task = bars.add_task("answers", total=len(records), completed=len(lines))
        for chunk in _answers(job, records[len(lines) :], lambda: bars.advance(task)):
            _append(part, chunk, len(lines))
            lines += chunk
            bars.update(task, completed=len(lines))
    if not any(line["forwards"] for line in lines):
        # Nothing to go on with: a job with other settings may begin.
        part.unlink()
        raise DataError(
            f"no prompt has room for {job.max_new_tokens} tokens of an answer in "
            f"engine.max_context {job.engine.max_context}: lower max_new_tokens, or raise it"
        )
    generated = _summary(output, lines)
    _write(output, [line["messages"] for line in lines if line["messages"]])
    table = made_from | {"generated": asdict(generated), "provenance": provenance()}
    with replaced(done) as draft:
        draft.write_text(json.dumps(table, indent=1) + "\n")
    part.unlink()
    return generated


def _output(job: GenerateJob) -> Path:
    return Path(job.output).expanduser()


def _records(job: GenerateJob) -> list[Record]:
    report = BadRows()
    encoder = encoder_of(load_tokenizer(job.checkpoint))
    records = list(_accepted(read(job.prompts, report), encoder, report))
    report.check(job.max_bad_share)
    if not records:
        raise DataError(f"there are no prompts: {report.bad} of {report.seen} rows are bad")
    return records


def _accepted(records: Iterable[Record], encoder: ChatEncoder, report: BadRows) -> Iterator[Record]:
    """Those whose prompts the chat template takes; the others go to `report`."""
    for record in records:
        try:
            encoder.plan_prompt(_prompt(record))
        except DataError as error:
            report.add(record.origin, str(error))
        else:
            yield record


def _made_from(job: GenerateJob, records: list[Record]) -> Line:
    """The job and the content of what it names, which may change under the same name."""
    prompts = hashlib.sha256()
    for record in records:
        turns = [(turn.role, turn.content) for turn in _prompt(record)]
        prompts.update(json.dumps(turns).encode() + b"\n")
    content = {"prompts": prompts.hexdigest(), "checkpoint": _model(job)}
    return {"job": job.model_dump(mode="json"), "content": content}


def _model(job: GenerateJob) -> str:
    """A digest of all files that loading takes: a template or a token that ends answers matters as
    weights do. One read of them, which loading takes too; their times differ between copies.
    """
    directory = Path(job.checkpoint).resolve()
    # An evaluation may come in between, and writes beside the model how good it is; outputs may
    # lie there, this one and others, each with a table of the same name; and drafts of all these.
    others = {directory / FRONTIER_FILE, _output(job).resolve().with_suffix(".json")}
    others |= {path.with_suffix(".json") for path in directory.glob("*.jsonl")}
    others |= set(directory.glob(".*"))
    digest = hashlib.sha256()
    for path in sorted(set(directory.iterdir()) - others):
        if path.name.endswith(WANTED) and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(json.dumps([path.name, content]).encode())
    return digest.hexdigest()


def _finished(output: Path, done: Path, made_from: Line) -> Generated | None:
    """What an earlier run wrote to its end, or None if nothing is there.

    Raises DataError rather than have a file replaced that is not of this job.
    """
    if done.exists():
        table = _table(done)
        _check(table, made_from, done)
        return Generated(**table["generated"]) if output.exists() else None
    if output.exists():
        raise _not_ours(output)
    return None


def _table(done: Path) -> Any:
    try:
        return json.loads(done.read_text("utf-8"))
    except ValueError:
        raise _not_ours(done) from None


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


def _resume(part: Path, made_from: Line) -> list[Line]:
    """The lines that an earlier attempt wrote whole; the file is made if it is not there."""
    kept = read_journal(part)
    if not kept:
        part.write_text(json.dumps(made_from) + "\n")
        return []
    _check(kept[0], made_from, part)
    # Lines of versions before have no number.
    if any("prompt" in line and line["prompt"] != i for i, line in enumerate(kept[1:])):
        raise DataError(
            f"{part} has answers twice or not in the order of their prompts, as two processes "
            "leave them: delete it"
        )
    return kept[1:]


def _check(before: Any, now: Line, place: Path) -> None:
    if not isinstance(before, dict) or not before.keys() >= now.keys():
        raise _not_ours(place)
    changed = _changed(before["job"], now["job"])
    changed += [f"content of {key}" for key in _changed(before["content"], now["content"])]
    if changed:
        raise DataError(
            f"{place} was written by another job, with another {', '.join(changed)}: choose "
            "another output, or delete it"
        )


def _changed(before: Line, now: Line) -> list[str]:
    return sorted(key for key in before | now if before.get(key) != now.get(key))


def _not_ours(place: Path) -> DataError:
    return DataError(f"{place} is there and is not of mars-ray generate: choose another output")


def _append(part: Path, lines: list[Line], first: int) -> None:
    """With the number of each line's prompt, of which `first` is the first one's."""
    rows = ({"prompt": number} | line for number, line in enumerate(lines, start=first))
    with part.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write(output: Path, conversations: list[list[Line]]) -> None:
    rows = (json.dumps({"messages": turns}) + "\n" for turns in conversations)
    with replaced(output) as draft:
        draft.write_text("".join(rows), encoding="utf-8")
