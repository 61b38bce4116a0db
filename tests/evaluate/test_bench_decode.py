"""The decoding benchmark: real processes, small everything. No times are judged here."""

import io
import subprocess
import sys

import pytest
from pydantic import ValidationError
from rich.console import Console

from mars_ray.config.bench import BenchDecodeJob
from mars_ray.core.frontier import mode_label
from mars_ray.errors import MarsError
from mars_ray.evaluate import bench_decode
from mars_ray.evaluate.bench_decode import run_bench_decode

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


@pytest.mark.slow
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
    """Guards figures that are put together of two modes, and a run that fails at its end."""
    block = {"type": "block_cached", "cache_block": 16}
    modes = [{"type": "verified", "window": 4}, {"type": "verified", "window": 8}, block]
    modes += [{"type": "jacobi"}, {"type": "speculative", "draft_tokens": 2, "window": 0}]
    job = BenchDecodeJob.model_validate(SMALL | {"modes": modes})
    assert [mode_label(mode.model_dump()) for mode in job.modes] == [
        "verified 1 W=4",
        "verified 1 W=8",
        "block_cached 0.95, blocks of 16",
        "jacobi, 4 guesses",
        "speculative 1 W=0, 2 drafts",
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
        bench_decode.subprocess, "Popen", lambda _, **o: popen([sys.executable, "-c", program], **o)
    )
    job = BenchDecodeJob.model_validate(SMALL)
    with (
        pytest.raises(MarsError, match="the peer mars ended"),
        bench_decode._running("mars", job, "nowhere") as peer,
    ):
        ask_when_it_is_gone(peer)


def ask_when_it_is_gone(peer: bench_decode._Peer) -> None:
    peer._process.wait()
    peer.ask({"step": (1, 1)})
