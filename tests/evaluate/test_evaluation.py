"""Tasks, the sweep, its files; the rendered tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from mars_ray.config.decode import EngineConfig
from mars_ray.config.demo import TinyDemoJob
from mars_ray.config.evaluate import CorpusTask, EvaluateJob, Gsm8kTask, PromptsTask
from mars_ray.config.inputs import FilesSource
from mars_ray.config.load import load_job
from mars_ray.config.modes import ConfidenceMode, ExactMode, JacobiMode, VerifiedMode
from mars_ray.core.frontier import read_frontier
from mars_ray.demo import _exact_only
from mars_ray.errors import ConfigError, DataError, ModelError, RequestError
from mars_ray.evaluate import run
from mars_ray.evaluate.run import print_table, run_evaluation, summary
from mars_ray.evaluate.tasks import Problem, gsm8k_problems, is_correct
from mars_ray.files import sole_writer

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"


def job(checkpoint: Path, **changes) -> EvaluateJob:
    settings = {
        "checkpoint": str(checkpoint),
        "task": CorpusTask(count=6),
        "modes": (VerifiedMode(), ConfidenceMode(threshold=0.0), JacobiMode(guesses=2)),
        "max_new_tokens": 12,
        "engine": EngineConfig(max_batch=4, max_context=256),
    }
    return EvaluateJob(**(settings | changes))


def test_a_sweep_writes_what_it_found(checkpoint, tmp_path):
    """`exact` comes first and unasked; `verified` is identical to it; T/F at threshold 0 is
    all the window allows: 12 tokens in 5 + 5 + 2, or less where a stop token comes by chance."""
    evaluation = run_evaluation(job(checkpoint, output_dir=str(tmp_path)), Console(quiet=True))
    frontier = read_frontier(tmp_path)
    assert frontier == evaluation.frontier
    labels = ["exact", "verified 1", "confidence 0", "jacobi, 2 guesses"]
    assert [point.label for point in frontier.points] == labels
    exact, verified, confidence, jacobi = frontier.points
    assert jacobi.identical == 1
    assert exact.tokens_per_forward == 1
    assert verified.identical == 1
    assert verified.tokens == exact.tokens
    assert 3 < confidence.tokens_per_forward <= 4
    assert evaluation.plot.read_bytes().startswith(b"\x89PNG")
    assert evaluation.plot.stat().st_size > 10_000
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 4 * 6
    assert json.loads(json.dumps(summary(evaluation)))["points"]["exact"]["accuracy"] == 0
    print_table(evaluation, Console(quiet=True))


def test_prompts_without_references_are_compared_with_exact(checkpoint, tmp_path):
    """Real prompts have no number to end with: what counts is whether the text is the model's own,
    by kind of prompt; a lossless mode is exact's, and its own tokens are as likely."""
    (tmp_path / "a.jsonl").write_text('{"turns": ["Tom has 3 apples.", "x"]}\n{"turns": ["Ann"]}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "How many are 4 + 4?"}\n')
    kinds = {
        "first": FilesSource(paths=(str(tmp_path / "a.jsonl"),), columns={"prompt": "turns.0"}),
        "second": FilesSource(paths=(str(tmp_path / "b.jsonl"),)),
    }
    modes = (VerifiedMode(), VerifiedMode(threshold=0.0), ConfidenceMode(threshold=0.0))
    asked = job(checkpoint, task=PromptsTask(kinds=kinds), modes=modes, output_dir=str(tmp_path))
    evaluation = run_evaluation(asked, Console(quiet=True))
    assert read_frontier(tmp_path) == evaluation.frontier
    exact, verified, relaxed, confidence = evaluation.frontier.points
    assert exact.by_kind is not None
    assert {kind: part.answers for kind, part in exact.by_kind.items()} == {"first": 2, "second": 1}
    assert (verified.identical, verified.accuracy, verified.agreement) == (1, 1, 1)
    assert verified.nll == pytest.approx(exact.nll, abs=1e-5)
    # Whatever masks said is committed: random, but for the causal rows' own token.
    assert relaxed.agreement is not None
    assert relaxed.agreement < 0.9
    assert relaxed.nll is not None
    assert exact.nll is not None
    assert relaxed.nll > exact.nll + 0.1
    assert confidence.nll is None
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in answers[:3]] == ["first", "first", "second"]
    print_table(evaluation, Console(quiet=True))


def test_drafts_from_the_text_alone_are_made(checkpoint, tmp_path, monkeypatch):
    """Guards a row that is always 1: n-grams are drafted under window control, which is off where
    all masks are to be made."""
    measure, controlled = run._measure, {}

    def noted(engine, tokenizer, mode, *others):
        controlled[mode] = engine.control is not None
        return measure(engine, tokenizer, mode, *others)

    monkeypatch.setattr(run, "_measure", noted)
    modes = (VerifiedMode(window=0), VerifiedMode())
    asked = job(checkpoint, modes=modes, output_dir=str(tmp_path))
    _, alone, _ = run_evaluation(asked, Console(quiet=True)).frontier.points
    assert controlled == {ExactMode(): False, modes[0]: True, modes[1]: False}
    assert alone.identical == 1


def test_a_finished_frontier_stays_until_another_one_is(checkpoint, tmp_path, monkeypatch):
    """Guards an hour's measurement, which a service reads, lost to one that was only begun; where
    there is none yet, every mode that is finished counts."""
    measure, calls = run._measure, []

    def stops_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return measure(*arguments)

    first = job(checkpoint, output_dir=str(tmp_path), modes=(VerifiedMode(),))
    monkeypatch.setattr(run, "_measure", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(first, Console(quiet=True))
    assert len(read_frontier(tmp_path).points) == 1
    monkeypatch.setattr(run, "_measure", measure)
    run_evaluation(first, Console(quiet=True))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(run, "_measure", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(first, Console(quiet=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_an_interrupted_evaluation_left_is_no_frontier_to_keep(
    checkpoint, tmp_path, monkeypatch
):
    """Guards all modes of a second evaluation, lost for the one that the first had measured."""
    measure, calls = run._measure, []

    def stops_at(*arguments):
        calls.append(arguments)
        if len(calls) in (2, 5):
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(run, "_measure", stops_at)
    for kept in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run_evaluation(job(checkpoint, output_dir=str(tmp_path)), Console(quiet=True))
        assert len(read_frontier(tmp_path).points) == kept


def test_the_frontier_is_written_last(checkpoint, tmp_path, monkeypatch):
    """Guards a whole frontier beside the answers of fewer modes, and half a picture."""
    given = job(checkpoint, output_dir=str(tmp_path), modes=())
    run_evaluation(given, Console(quiet=True))
    before = {name: (tmp_path / name).read_bytes() for name in ("frontier.json", "frontier.png")}

    def interrupted(_, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "plot_frontier", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(given, Console(quiet=True))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {*before, "answers.jsonl"}


def test_what_a_mode_cannot_do_is_told_before_any_is_measured(checkpoint, tmp_path):
    """Guards an hour's measurement, thrown away for a mode that was refused after the others."""
    modes = (VerifiedMode(), VerifiedMode(window=64))
    with pytest.raises(RequestError, match="window 64 is more than"):
        run_evaluation(job(checkpoint, output_dir=str(tmp_path), modes=modes), Console(quiet=True))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValidationError, match="max_new_tokens 256 leaves no room for a prompt"):
        job(checkpoint, max_new_tokens=256)


@pytest.mark.parametrize("place", ["/proc/self/fdinfo", "/dev/null/results"])
def test_a_place_that_cannot_be_written_is_told_before_the_model_is_loaded(checkpoint, place):
    """Guards a traceback behind all that was measured: shared checkpoints are often read-only."""
    with pytest.raises(ConfigError, match=f"cannot write {place}/.*; set another output_dir"):
        run_evaluation(job(checkpoint, output_dir=place), Console(quiet=True))


def test_two_evaluations_do_not_mix_their_files(checkpoint, tmp_path):
    with (
        sole_writer(tmp_path, tmp_path / ".evaluation.lock", "output_dir"),
        pytest.raises(ConfigError, match="another process is writing"),
    ):
        run_evaluation(job(checkpoint, output_dir=str(tmp_path)), Console(quiet=True))


def test_the_tiny_demos_baseline_does_not_replace_its_result(monkeypatch):
    """Guards a frontier of one point in the job's directory, until the second one is whole."""
    monkeypatch.chdir(ROOT)
    given = load_job("jobs/demo-tiny.toml", ["evaluate.output_dir=results"])
    assert isinstance(given, TinyDemoJob)
    assert _exact_only(given, Path("models/ar")).output_dir is None


def test_every_mode_computes_the_prompts(checkpoint, tmp_path, monkeypatch):
    """Guards tokens per second that flatter every mode but the first."""
    load, configs = run.load_engine, []

    def loaded(path, config):
        configs.append(config)
        return load(path, config)

    monkeypatch.setattr(run, "load_engine", loaded)
    run_evaluation(job(checkpoint, output_dir=str(tmp_path), modes=()), Console(quiet=True))
    assert not configs[0].prefix_cache


def test_a_home_directory_is_one(checkpoint, tmp_path, monkeypatch):
    """Guards results in a directory that is named `~`, and problems that are not found."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "p.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    task = Gsm8kTask(path="~/p.jsonl")
    given = job(checkpoint, task=task, output_dir="~/results", modes=())
    run_evaluation(given, Console(quiet=True))
    assert len(read_frontier(tmp_path / "home" / "results").points) == 1
    assert not (tmp_path / "~").exists()


def test_clear_errors(checkpoint, tmp_path):
    """A wrong path, and a problem that does not fit."""
    with pytest.raises(ModelError, match="there is no directory"):
        run_evaluation(job(tmp_path / "missing"), Console(quiet=True))
    assert not (tmp_path / "missing").exists()
    with pytest.raises(DataError, match="no such file"):
        gsm8k_problems(Gsm8kTask(path=str(tmp_path / "missing.jsonl")))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n')
    with pytest.raises(DataError, match=r"broken\.jsonl:2"):
        gsm8k_problems(Gsm8kTask(path=str(broken)))


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("so 3 + 4 = 7.\n#### 7", True),
        ("#### 6 no: #### 7.0", True),
        ("#### 1,007", False),
        ("the answer is 7", False),
        ("", False),
    ],
)
def test_grading_reads_the_last_final_answer(text, correct):
    """GSM8K's rule: the number after ####, commas aside."""
    assert is_correct(Problem("q", "7"), text) is correct
    assert is_correct(Problem("q", "1007"), "#### 1,007")


@pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K test file beside the checkout")
def test_gsm8k_reads_every_problem():
    """The published file: 1,319 problems, whose own solutions are all graded correct."""
    items = gsm8k_problems(Gsm8kTask(path=str(GSM8K)))
    assert len(items) == 1319
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    assert all(is_correct(i, row["answer"]) for i, row in zip(items, rows, strict=True))


def test_a_gsm8k_file_has_lines_and_an_encoding(tmp_path):
    """Guards problems cut in two by characters that JSON allows, and a traceback for others."""
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"one\u2028two\x85 {n}", "answer": f"#### {n}"} for n in range(3)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    items = gsm8k_problems(Gsm8kTask(path=str(path), count=2))
    assert [item.question for item in items] == [row["question"] for row in rows[:2]]
    path.write_text("\ufeff" + path.read_text("utf-8") + "\n\n", "utf-8")
    assert gsm8k_problems(Gsm8kTask(path=str(path), count=3))[:2] == items, "a mark, empty lines"
    assert len(gsm8k_problems(Gsm8kTask(path=str(path)))) == 3
    path.write_text('{"question": 1, "answer": "#### 1"}\n')
    with pytest.raises(DataError, match=r":1: the question is no text"):
        gsm8k_problems(Gsm8kTask(path=str(path)))
    path.write_text('{"question": "caf\xe9", "answer": "#### 1"}\n', "latin-1")
    with pytest.raises(DataError, match="cannot be read"):
        gsm8k_problems(Gsm8kTask(path=str(path)))


def test_tables_are_what_the_committed_results_say():
    """No number in README or docs is typed by hand."""
    command = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
