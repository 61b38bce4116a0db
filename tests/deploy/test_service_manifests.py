"""The service by KubeRay: what the chart renders for its example values."""

import tomllib
from typing import Any

import pytest
import yaml
from deploy.manifests import (
    MACHINES,
    ROOT,
    SERVICES,
    check,
    check_groups,
    example,
    groups,
    of_kind,
    rendered,
)
from pydantic import BaseModel
from ray._private import ray_constants
from ray.serve.schema import ServeDeploySchema

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.serve.deploy import APP_NAME, build_app

# Of Ray: how long `ray start --block` lets a node drain that is told to stop.
DRAIN_TIME = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@pytest.fixture(params=SERVICES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def release(name: str) -> list[dict[str, Any]]:
    return rendered(example(name))


def job_of(release: list[dict[str, Any]]) -> ServeJob:
    (service,) = of_kind(release, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    return ServeJob.model_validate(config["applications"][0]["args"])


def test_every_manifest_is_valid(release):
    """Guards keys that the API server drops, and values that it refuses at night."""
    for document in release:
        check(document)
    kinds = {document["kind"] for document in release}
    assert {"RayService", "NetworkPolicy"} <= kinds


def test_the_embedded_serve_configuration_is_one(release):
    """Guards `num_replcas`: Serve ignores keys that it does not know, and KubeRay sees a text."""
    (service,) = of_kind(release, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    refuse_unknown(config, ServeDeploySchema)
    deployed = ServeDeploySchema.model_validate(config)
    (application,) = deployed.applications
    assert application.name == APP_NAME
    assert application.import_path == f"{build_app.__module__}:{build_app.__name__}"
    job = ServeJob.model_validate(application.args)
    assert job.keys_file
    assert (job.host, job.port) == (config["http_options"]["host"], config["http_options"]["port"])
    # A request that is ours to end is not cut by Serve before.
    assert config["http_options"]["request_timeout_s"] > job.limits.request_s


def test_pods_fit_what_the_service_asks_for(release):
    """Guards replicas that wait for ever for a node, and probes and keys that are not there."""
    (service,) = of_kind(release, "RayService")
    job = job_of(release)
    head, workers, *spot = groups(service)
    check_groups([head, workers, *spot], **{DRAIN_TIME: environment_of(head)[DRAIN_TIME]})
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits["cpu"]) >= job.cpus_per_replica
    assert float(limits.get("nvidia.com/gpu", 0)) >= (job.gpus_per_replica or 0)
    most = sum(group["maxReplicas"] for group in (workers, *spot))
    assert most >= job.scaling.max_replicas
    assert workers["template"]["spec"]["nodeSelector"]
    for group in (head, workers, *spot):
        (container,) = group["template"]["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert job.keys_file is not None
        assert job.keys_file.startswith(mounted["keys"] + "/")
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def environment_of(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_a_pod_that_is_told_to_stop_has_time_to_drain(release):
    """Guards answers that are cut on every eviction: Serve's processes have drain_s, Ray ends the
    node after a time of its own, too short unless set, and Kubernetes kills what is left."""
    (service,) = of_kind(release, "RayService")
    job = job_of(release)
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= job.drain_s
    assert getattr(ray_constants, DRAIN_TIME) < job.drain_s
    # The head as well: Serve's controller, which has others drain, runs there.
    for group in groups(service):
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert job.drain_s < float(environment_of(group)[DRAIN_TIME]) < grace


def test_budgets_and_policy_select_the_pods(release):
    """Guards a policy that protects nothing, because a label was renamed."""
    (service,) = of_kind(release, "RayService")
    labels = [group["template"]["metadata"]["labels"] for group in groups(service)]
    (policy,) = of_kind(release, "NetworkPolicy")
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert all(wanted.items() <= label.items() for label in labels)
    open_to_all = [rule for rule in policy["spec"]["ingress"] if not rule.get("from")]
    assert not open_to_all
    for budget in of_kind(release, "PodDisruptionBudget"):
        selected = budget["spec"]["selector"]["matchLabels"].items()
        assert any(selected <= label.items() for label in labels)


@pytest.mark.parametrize("machines", MACHINES)
def test_budgets_and_policies_select_no_pods_of_other_releases(machines, release):
    """Guards a service's head that may be evicted because a job's head is there, too."""
    others = groups(of_kind(rendered(example(machines), "other"), "RayCluster")[0])
    selecting = [
        *(each["spec"]["selector"] for each in of_kind(release, "PodDisruptionBudget")),
        *(each["spec"]["podSelector"] for each in of_kind(release, "NetworkPolicy")),
    ]
    for selector in selecting:
        for group in others:
            labels = group["template"]["metadata"]["labels"]
            assert not selector["matchLabels"].items() <= labels.items()


def test_the_policy_opens_to_prometheus_what_it_scrapes():
    """Guards ports that are open for nobody, and a monitor that is shut out."""
    release = rendered(example("object-store"))
    (policy,) = of_kind(release, "NetworkPolicy")
    (open_ports,) = (
        {port["port"] for port in rule["ports"]}
        for rule in policy["spec"]["ingress"]
        if "prometheus" in str(rule["from"])
    )
    (monitor,) = of_kind(release, "PodMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    (service,) = of_kind(release, "RayService")
    for group in groups(service):
        (container,) = group["template"]["spec"]["containers"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {named[port] for port in scraped} == open_ports


def test_budgets_let_one_worker_go(release):
    """Guards machines that are never drained: a budget as large as the smallest fleet, or one for
    which Kubernetes asks for the `scale` of the pods' controller, which a RayCluster lacks."""
    (service,) = of_kind(release, "RayService")
    fewest = groups(service)[1]["minReplicas"]
    budgets = of_kind(release, "PodDisruptionBudget")
    assert bool(budgets) == (fewest > 1)
    for budget in budgets:
        assert "maxUnavailable" not in budget["spec"]
        assert 0 < budget["spec"]["minAvailable"] < fewest


def test_the_heads_machine_is_kept_where_that_is_asked_for():
    (budget,) = of_kind(rendered({"disruptionBudget": {"head": True}}), "PodDisruptionBudget")
    check(budget)
    assert budget["spec"]["minAvailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "head"


@pytest.mark.parametrize(
    ("name", "engine"), [("gpu", EngineConfig), ("vllm", VllmConfig), ("vllm-1gpu", VllmConfig)]
)
def test_examples_with_gpus_have_their_engine(name, engine):
    """Guards an engine that the chart passes on as another one."""
    assert type(job_of(rendered(example(name))).engine) is engine


@pytest.mark.parametrize(("name", "size"), [("vllm", "32b"), ("vllm-1gpu", "7b")])
def test_the_example_with_vllm_is_the_job_for_that_size(name, size):
    """Guards two recommendations that differ."""
    job = tomllib.loads((ROOT / "jobs" / f"serve-qwen2.5-{size}.toml").read_text())
    served = job_of(rendered(example(name)))
    for field in ("gpus_per_replica", "cpus_per_replica", "engine"):
        expected = getattr(ServeJob.model_validate(job), field)
        assert getattr(served, field) == expected, field


def refuse_unknown(value: Any, model: type[BaseModel]) -> None:
    """Asserts that each key of the value, at every level, is one of the model's schema."""
    schema = model.model_json_schema()

    def walk(part: Any, described: dict[str, Any], where: str) -> None:
        described = _resolved(described, schema)
        if isinstance(part, list):
            for entry in part:
                walk(entry, described.get("items", {}), where)
        elif isinstance(part, dict) and "properties" in described:
            unknown = set(part) - set(described["properties"])
            assert not unknown, f"{where}: unknown {unknown}"
            for key, entry in part.items():
                walk(entry, described["properties"][key], f"{where}.{key}")

    walk(value, schema, "")


def _resolved(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Without references, and of several forms the one that is an object or a list."""
    for form in described.get("anyOf", []):
        resolved = _resolved(form, schema)
        if "properties" in resolved or "items" in resolved:
            return resolved
    if "$ref" in described:
        return _resolved(schema["$defs"][described["$ref"].rpartition("/")[2]], schema)
    return described


def test_the_check_of_unknown_keys_sees_them():
    """Guards the guard."""
    with pytest.raises(AssertionError, match="num_replcas"):
        refuse_unknown(
            {"applications": [{"import_path": "a:b", "deployments": [{"num_replcas": 1}]}]},
            ServeDeploySchema,
        )
