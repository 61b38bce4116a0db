"""Prompts of a user's own: what rows may look like, grading, the report, refusals."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import EvaluateJob, FilesTask, RegexMatch
from mars_ray.config.modes import ConfidenceMode, VerifiedMode
from mars_ray.core.frontier import read_frontier
from mars_ray.data.chat import encode_prompt
from mars_ray.data.sources import Message
from mars_ray.errors import ConfigError, DataError
from mars_ray.evaluate import run
from mars_ray.evaluate.run import print_table, run_evaluation, summary
from mars_ray.evaluate.tasks import problems_of
from mars_ray.model.load import load_model, load_tokenizer

QUIET = Console(quiet=True)
ASKED = ("Tom has 3 apples.", "How many are 4 + 4?", "Ann has 5 boxes.", "What is 9 - 2?")


def written(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_job(checkpoint: Path, path: str, output: Path, **changes) -> EvaluateJob:
    task = {"type": "files", "paths": [path]} | changes.pop("task", {})
    settings = {
        "checkpoint": str(checkpoint),
        "task": task,
        "modes": (VerifiedMode(), VerifiedMode(threshold=0.0)),
        "max_new_tokens": 12,
        "engine": EngineConfig(max_batch=4, max_context=128),
        "output_dir": str(output),
    }
    return EvaluateJob.model_validate(settings | changes)


@pytest.fixture
def said(checkpoint, tmp_path) -> list[str]:
    """What `exact` answers."""
    path = written(tmp_path / "said.jsonl", [{"prompt": text} for text in ASKED])
    run_evaluation(make_job(checkpoint, path, tmp_path / "said", modes=()), QUIET)
    rows = (tmp_path / "said" / "answers.jsonl").read_text().splitlines()
    return [json.loads(row)["text"] for row in rows]


def test_every_shape_of_a_row(tmp_path):
    """Guards files that people have and nobody could measure; a reference may come with any."""
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    rows = [
        {"prompt": "q", "reference": ["a", "b"]},
        {"question": "q", "answer": 7},
        {"instruction": "q", "output": "a"},
        {"messages": [user, assistant]},
        {"messages": [user], "answer": {"tests": []}},
        batch | {"body": {"model": "m", "messages": [user], "max_tokens": 5}},
        batch | {"body": {"model": "m", "prompt": "q"}, "reference": "a"},
    ]
    (tmp_path / "p.txt").write_text("q\n\n q \n")
    paths = (written(tmp_path / "p.jsonl", rows), str(tmp_path / "p.txt"))
    found = problems_of(FilesTask(paths=paths))
    assert [problem.messages for problem in found] == [[Message("user", "q")]] * 9
    references = [["a", "b"], 7, "a", "a", {"tests": []}, None, "a", None, None]
    assert [problem.answer for problem in found] == references
    lines = [f"{paths[0]}:{n}" for n in range(1, 8)] + [f"{paths[1]}:1", f"{paths[1]}:3"]
    assert [problem.origin for problem in found] == lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "p.jsonl: there is no prompt in it"),
        (b'{"prompt": "q"}\n{"text": "q"}\n', r":2: has text; expected messages or prompt"),
        (b'{"prompt": "q"}\n{"prompt": "caf\xe9"}\n', r"p\.jsonl:2: not UTF-8"),
        (b'{"prompt": "q"}\n\n{"prompt" "q"}\n', r"p\.jsonl:3: not JSON"),
        (b'{"body": {"messages": [], "tools": [{}]}}\n', r":1: body has tools, which is not supp"),
        (b'{"body": {"input": "q"}}\n', r":1: body has neither messages nor prompt"),
        (b'{"prompt": ""}\n', r":1: the prompt is empty"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path, content, message):
    """By its line, before a model is loaded."""
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        problems_of(FilesTask(paths=(str(tmp_path / "p.jsonl"),)))


def test_own_data_without_references(checkpoint, tmp_path):
    """Agreement with `exact`, where answers part from it, likelihoods and speeds; nothing in the
    model's directory. The report shows both texts from the place at which they part."""
    before = sorted(checkpoint.iterdir())
    path = written(tmp_path / "p.jsonl", [{"prompt": text} for text in ASKED])
    modes = (VerifiedMode(), VerifiedMode(threshold=0.0), ConfidenceMode(threshold=0.0))
    evaluation = run_evaluation(make_job(checkpoint, path, tmp_path / "out", modes=modes), QUIET)
    assert sorted(checkpoint.iterdir()) == before
    exact, verified, relaxed, confidence = read_frontier(tmp_path / "out").points
    assert (verified.identical, verified.first_difference, verified.graded) == (1, None, 0)
    assert verified.nll == pytest.approx(exact.nll, abs=1e-5)
    assert confidence.nll is None
    assert relaxed.identical < 1
    rows = [json.loads(row) for row in (tmp_path / "out" / "answers.jsonl").open()]
    first, third = rows[: len(ASKED)], rows[2 * len(ASKED) : 3 * len(ASKED)]
    assert [row["origin"] for row in first] == [f"{path}:{n}" for n in range(1, 5)]
    parted = [row["first_difference"] for row in third if row["first_difference"] is not None]
    assert len(parted) == round(4 * (1 - relaxed.identical))
    assert min(parted) <= relaxed.first_difference <= max(parted)
    report = (tmp_path / "out" / "report.txt").read_text()
    assert f"verified 0: {len(parted)} of 4 answers differ from those of exact" in report
    assert f"{path}:" in report
    assert not (tmp_path / "out" / "evaluation.part").exists()
    told = json.loads(json.dumps(summary(evaluation)))
    assert told["reference_nll"] is None
    assert told["points"]["exact"]["accuracy"] is None
    shown = Console(file=io.StringIO(), width=160)
    print_table(evaluation, shown)
    assert isinstance(shown.file, io.StringIO)
    assert "tokens/s" in shown.file.getvalue()


def test_no_speeds_are_told_where_masks_are_forced(checkpoint, tmp_path):
    """Guards a reader who compares `verified` with masks that do not pay to `exact`."""
    path = written(tmp_path / "p.jsonl", [{"prompt": text} for text in ASKED])
    job = make_job(checkpoint, path, tmp_path / "out")
    engine = job.engine.model_copy(update={"window_control": False})
    run_evaluation(job.model_copy(update={"engine": engine}), QUIET)
    assert "tokens/s" not in (tmp_path / "out" / "report.txt").read_text()


def test_references_are_graded_and_scored(checkpoint, said, tmp_path):
    """Of those rows that have one; their likelihood is that of transformers' own logits."""
    rows = [{"prompt": text} for text in ASKED]
    rows[0]["reference"] = f" {said[0]}\n"
    rows[1]["reference"] = ["nothing", said[1]]
    rows[2]["reference"] = "something else"
    path = written(tmp_path / "p.jsonl", rows)
    evaluation = run_evaluation(make_job(checkpoint, path, tmp_path / "out"), QUIET)
    exact, verified, relaxed = evaluation.frontier.points
    assert (exact.graded, exact.problems, exact.accuracy) == (3, 4, pytest.approx(2 / 3))
    assert verified.accuracy == exact.accuracy
    assert relaxed.accuracy <= exact.accuracy
    answers = [json.loads(row) for row in (tmp_path / "out" / "answers.jsonl").open()]
    assert [row["correct"] for row in answers[:4]] == [True, True, False, None]
    assert "exact match (3)" in (tmp_path / "out" / "report.txt").read_text()

    model = load_model(checkpoint, dtype=torch.float32)
    tokenizer = load_tokenizer(checkpoint)
    total = tokens = 0
    for row, text in zip(rows, [rows[0]["reference"], "nothing", "something else"], strict=False):
        prompt = encode_prompt([Message("user", row["prompt"])], tokenizer)
        answer = tokenizer(text, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logits[:, tokenizer.mask_token_id] = -torch.inf
        total -= logits.log_softmax(-1)[range(len(answer)), answer].sum().item()
        tokens += len(answer)
    assert evaluation.frontier.reference_nll == pytest.approx(total / tokens, rel=1e-4)


def test_a_regular_expression_compares_its_group(checkpoint, said, tmp_path):
    """The last match in each; where the reference has none, it is what must be found."""
    letters = [re.findall(r"(\S)\s*$", text) for text in said]
    rows = [
        {"prompt": ASKED[0], "answer": f"some words, then {letters[0][0]}"},
        {"prompt": ASKED[1], "answer": f"not {letters[1][0]} but \u2020"},
    ]
    path = written(tmp_path / "p.jsonl", rows)
    task = {"grade": {"type": "regex", "pattern": r"(\S)\s*$"}}
    evaluation = run_evaluation(make_job(checkpoint, path, tmp_path / "out", task=task), QUIET)
    assert evaluation.frontier.points[0].accuracy == 0.5


@pytest.mark.parametrize("pattern", ["(", "no group", "(two)(groups)"])
def test_an_expression_that_cannot_grade_is_refused(pattern):
    with pytest.raises(ValidationError, match=r"is not a regular expression|groups: put what"):
        RegexMatch(pattern=pattern)


GRADERS = """
def same_length(answer, reference):
    return len(answer) == reference["length"]

def half(answer, reference):
    return 0.5

def one_argument(answer):
    return True

NUMBER = 7
"""


@pytest.fixture
def graders(tmp_path, monkeypatch) -> None:
    """A module of the working directory, as a user has it."""
    (tmp_path / "my_graders.py").write_text(GRADERS)
    (tmp_path / "broken_graders.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    for name in ("my_graders", "broken_graders"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_function_grades_what_no_text_can(graders, checkpoint, said, tmp_path):
    """It gets a reference as it stands in the file."""
    rows = [{"prompt": ASKED[0], "answer": {"length": len(said[0])}}]
    rows.append({"prompt": ASKED[1], "answer": {"length": len(said[1]) + 1}})
    path = written(tmp_path / "p.jsonl", rows)
    task = {"grade": {"type": "function", "function": "my_graders:same_length"}}
    frontier = run_evaluation(make_job(checkpoint, path, tmp_path / "out", task=task), QUIET)
    assert frontier.frontier.points[0].accuracy == 0.5
    assert frontier.frontier.reference_nll is None, "an object is no text"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("nowhere_at_all:f", ConfigError, "module nowhere_at_all cannot be imported from"),
        ("broken_graders:f", ConfigError, "No module named 'nothing_of_that_name'"),
        ("my_graders:f", ConfigError, "my_graders has no function f"),
        ("my_graders:NUMBER", ConfigError, "my_graders has no function NUMBER"),
        ("my_graders:half", DataError, r"p\.jsonl:1: .* returned 0.5: it must return True or Fal"),
        ("my_graders:one_argument", DataError, r"p\.jsonl:1: .* failed: TypeError"),
    ],
)
def test_a_function_that_cannot_grade_is_told_before_the_model_loads(
    graders, checkpoint, tmp_path, monkeypatch, function, error, message
):
    """Guards an hour's answers that nothing can grade."""
    monkeypatch.setattr(run, "load_engine", None)
    path = written(tmp_path / "p.jsonl", [{"prompt": "q", "answer": "a"}])
    task = {"grade": {"type": "function", "function": function}}
    with pytest.raises(error, match=message):
        run_evaluation(make_job(checkpoint, path, tmp_path / "out", task=task), QUIET)
    assert not (tmp_path / "out").exists()


def test_a_reference_that_is_no_text_wants_a_function(checkpoint, tmp_path):
    path = written(tmp_path / "p.jsonl", [{"prompt": "q", "answer": {"a": 1}}])
    with pytest.raises(DataError, match=r"p\.jsonl:1: the reference is neither a text.*--function"):
        run_evaluation(make_job(checkpoint, path, tmp_path / "out"), QUIET)


def test_a_prompt_beyond_the_context_is_named(checkpoint, tmp_path, monkeypatch):
    """By its line, with the setting that would do, before the model is loaded; the directory is
    then free for the job that has it."""
    rows = [{"prompt": "short"}, {"prompt": "Tom has 3 apples. " * 60}]
    path = written(tmp_path / "p.jsonl", rows)
    with monkeypatch.context() as patch:
        patch.setattr(run, "load_engine", None)
        with pytest.raises(DataError, match=r"1 of 2 prompts leave no .*\n.*p\.jsonl:2: ") as told:
            run_evaluation(make_job(checkpoint, path, tmp_path / "out"), QUIET)
    (needed,) = re.findall(r"engine\.max_context=(\d+)", str(told.value))
    engine = EngineConfig(max_batch=2, max_context=int(needed))
    run_evaluation(make_job(checkpoint, path, tmp_path / "out", engine=engine, modes=()), QUIET)


def test_another_runs_results_are_not_replaced(checkpoint, tmp_path):
    """Neither another job's, nor those of other prompts under the same name, nor a model's."""
    path = written(tmp_path / "p.jsonl", [{"prompt": "q"}])
    job = make_job(checkpoint, path, tmp_path / "out", modes=())
    run_evaluation(job, QUIET)
    run_evaluation(job, QUIET)
    with pytest.raises(ConfigError, match="by another job, with another max_new_tokens: choose an"):
        run_evaluation(job.model_copy(update={"max_new_tokens": 5}), QUIET)
    written(tmp_path / "p.jsonl", [{"prompt": "another"}])
    with pytest.raises(ConfigError, match="with another prompts"):
        run_evaluation(job, QUIET)
    with pytest.raises(ConfigError, match="is a model's directory"):
        run_evaluation(make_job(checkpoint, path, checkpoint), QUIET)
    (tmp_path / "out" / "evaluation.json").unlink()
    with pytest.raises(ConfigError, match=r"holds the frontier\.json of another evaluation"):
        run_evaluation(job, QUIET)


def test_an_interrupted_evaluation_goes_on(checkpoint, tmp_path, monkeypatch):
    """With the modes that are missing, to the same answers; guards modes measured twice."""
    path = written(tmp_path / "p.jsonl", [{"prompt": text, "answer": "a"} for text in ASKED])
    answer_all, asked = run.answer_all, []

    def interrupted(engine, requests, advance):
        asked.append(requests[0].mode)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answer_all(engine, requests, advance)

    monkeypatch.setattr(run, "answer_all", interrupted)
    job = make_job(checkpoint, path, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(job, QUIET)
    resumed = run_evaluation(job, QUIET).frontier
    assert asked[3:] == [VerifiedMode(threshold=0.0)]
    whole = run_evaluation(make_job(checkpoint, path, tmp_path / "whole"), QUIET).frontier
    assert [point.tokens for point in resumed.points] == [point.tokens for point in whole.points]
    for one, other in zip(resumed.points, whole.points, strict=True):
        assert one.nll == pytest.approx(other.nll, rel=1e-4)
    assert resumed.reference_nll == pytest.approx(whole.reference_nll)


def test_results_go_to_a_directory_by_both_names(checkpoint):
    """Where nobody names one: not into the model's."""
    job = make_job(Path("models/My Model"), "data/my.prompts.jsonl", Path("x"), output_dir=None)
    assert job.directory == "runs/evaluate/my-model-my"
