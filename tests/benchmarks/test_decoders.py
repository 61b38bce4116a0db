"""The decoding benchmark: real processes, small everything. No times are judged here."""

import io
import subprocess
import sys
from pathlib import Path

import compare_decoders as driver
import pytest
from compare_decoders import run_bench_decode
from decoders.job import KINDS, BenchDecodeJob
from pydantic import ValidationError
from rich.console import Console
from serve.bigram import write_base, write_perfect

from mars_ray.config.load import load_job
from mars_ray.core.frontier import mode_label
from mars_ray.errors import ConfigError, MarsError
from mars_ray.evaluate.bench import asked_problems

QUIET = Console(quiet=True)
SMALL = {
    "random_weights": "tiny",
    "random_prompt_tokens": 6,
    "max_new_tokens": 5,
    "max_context": 64,
    "batch_sizes": (1, 2),
    "prompts": 2,
    "repeats": 2,
    "threads": 1,
}


@pytest.mark.long
def test_peers_answer_the_same_prompts_with_the_same_tokens():
    """Guards a comparison of different work: greedy decoding of one checkpoint has one result."""
    peers = ("transformers", "transformers-continuous")
    job = BenchDecodeJob.model_validate(SMALL | {"peers": peers})
    result = run_bench_decode(job, Console(file=io.StringIO(), width=120))
    assert [(case["batch"], case["label"]) for case in result["cases"]] == [
        (batch, label)
        for batch in (1, 2)
        for label in (
            "mars-ray exact",
            "mars-ray verified 1",
            "transformers",
            "transformers-continuous",
        )
    ]
    for case in result["cases"]:
        assert case["same_output"] == 1
        assert case["tokens"] == 5 * 2
        assert len(case["seconds"]) == 2
        assert min(case["seconds"]) > 0
    exact = result["cases"][0]
    assert exact["speed_up"] == 1
    assert exact["tokens_per_forward"] == 1
    # Six of the prompt at once, then four more tokens to forward for the four that follow.
    assert exact["positions_per_token"] == pytest.approx((6 + 4) / 5)
    assert set(result["peers"]) == {"mars", "transformers", "transformers-continuous"}


def test_contenders_are_told_apart():
    """Guards figures that are put together of two modes."""
    block = {"type": "block_cached", "cache_block": 16}
    modes = [{"type": "verified", "window": 4}, {"type": "verified", "window": 8}, block]
    modes += [{"type": "jacobi"}]
    job = BenchDecodeJob.model_validate(SMALL | {"modes": modes})
    assert [mode_label(mode.model_dump()) for mode in job.modes] == [
        "verified 1 W=4",
        "verified 1 W=8",
        "block_cached 0.95, blocks of 16",
        "jacobi, 4 guesses",
    ]
    with pytest.raises(ValidationError, match="twice"):
        BenchDecodeJob.model_validate(SMALL | {"modes": [block, block]})


def test_a_job_names_one_model():
    """Guards a benchmark of something else than was meant."""
    with pytest.raises(ValidationError, match="either checkpoint or random_weights"):
        BenchDecodeJob.model_validate(SMALL | {"checkpoint": "somewhere"})
    with pytest.raises(ValidationError, match="need random_prompt_tokens"):
        BenchDecodeJob.model_validate(SMALL | {"random_prompt_tokens": None})


def test_a_peer_that_died_while_it_waited(monkeypatch):
    """Guards a traceback about a pipe: the operating system may end a peer between two questions,
    and what was not sent is sent once more when the pipe is closed."""
    program = "print('{}', flush=True)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        driver.subprocess,
        "Popen",
        lambda _, **o: popen([sys.executable, "-c", program], **o),
    )
    job = BenchDecodeJob.model_validate(SMALL)
    with (
        pytest.raises(MarsError, match="the peer mars ended"),
        driver._running("mars", job, "nowhere", 0) as peer,
    ):
        ask_when_it_is_gone(peer)


def ask_when_it_is_gone(peer: driver._Peer) -> None:
    peer._process.wait()
    peer.ask({"step": (1, 1)})


def test_prompts_that_have_no_room_are_refused_before_any_peer_starts(monkeypatch):
    """Guards a traceback of a peer, behind the loading of all."""
    monkeypatch.setattr(driver, "_running", None)
    job = BenchDecodeJob.model_validate(SMALL | {"max_context": 10})
    with pytest.raises(ConfigError, match=r"max_context 10 is too small: .* take 11 tokens"):
        run_bench_decode(job, Console(quiet=True))


def test_a_peer_with_masks_needs_some(monkeypatch, tmp_path):
    """Guards vLLM's plug-in started for a model that nobody has trained, and its refusal behind the
    loading of all others."""
    monkeypatch.setattr(driver, "_running", None)
    base = write_base(tmp_path)
    plain = {"random_weights": None, "checkpoint": str(base), "modes": [{"type": "exact"}]}
    job = BenchDecodeJob.model_validate(SMALL | plain | {"peers": ["vllm-mars"]})
    with pytest.raises(ConfigError, match="vllm-mars needs masks: name a draft_adapter"):
        run_bench_decode(job, Console(quiet=True))


def test_an_interpreter_that_is_not_there_is_named():
    """And so is one of a peer that nobody knows, which was ignored."""
    with pytest.raises(ValidationError, match=r"peer_pythons\.vlm"):
        BenchDecodeJob.model_validate(SMALL | {"peer_pythons": {"vlm": "python"}})
    pythons = {"vllm": "/nowhere/python"}
    job = BenchDecodeJob.model_validate(SMALL | {"peers": ["vllm"], "peer_pythons": pythons})
    with (
        pytest.raises(ConfigError, match=r"peer_pythons\.vllm /nowhere/python cannot be run"),
        driver._running("vllm", job, "nowhere", 0),
    ):
        pass


@pytest.mark.long
def test_a_draft_adapter_is_measured_on_prompts_of_files(tmp_path):
    """Guards an adapter that never reaches the engine, and prompts of the first kind alone."""
    base = write_base(tmp_path / "base")
    kinds = {}
    for kind in ("letters", "digits"):
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("".join(f'{{"prompt": "{kind} {n}"}}\n' for n in range(4)))
        kinds[kind] = {"type": "files", "paths": [str(path)]}
    settings = {
        "checkpoint": str(base),
        "draft_adapter": str(write_perfect(base, tmp_path / "perfect")),
        "task": {"kinds": kinds},
        "modes": [{"type": "exact"}, {"type": "verified"}],
        "peers": ["transformers"],
        "batch_sizes": (2,),
        "prompts": 4,
        "max_new_tokens": 16,
        "max_context": 256,
        "repeats": 1,
        "threads": 1,
    }
    job = BenchDecodeJob.model_validate(settings)
    asked = [problem.question for problem in asked_problems(job.task, 4)]
    assert asked == ["letters 0", "digits 0", "letters 1", "digits 1"]
    with pytest.raises(ConfigError, match="the task has 8 prompts: set prompts to that at most"):
        asked_problems(job.task, 9)
    result = run_bench_decode(job, Console(file=io.StringIO(), width=120))
    assert result["draft_adapter"] == "perfect"
    exact, verified, theirs = result["cases"]
    assert exact["tokens"] == verified["tokens"] == theirs["tokens"] == 4 * 16
    assert exact["same_output"] == verified["same_output"] == theirs["same_output"] == 1


@pytest.mark.long
def test_the_oracle_gives_the_same_answers_in_fewer_forwards(monkeypatch, tmp_path):
    """Guards a ceiling that is none: drafts of another answer, or of none; greedy and sampled.
    And a stopped run that begins anew: what it has measured is asked of nobody again."""
    job = BenchDecodeJob.model_validate(
        SMALL
        | {"modes": [{"type": "exact"}], "oracle_drafts": (3,), "temperatures": (0.0, 0.7)}
        | {"max_new_tokens": 9}
    )
    output = tmp_path / "result.json"
    monkeypatch.setattr(driver, "_print", stop)
    with pytest.raises(KeyboardInterrupt):
        run_bench_decode(job, QUIET, output)
    monkeypatch.undo()
    asked = []
    ask = driver._Peer.ask
    monkeypatch.setattr(
        driver._Peer, "ask", lambda peer, task: asked.append(task) or ask(peer, task)
    )
    result = run_bench_decode(job, QUIET, output)
    # The reading, and both contenders at two temperatures and batch sizes, to warm up.
    assert len(asked) == 1 + 2 * 2 * 2
    assert not list(tmp_path.iterdir())
    assert len(result["read_bytes_per_s"]) == 2
    for exact, oracle in zip(result["cases"][::2], result["cases"][1::2], strict=True):
        assert (exact["temperature"], exact["batch"]) == (oracle["temperature"], oracle["batch"])
        assert oracle["same_output"] == 1
        # The prompt's token alone, then twice four.
        assert oracle["tokens_per_forward"] == pytest.approx(9 / 3)
    assert [case["batch"] for case in result["cases"] if "read_share" in case] == [1, 1]


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_speed_of_forced_masks_and_no_ratio_that_cannot_be():
    """Guards figures that say nothing: of masks that do not pay, of one round, and of a round in
    which something else had the processor."""
    exact = driver._Contender("exact", "mars", is_plain=True)
    drafts, other = (
        driver._Contender("drafts", "mars"),
        driver._Contender("o", "vllm"),
    )
    cells = [driver._Cell(own, 0.0, 1) for own in (exact, drafts, other)]
    answer = {"tokens": [[1, 2, 3, 4]], "seconds": 4.0, "forwards": 4, "steps": 4}
    fast = answer | {"seconds": 1.0, "forwards": 2, "steps": 2}
    foreign = {"tokens": [[1, 2, 3, 4]], "seconds": 1.0}
    hellos = {"mars": {"weight_bytes": 8}}

    def case(cell, rounds, **changes):
        answers = dict(zip(cells, ([own] * rounds for own in (answer, fast, foreign)), strict=True))
        measured = driver._Measured(answers, {}, [16.0] * rounds)
        job = BenchDecodeJob.model_validate(SMALL | changes)
        return driver._case(cells[cell], measured, hellos, job)

    assert case(0, 2)["read_share"] == 8 * 1.0 / 16
    assert case(1, 2)["fault"].startswith("the rounds say 4.00 times exact")
    assert case(1, 2)["speed_up"] is None
    assert case(2, 2)["speed_up"] == 4  # another engine may be
    assert case(2, 1)["fault"] == "one round tells no ratio"
    assert case(2, 1)["speed_ups"] == []
    forced = case(1, 2, window_control=False)
    assert forced["tokens_per_forward"] == 2
    assert not {"tokens_per_s", "speed_up", "seconds"} & forced.keys()


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch):
    """And its variants, with what to do about it; an interpreter that is named is for all."""
    monkeypatch.setattr(driver, "find_spec", lambda _: None)
    job = BenchDecodeJob.model_validate(SMALL | {"peer_pythons": {"vllm": "v", "vllm-mars": "m"}})
    assert driver._not_installed("vllm-ngram", job) is None
    assert [driver._python(own, job) for own in ("vllm-ngram", "vllm-mars")] == ["v", "m"]
    assert driver._not_installed("transformers-lookup", job) is None
    assert driver._not_installed("llamacpp-q8", job) == (
        "not installed: run tools/llamacpp_env.sh DIR, and set peer_pythons.llamacpp=DIR/bin/python"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": [{"type": "verified"}], "oracle_drafts": [4]}, "let modes begin with it"),
        ({"lockstep": [{"cache": "none"}], "temperatures": [0.7]}, "lockstep is greedy"),
    ],
)
def test_what_cannot_be_measured_together(changes, message):
    with pytest.raises(ValidationError, match=message):
        BenchDecodeJob.model_validate(SMALL | changes)


JOBS = sorted((Path(driver.__file__).parent / "decoders").glob("*.toml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_job_file_is_a_complete_run(path):
    """Guards a renamed field that a job still uses."""
    job = load_job(path, kinds=KINDS)
    assert BenchDecodeJob.model_validate_json(job.model_dump_json()) == job
