"""Several models in one service: routing by name, keys, status; with and without Ray."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from ray import serve
from serve.asking import ask, error_of, text_of

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.load import parse_job
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import Limits, ServedModel, ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.errors import ConfigError, ModelError
from mars_ray.serve.deploy import _replicas, build_app, start
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.status import MarsStatusReply

SECRET, OTHER = "a-secret-of-24-characters", "another-secret-of-some-30-chars"
KEYS = f"""
[[keys]]
name = "all"
key = "{SECRET}"
[[keys]]
name = "second-only"
key = "{OTHER}"
models = ["second"]
"""
CHAT = [{"role": "user", "content": "count from one to ten"}]


@pytest.fixture(scope="module")
def two(job, tmp_path_factory) -> ServeJob:
    """The second model has another default, which replies tell."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    second = ServedModel(
        checkpoint=job.checkpoint, model_name="second", default_mode=ExactMode(), engine=job.engine
    )
    return ServeJob.model_validate(
        job.model_dump() | {"more_models": [second], "keys_file": str(keys)}
    )


@pytest.fixture(scope="module")
def api(two, text_engine) -> TestClient:
    return TestClient(build_api(two, {"tiny": text_engine, "second": text_engine}))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def listed(api: TestClient, path: str, secret: str) -> list[str]:
    reply = api.get(path, headers=bearer(secret))
    assert reply.status_code == 200
    return [entry["id"] for entry in reply.json()["data"]]


def test_a_request_gets_the_model_it_names(api):
    """With that model's defaults; the reply and its chunks bear its name."""
    for name, mode in (("tiny", "verified"), ("second", "exact")):
        api.headers = bearer(SECRET)
        reply = ask(api, model=name, mode=None)
        assert reply.json()["model"] == name
        assert reply.json()["usage"]["mars"]["mode"] == mode
    missing = error_of(ask(api, model="third"), 404)
    assert missing["code"] == "model_not_found"
    assert "'tiny', 'second'" in missing["message"]


def test_where_a_model_need_not_be_named_several_must_be_told_apart(api):
    """`/tokenize` takes the only model there is; of two it takes none by itself."""
    for path, content in (("/tokenize", {"prompt": "one"}), ("/detokenize", {"tokens": [1]})):
        refused = api.post(path, json=content, headers=bearer(SECRET))
        assert error_of(refused, 400)["param"] == "model"
        named = api.post(path, json=content | {"model": "second"}, headers=bearer(SECRET))
        assert named.status_code == 200
        only = api.post(path, json=content, headers=bearer(OTHER))
        assert only.status_code == 200


def test_a_key_for_one_model_sees_no_other(api):
    """Neither in lists nor by asking for it."""
    for path in ("/v1/models", "/v1/mars/status"):
        assert listed(api, path, SECRET) == ["tiny", "second"]
        assert listed(api, path, OTHER) == ["second"]
        assert api.get(path, headers={"Authorization": ""}).status_code == 401
    assert api.get("/v1/models/second", headers=bearer(OTHER)).status_code == 200
    assert error_of(api.get("/v1/models/tiny", headers=bearer(OTHER)), 404)
    assert api.get("/metrics", headers=bearer(SECRET)).status_code == 200
    refused = error_of(api.get("/metrics", headers=bearer(OTHER)), 403)
    assert refused["code"] == "insufficient_permissions"
    api.headers = bearer(OTHER)
    assert text_of(ask(api, model="second"))
    hidden = error_of(ask(api, model="tiny"), 404)
    assert hidden["message"] == "there is no model 'tiny' here, only 'second'"


def test_status_counts_what_was_written(api):
    """Of this test's tokens and those of others on the same engine; nothing is open at the end."""
    api.headers = bearer(SECRET)
    ask(api, model="second")
    body = api.get("/v1/mars/status").json()
    TypeAdapter(MarsStatusReply).validate_json(json.dumps(body))
    entry = body["data"][1]
    assert (entry["replicas"], entry["running"], entry["waiting"]) == (1, 0, 0)
    assert entry["tokens_per_second"] > 0
    assert entry["tokens_per_forward"] >= 1
    assert 0 <= entry["disagreement"] <= 1
    assert (entry["mode"], entry["threshold"]) == ("verified", 1.0)
    assert 0 <= entry["kv_cache_usage"] <= 1
    assert entry["policy"] is None


def test_models_of_one_name_are_refused():
    """Also if they differ only in what a deployment's name cannot have."""
    table = {"kind": "serve", "checkpoint": "runs/a/mars"}
    for other in ({"checkpoint": "runs/b/mars/"}, {"checkpoint": "x", "model_name": "mars"}):
        with pytest.raises(ConfigError, match="two models are named 'mars'"):
            parse_job(table | {"more_models": [other]}, source="test")
    alike = [{"checkpoint": "x", "model_name": "a/b"}, {"checkpoint": "y", "model_name": "a-b"}]
    with pytest.raises(ConfigError, match="named 'a-b'"):
        parse_job(table | {"more_models": alike}, source="test")


def test_a_key_for_a_model_that_is_not_there_is_refused(job, tmp_path):
    """Guards a key that is good for nothing because of a typing error."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\nmodels = ['tinny']")
    with pytest.raises(ConfigError, match=r"'a' is for model 'tinny'.*only tiny"):
        build_app(job.model_copy(update={"keys_file": str(keys)}))


def test_every_model_is_checked_before_anything_starts(job, tmp_path):
    """Guards a second model whose replicas fail in another process's log."""
    broken = ServedModel(checkpoint=str(tmp_path), model_name="broken")
    with pytest.raises(ModelError, match=r"neither mars\.json nor"):
        build_app(job.model_copy(update={"more_models": (broken,)}))


def test_what_replicas_are_given(job):
    """Each setting reaches Serve."""
    given = {
        "replicas": 3,
        "max_replicas_per_node": 2,
        "gpus_per_replica": 0.25,
        "resources_per_replica": {"H200": 0.5},
        "environment": {"HF_HUB_OFFLINE": "1"},
    }
    deployment = _replicas(job.model_copy(update=given), 0.0)._bound_deployment
    assert deployment.name == "Replica-tiny"
    assert deployment.num_replicas == 3
    assert deployment._replica_config.max_replicas_per_node == 2
    options = deployment.ray_actor_options
    assert options is not None
    assert options["num_gpus"] == 0.25
    assert options["resources"] == {"H200": 0.5}
    assert options["runtime_env"]["env_vars"]["HF_HUB_OFFLINE"] == "1"


def test_a_replica_of_several_gpus_is_a_placement_group(job):
    """Its own process has the first bundle, which must hold all that it asks for; each worker of
    vLLM has a GPU. Only groups of layers may be on several machines."""
    given = {"gpus_per_replica": 4, "cpus_per_replica": 2, "resources_per_replica": {"H200": 0.5}}
    split = VllmConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    for engine, strategy in (
        (split, "PACK"),
        (VllmConfig(tensor_parallel_size=4), "STRICT_PACK"),
    ):
        asked = job.model_copy(update=given | {"engine": engine})
        config = _replicas(asked, 0.0)._bound_deployment._replica_config
        assert config.placement_group_bundles == [
            {"CPU": 2, "GPU": 1, "H200": 0.5},
            *[{"GPU": 1}] * 3,
        ]
        assert config.placement_group_strategy == strategy
        assert config.ray_actor_options["num_gpus"] == 0
    for alone in (VllmConfig(), EngineConfig()):
        asked = job.model_copy(update=given | {"gpus_per_replica": 1, "engine": alone})
        config = _replicas(asked, 0.0)._bound_deployment._replica_config
        assert config.placement_group_bundles is None
        assert config.ray_actor_options["num_gpus"] == 1


@pytest.fixture(scope="module")
def service(ray_cluster, checkpoint, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """Two models of two engines, one of them from a store, with two replicas; where it is kept."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copytree(checkpoint, folder / "stored")
    engine = EngineConfig(max_batch=2, max_context=160, device="cpu", threads=1)
    stored = ServedModel(
        checkpoint=f"file://{folder}/stored",
        replicas=2,
        cpus_per_replica=0.2,
        engine=engine,
        default_mode=ExactMode(),
        environment={"MARS_TEST": "1"},
    )
    job = ServeJob(
        checkpoint=str(checkpoint),
        more_models=(stored,),
        port=free_port(),
        replicas=1,
        cpus_per_replica=0.2,
        engine=engine,
        limits=Limits(new_tokens=100),
        model_cache=str(folder / "cache"),
    )
    yield start(job), folder / "cache"
    serve.shutdown()


@pytest.mark.ray
@pytest.mark.long
def test_two_models_on_a_real_cluster(service):
    """Each answers with its own defaults; all replicas report; two of a node share one copy."""
    url, cache = service
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "stored"]
        said = {}
        for name in ("tiny", "stored"):
            reply = client.chat.completions.create(
                model=name, messages=CHAT, max_tokens=24, temperature=0
            )
            assert reply.usage is not None
            said[reply.usage.model_dump()["mars"]["mode"]] = reply.choices[0].message.content
        assert set(said) == {"verified", "exact"}
        assert said["verified"] == said["exact"]
        assert client.get("/../readyz", cast_to=dict) == {"status": "ready"}
        status = client.get("/mars/status", cast_to=dict)["data"]
    assert [(entry["id"], entry["replicas"]) for entry in status] == [("tiny", 1), ("stored", 2)]
    assert all(entry["tokens_per_forward"] >= 1 for entry in status)
    assert [path.name[:7] for path in cache.iterdir() if path.is_dir()] == ["stored-"]
