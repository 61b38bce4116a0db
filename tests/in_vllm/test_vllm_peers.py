"""The comparison of decoders with vLLM and the plug-in as peers: real processes, a tiny model."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

import compare_decoders
from compare_decoders import run_bench_decode
from decoders.job import BenchDecodeJob
from rich.console import Console
from serve.bigram import DEPTHS, write_base, write_perfect

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PEERS = ("vllm", "vllm-mars")
TOKENS = 24
SCRIPTS = Path(compare_decoders.__file__).parent / "decoders"


@pytest.mark.timeout(500)
def test_the_plugin_beside_vllm_and_our_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three engines, the same tokens, and the drafts of one adapter in two of them. Guards a peer
    that never drafts."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as users have it
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # takes longer than all the rest
    base = write_base(tmp_path / "base")
    settings = {
        "checkpoint": str(base),
        "draft_adapter": str(write_perfect(base, tmp_path / "perfect")),
        "random_prompt_tokens": 6,
        "modes": [{"type": "verified"}],
        "peers": PEERS,
        "peer_pythons": dict.fromkeys(PEERS, sys.executable),
        "batch_sizes": (2,),
        "prompts": 4,
        "max_new_tokens": TOKENS,
        "max_context": 128,
        "repeats": 1,
        "threads": 1,
    }
    job = BenchDecodeJob.model_validate(settings)
    result = run_bench_decode(job, Console(file=io.StringIO(), width=120))
    ours, plain, plugin = result["cases"]
    assert [case["label"] for case in (plain, plugin)] == list(PEERS)
    assert ours["tokens"] == plain["tokens"] == plugin["tokens"] == 4 * TOKENS
    assert plain["same_output"] == plugin["same_output"] == 1
    assert "tokens_per_forward" not in plain
    # Every draft is right; with fewer masks than there are depths, as the plug-in may choose, and
    # half of its steps without drafts, more than one token in two steps would not be reached.
    assert 1.5 < plugin["tokens_per_forward"] <= 1 + DEPTHS
    assert plugin["ms_per_step"] > 0


def test_an_environment_without_this_package_is_told():
    """Guards vLLM's words about a class that it cannot import, behind a minute of its start."""
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, SCRIPTS / "vllm_mars_peer.py", "{}"]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no mars-ray: install it there" in done.stderr
