"""The service by KubeRay: what the overlays render to."""

import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from deploy.manifests import OVERLAYS, ROOT, check, check_groups, documents, groups, rendered
from pydantic import BaseModel
from ray._private import ray_constants
from ray.serve.schema import ServeDeploySchema

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm_engine import VllmConfig
from mars_ray.serve.deploy import APP_NAME, build_app

# Of Ray: how long `ray start --block` lets a node drain that is told to stop.
DRAIN_TIME = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(f"deploy/kustomize/overlays/{request.param}")


def of_kind(rendered_documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in rendered_documents if document["kind"] == kind]


def test_every_manifest_is_valid(overlay):
    """Guards keys that the API server drops, and values that it refuses at night."""
    for document in overlay:
        check(document)
    assert {document["kind"] for document in overlay} == {
        "RayService",
        "PodDisruptionBudget",
        "NetworkPolicy",
    }


def test_the_embedded_serve_configuration_is_one(overlay):
    """Guards `num_replcas`: Serve ignores keys that it does not know, and KubeRay sees a text."""
    (service,) = of_kind(overlay, "RayService")
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


def test_pods_fit_what_the_service_asks_for(overlay):
    """Guards replicas that wait for ever for a node, and probes and keys that are not there."""
    (service,) = of_kind(overlay, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    job = ServeJob.model_validate(config["applications"][0]["args"])
    head, workers = groups(service)
    check_groups([head, workers], **{DRAIN_TIME: environment_of(head)[DRAIN_TIME]})
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits["cpu"]) >= job.cpus_per_replica
    assert float(limits.get("nvidia.com/gpu", 0)) >= job.gpus_per_replica
    assert workers["maxReplicas"] >= job.scaling.max_replicas
    assert workers["template"]["spec"]["nodeSelector"]
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert job.keys_file is not None
        assert job.keys_file.startswith(mounted["keys"] + "/")
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def environment_of(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_a_pod_that_is_told_to_stop_has_time_to_drain(overlay):
    """Guards answers that are cut on every eviction: Serve's processes have drain_s, Ray ends the
    node after a time of its own, too short unless set, and Kubernetes kills what is left."""
    (service,) = of_kind(overlay, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    job = ServeJob.model_validate(config["applications"][0]["args"])
    assert getattr(ray_constants, DRAIN_TIME) < job.drain_s
    # The head as well: Serve's controller, which has others drain, runs there.
    for group in groups(service):
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert job.drain_s < float(environment_of(group)[DRAIN_TIME]) < grace


def test_budgets_and_policy_select_the_pods(overlay):
    """Guards a policy that protects nothing, because a label was renamed."""
    (service,) = of_kind(overlay, "RayService")
    labels = [group["template"]["metadata"]["labels"] for group in groups(service)]
    (policy,) = of_kind(overlay, "NetworkPolicy")
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert all(wanted.items() <= label.items() for label in labels)
    open_to_all = [rule for rule in policy["spec"]["ingress"] if not rule.get("from")]
    assert not open_to_all
    budgets = of_kind(overlay, "PodDisruptionBudget")
    for label in labels:
        chosen = [
            budget
            for budget in budgets
            if budget["spec"]["selector"]["matchLabels"].items() <= label.items()
        ]
        assert len(chosen) == 1


@pytest.mark.parametrize("name", OVERLAYS)
def test_budgets_select_no_pods_of_jobs(name, overlay):
    """Guards a service's head that may be evicted because a job's head is there, too."""
    machines = "cpu" if name == "cpu" else "gpu"
    (cluster,) = documents(ROOT / "clusters" / "kuberay" / f"{machines}.yaml")
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        for group in groups(cluster):
            assert not wanted <= group["template"]["metadata"]["labels"].items()


def test_the_policy_opens_to_prometheus_what_it_scrapes(overlay):
    """Guards ports that are open for nobody, and a monitor that is shut out."""
    (policy,) = of_kind(overlay, "NetworkPolicy")
    (open_ports,) = (
        {port["port"] for port in rule["ports"]}
        for rule in policy["spec"]["ingress"]
        if "prometheus" in str(rule["from"])
    )
    (monitor,) = documents(ROOT / "deploy" / "monitoring" / "podmonitor.yaml")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    (service,) = of_kind(overlay, "RayService")
    for group in groups(service):
        (container,) = group["template"]["spec"]["containers"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {named[port] for port in scraped} == open_ports


def test_budgets_say_how_many_stay():
    """Guards machines that are never drained: Kubernetes asks for the `scale` of the pods'
    controller, which a RayCluster lacks, unless the budget is a whole number that stays."""
    budgets = documents(ROOT / "deploy" / "kustomize" / "base" / "disruption.yaml")
    assert len(budgets) == 2
    for budget in budgets:
        assert "maxUnavailable" not in budget["spec"]
        assert isinstance(budget["spec"]["minAvailable"], int)


@pytest.mark.parametrize(("name", "engine"), [("gpu", EngineConfig), ("vllm", VllmConfig)])
def test_overlays_with_gpus_repeat_the_base_but_for_those(name, engine):
    """Guards a change of the base's Serve configuration that the overlays' copies do not get."""
    (base,) = documents(ROOT / "deploy" / "kustomize" / "base" / "rayservice.yaml")
    (patch,) = yaml.safe_load(
        (ROOT / "deploy" / "kustomize" / "overlays" / name / "serve.yaml").read_text()
    )
    ours = yaml.safe_load(base["spec"]["serveConfigV2"])
    theirs = yaml.safe_load(patch["value"])
    args = theirs["applications"][0]["args"]
    assert args.pop("gpus_per_replica") == 1
    given = args.pop("engine")
    assert type(ServeJob.model_validate({"checkpoint": "any", "engine": given}).engine) is engine
    if name == "vllm":
        # As in the job for that size of model.
        job = tomllib.loads((ROOT / "jobs" / "serve-qwen2.5-7b.toml").read_text())
        assert given == job["engine"]
    args["cpus_per_replica"] = ours["applications"][0]["args"]["cpus_per_replica"]
    assert theirs == ours


def test_an_image_is_pinned_by_its_name(tmp_path):
    """Guards image settings of an overlay that KubeRay's kinds do not take."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl to render overlays with")
    shutil.copytree(ROOT / "deploy" / "kustomize", tmp_path / "kustomize")
    digest = f"sha256:{'0' * 64}"
    path = tmp_path / "kustomize" / "overlays" / "cpu" / "kustomization.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["images"] = [
        {"name": "registry.example.com/mars-ray-cpu", "newName": "here/mars", "digest": digest}
    ]
    path.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        ["kubectl", "kustomize", str(path.parent)], capture_output=True, text=True, check=True
    )
    assert done.stdout.count(f"image: here/mars@{digest}") == 2
    assert "registry.example.com" not in done.stdout


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
