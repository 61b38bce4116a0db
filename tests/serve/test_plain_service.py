"""A directory of Hugging Face's as it is, behind the service: without a cluster, and on one."""

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import ray
import torch
from fastapi.testclient import TestClient
from model.toys import build
from pydantic import TypeAdapter
from ray import serve
from serve.asking import error_of, load_server, text_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.cpu.library import supported
from mars_ray.serve.deploy import _checked, start
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.status import MarsStatusReply

CHAT = [{"role": "user", "content": "How many apples are left?"}]
ADAPTER = "use mode 'exact', or give it a draft adapter (`mars-ray adapt MODEL`"
WISHES = {"temperature": 0, "max_tokens": 24}


def downloaded(directory: Path, architecture: str) -> Path:
    """Random weights that wander: nothing of it was written by us."""
    model, tokenizer = build(architecture, 300)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def job_of(checkpoint: Path) -> ServeJob:
    return ServeJob(
        checkpoint=str(checkpoint),
        model_name="plain",
        port=free_port(),
        cpus_per_replica=0.5,
        replicas=1,
        engine=EngineConfig(max_batch=2, max_context=128, device="cpu", threads=1),
    )


def greedy(checkpoint: Path, tokens: int) -> str:
    """By plain transformers, until the turn ends."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ("<|im_end|>", "<|eot_id|>")]
    known = [end for end in ends if end is not None]
    out = model.generate(
        **prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=known, pad_token_id=0
    )
    text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.rstrip("\ufffd")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_plain_model_answers_as_transformers_does(architecture, tmp_path):
    """By the mode that a service takes for it, which needs no masks, and an adapter may come while
    the service runs. Guards a default mode that every request fails on."""
    checkpoint = downloaded(tmp_path / "plain", architecture)
    job = _checked(job_of(checkpoint))
    assert job.mode == VerifiedMode()
    engine = load_server(job)
    engine.start()
    api = TestClient(build_api(job, {"plain": engine}))
    body = {"model": "plain", "messages": CHAT} | WISHES
    reply = api.post("/v1/chat/completions", json=body)
    assert text_of(reply) == greedy(checkpoint, 24)
    assert reply.json()["usage"]["mars"]["mode"] == "verified"
    assert text_of(api.post("/v1/chat/completions", json=body | {"mode": "jacobi"})) == text_of(
        reply
    )
    error = error_of(api.post("/v1/chat/completions", json=body | {"mode": "confidence"}), 400)
    assert (error["param"], error["code"]) == ("mode", "invalid_value")
    assert ADAPTER in error["message"]
    said = api.get("/v1/mars/status")
    TypeAdapter(MarsStatusReply).validate_json(said.content)
    (status,) = said.json()["data"]
    assert (status["mode"], status["threshold"]) == ("verified", 1.0)
    assert status["engine"] == {
        "engine": "mars-ray",
        "dtype": "float32",
        "device": "cpu",
        "attention": "compiled" if supported() else "dense",
        "instructions": next(iter(supported()), None),
        "threads": 1,
        "cache_bytes": status["engine"]["cache_bytes"],
        "cache_tokens": status["engine"]["cache_tokens"],
    }
    engine.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return downloaded(tmp_path_factory.mktemp("plain") / "plain", "llama")


@pytest.fixture(scope="module")
def client(ray_cluster, checkpoint) -> Iterator[openai.OpenAI]:
    url = start(job_of(checkpoint))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made
    serve.shutdown()


@pytest.mark.ray
@pytest.mark.long
def test_the_real_service_takes_a_plain_directory(client, checkpoint):
    """From the command's `start` on, as the official client sees it; and the replica's log begins
    with what runs there."""
    reply = client.chat.completions.create(model="plain", messages=CHAT, **WISHES)
    assert reply.choices[0].message.content == greedy(checkpoint, 24)
    assert reply.usage.model_dump()["mars"]["mode"] == "verified"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="plain", messages=CHAT, extra_body={"mode": "confidence"}
        )
    assert ADAPTER in caught.value.message
    assert caught.value.param == "mode"
    (status,) = client.get("/mars/status", cast_to=dict)["data"]
    assert (status["mode"], status["engine"]["dtype"]) == ("verified", "float32")
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    begin, line = time.monotonic(), "plain: mars-ray engine, float32 on cpu, "
    while not any(line in log.read_text(errors="replace") for log in logs.glob("worker-*.out")):
        assert time.monotonic() - begin < 10
        time.sleep(0.1)
