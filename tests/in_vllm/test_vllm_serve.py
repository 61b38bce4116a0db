"""The documented command, on a tiny model: vLLM's own server with its engine in other processes."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decode.adapters import random_adapter
from docs.commands import commands
from model.toys import SHAPE, build

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from in_vllm.engines import answers, engine

from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import write_draft_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROGRAM = "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve "


def documented(model: Path, adapter: Path) -> list[str]:
    """The arguments behind `vllm serve`, with another model and adapter."""
    shown = next(each.text for each in commands() if each.text.startswith(PROGRAM))
    words = shlex.split(shown.replace("models/smollm2", str(model)))[4:]
    return [word.replace("adapters/smollm2", str(adapter)) for word in words]


def reply(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


@pytest.mark.timeout(500)
def test_vllm_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards the entry point, and the settings on their way through vLLM's command line: greedy
    text is the model's, and a wrong threshold is refused with a 400."""
    monkeypatch.setitem(SHAPE, "hidden_size", 64)
    model, tokenizer = build("llama", 320)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    adapter = random_adapter(model)
    card = replace(adapter.card, base_fingerprint=fingerprint(tmp_path / "model"))
    write_draft_adapter(tmp_path / "adapter", replace(adapter, card=card))
    expected = answers(engine(tmp_path / "model", max_model_len=128), [[9, 10, 11]], max_tokens=40)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = documented(tmp_path / "model", tmp_path / "adapter")
    settings = "--dtype float32 --max-model-len 128 --enforce-eager --max-num-seqs 4"
    size = f"--kv-cache-memory-bytes {64 << 20} --served-model-name tiny"
    # What `vllm serve` starts. In the CPU build, the program `vllm` itself asks for a package of
    # that name, whose version it shows, and ends.
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*module, "--model", str(tmp_path / "model"), *words, "--port", str(port)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen([*command, *settings.split(), *size.split()], env=environment)
    try:
        _wait(server, port)
        body = {"model": "tiny", "prompt": [9, 10, 11], "max_tokens": 40, "temperature": 0}
        found = reply(port, "/v1/completions", body | {"return_token_ids": True})
        assert found["choices"][0]["token_ids"] == expected[0]
        wish = {"vllm_xargs": {"mars": '{"threshold": 0.5}'}}
        assert reply(port, "/v1/completions", body | wish)["choices"]
        wish = {"vllm_xargs": {"mars": '{"threshold": 2}'}}
        with pytest.raises(urllib.error.HTTPError) as refusal:
            reply(port, "/v1/completions", body | wish)
        assert refusal.value.code == 400
        assert "threshold" in refusal.value.read().decode()
    finally:
        server.terminate()
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(400):
        assert server.poll() is None, "vllm serve has ended"
        try:
            reply(port, "/health")
            return
        except OSError:
            time.sleep(1)
    raise AssertionError("vllm serve does not answer")
