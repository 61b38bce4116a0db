"""What is checked before a service starts, and how it stops; without a cluster."""

import json
import shutil
import socket
from dataclasses import replace

import pytest
from pydantic import ValidationError

from mars_ray.autoscale.service_model import Level, ServiceModel
from mars_ray.cluster.machine import check_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import BlockCachedMode, ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.config.scaling import ScalingConfig
from mars_ray.config.serve import ServeJob
from mars_ray.decode.loading import load_engine
from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.directory import read_card, write_card
from mars_ray.serve import deploy
from mars_ray.serve.deploy import build_app, check, service_model
from mars_ray.serve.threshold_actor import Setting


def test_a_checkpoint_that_is_none_is_refused_at_once(job, tmp_path):
    """Guards a replica that fails to start, again and again, in another process's log."""
    with pytest.raises(ModelError, match=r"mars\.json"):
        build_app(job.model_copy(update={"checkpoint": str(tmp_path)}))


def test_a_default_mode_that_every_request_would_fail_on_is_refused(job, tmp_path):
    """A model without MARS training has no masks; `block_cached` is for evaluation."""
    shutil.copy(f"{job.checkpoint}/config.json", tmp_path)
    write_card(tmp_path, replace(read_card(job.checkpoint), block_size=0))
    untrained = job.model_copy(update={"checkpoint": str(tmp_path)})
    with pytest.raises(ConfigError, match="'exact', or give it a draft adapter"):
        build_app(untrained.model_copy(update={"default_mode": ConfidenceMode()}))
    build_app(untrained)
    build_app(untrained.model_copy(update={"default_mode": ExactMode()}))
    with pytest.raises(ConfigError, match="block_cached"):
        build_app(job.model_copy(update={"default_mode": BlockCachedMode()}))


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("runs/demo/models/mars", "mars"),
        ("org/name", "name"),
        ("s3://bucket/models/mars-1/", "mars-1"),
        ("s3://bucket/models/mars-1?scheme=http&endpoint_override=minio:9000", "mars-1"),
        ("s3://bucket/models/mars-1?endpoint_override=http://minio:9000", "mars-1"),
        ("s3://KEY:SECRET@my-bucket", "my-bucket"),
    ],
)
def test_a_models_name_is_the_last_part_of_its_place(checkpoint, name):
    """Guards secrets and options of a URI in what clients, logs and metrics call the model."""
    assert ServeJob(checkpoint=checkpoint).name == name


def test_secrets_of_a_checkpoint_are_not_repeated(job, monkeypatch):
    """Guards passwords in logs of jobs."""
    card = read_card(job.checkpoint)
    monkeypatch.setattr(deploy, "pinned", lambda source: (source, card))
    changes = {
        "checkpoint": "s3://KEY:SECRET@bucket/mars",
        "default_mode": VerifiedMode(window=card.block_size + 1),
    }
    with pytest.raises(ConfigError, match="default_mode of s3://bucket/mars: window"):
        build_app(job.model_copy(update=changes))


def test_a_taken_port_is_named():
    """Serve shares its port, so without the check two services would answer in turns."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*port="):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_job_that_cannot_start_is_refused_before_a_cluster_starts(job, tmp_path):
    """Guards half a minute of waiting, and Ray's messages around the one that counts."""
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check(job.model_copy(update={"checkpoint": str(tmp_path)}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="port="):
            check(job.model_copy(update={"port": port}))
    check(job.model_copy(update={"port": port}))


def test_the_policy_counts_on_the_places_that_the_engine_has(job, tmp_path):
    """Guards a fleet for batches of 64, by a model measured up to there, of engines that have 4."""
    path = tmp_path / "model.json"
    ServiceModel("m", ((1, 0.01), (64, 0.02)), (Level(1.0, 0.0, ()),), 64).save(path)
    engine = job.engine.model_copy(update={"max_batch": 4, "max_step_tokens": 96})
    given = service_model(job.model_copy(update={"service_model": str(path), "engine": engine}))
    assert (given.max_batch, given.step_rows, given.seconds_at[-1]) == (4, 96, (64, 0.02))
    beside = service_model(job.model_copy(update={"engine": engine}))
    assert (beside.max_batch, beside.step_rows) == (4, 96)
    # 64 rows take 20 ms and each more 0.16 ms: 80 ms more of the 0.9 times 100 ms, of a default.
    chosen = service_model(job.model_copy(update={"service_model": str(path)}))
    assert 400 < chosen.step_rows < 600


def test_the_policy_moves_the_thresholds_of_the_services_own_mode(job, tmp_path):
    """Guards points and capacity of another mode: a threshold means another thing in each."""
    path = tmp_path / "model.json"
    levels = (Level(1.0, 0.0, ()), Level(0.5, 1.0, ()))
    ServiceModel("m", ((1, 0.01), (64, 0.02)), levels, 64, mode="confidence").save(path)
    given = job.model_copy(update={"service_model": str(path)})
    with pytest.raises(ConfigError, match=r"'confidence'.*'verified'"):
        service_model(given)
    paper = {"default_mode": ConfidenceMode()}
    assert service_model(given.model_copy(update=paper)).levels == levels
    beside = service_model(job.model_copy(update=paper))
    assert (beside.mode, beside.levels) == ("confidence", levels[:1])
    # Nothing moves the threshold of these, so only the costs of plain steps count.
    assert service_model(given.model_copy(update={"default_mode": ExactMode()})).levels == levels


@pytest.mark.parametrize(
    "settings",
    [
        {"scaling": {"max_replicas": 8}},
        {"service_model": "model.json"},
    ],
)
def test_settings_of_the_policy_are_refused_where_none_is_in_charge(settings):
    """Guards an operator who believes that a fixed number of replicas grows."""
    with pytest.raises(ValidationError, match="effect"):
        ServeJob.model_validate({"checkpoint": "m", "replicas": 2} | settings)
    assert ServeJob.model_validate({"checkpoint": "m"} | settings).replicas == "auto"
    fixed = {"threshold": {"set_point": 0.5}, "slo": {"time_per_token_s": 0.03}}
    job = ServeJob.model_validate({"checkpoint": "m", "replicas": 2, "scaling": fixed})
    assert ServeJob.model_validate(job.model_dump()).set_point == 0.5


def test_rays_own_rule_may_decide(job):
    """Guards a service that asks for Ray's rule and is scaled by ours, or has settings of ours."""
    with pytest.raises(ValueError, match="is never exceeded: a replica admits"):
        ServeJob(checkpoint="m", scaling=ScalingConfig(target_ongoing_requests=5000))
    scaling = {"target_ongoing_requests": 4, "min_replicas": 2, "scale_to_zero": True}
    asked = job.model_dump() | {"replicas": "auto", "scaling": scaling}
    given = ServeJob.model_validate(asked)
    for each, is_rays in ((given, True), (ServeJob.model_validate(job.model_dump()), False)):
        built = deploy._replicas(each, 0.0)._bound_deployment._deployment_config
        config = built.autoscaling_config
        assert config is not None
        assert config.policy.is_default_policy_function() is is_rays
        assert Setting.of(each, 0.0).is_auto is not is_rays
        if is_rays:
            assert config.target_ongoing_requests == 4
            assert (config.min_replicas, config.initial_replicas) == (0, 2)
    with pytest.raises(ValidationError, match="Ray Serve decides"):
        ServeJob.model_validate(asked | {"scaling": scaling | {"cold_start_s": 5.0}})
    with pytest.raises(ValidationError, match="service_model"):
        ServeJob.model_validate(asked | {"service_model": "model.json"})
    assert ServeJob.model_validate(given.model_dump()) == given


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_a_context_that_the_model_does_not_know_is_refused(checkpoint, tmp_path, rope, most):
    """Guards nonsense behind the last position that a model was made for; some are stretched."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    table = json.loads((model / "config.json").read_text())
    table["max_position_embeddings"] = 64
    table["rope_parameters"] |= rope
    (model / "config.json").write_text(json.dumps(table))
    size = EngineConfig(max_batch=2, max_context=most, device="cpu")
    load_engine(model, size)
    with pytest.raises(ConfigError, match=f"knows {most} positions"):
        load_engine(model, size.model_copy(update={"max_context": most + 1}))
    # Known before replicas start.
    engine = {"max_batch": 2, "max_context": most + 1}
    with pytest.raises(ConfigError, match=f"knows {most} positions"):
        build_app(ServeJob.model_validate({"checkpoint": str(model), "engine": engine}))
