"""The chart's values: each has an effect, and what cannot work is refused with what to do."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chart_schema
import pytest
import yaml
from deploy.manifests import (
    CHART,
    MACHINES,
    ROOT,
    SERVICES,
    check,
    example,
    groups,
    merged,
    of_kind,
    rendered,
    texts,
)

from mars_ray.config.serve import ServeJob

helm = pytest.importorskip("helm_python", reason="no helm-python-sdk for this machine")
SCHEMA = chart_schema.schema()
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
JOB = {
    "kind": "RayJob",
    "job": {"entrypoint": "python -m mars_ray train /shared/job.toml", "cpus": 2},
}
RESILIENT = example("resilient")
INGRESS = example("object-store")["ingress"] | {"backend": RESILIENT["gateway"]["backend"]}
MORE = {
    "labels": {"team": "search"},
    "cpuLimit": 16,
    "mounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "spec": {
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "affinity": {"podAntiAffinity": {}},
        "securityContext": {"fsGroup": 2000},
        "tolerations": [{"key": "other", "operator": "Exists"}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "containers": [{"name": "sidecar", "image": "sidecar"}],
    },
}
PODS = {"head": {"pod": MORE}, "workers": {"pod": MORE}}
# In each of them other values have an effect.
RELEASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "ingress": merged(RESILIENT, {"ingress": INGRESS, "gateway": None}),
    "job": merged(example("machines-gpu"), JOB),
    "pods": PODS,
    "known job": merged(
        example("machines-gpu"), {"kind": "RayJob", "job": {"name": "export-demo"}}
    ),
    **{name: example(name) for name in (*SERVICES, *MACHINES)},
}
# A value of the type alone would be refused.
OTHER = {
    "workers.resources": {"large": 1},
    "moreWorkers": {"other": {"max": 1}},
    "kind": "RayCluster",
    "job.name": "simulate-demo",
    "upgrade.type": "None",
    "upgrade.incremental.maxSurgePercent": 90,
    "gateway.parent": {"name": "other"},
    "redis.address": "other:6379",
    "workers.image": "mars-ray-other",
    "head.image": "mars-ray-other",
    "head.pod.mounts": [],
    "workers.pod.mounts": [],
    "externalSecrets.refreshInterval": "5m",
    "externalSecrets.secrets": {"other": {"key": "place"}},
    "rayVersion": "2.99.0",
}


def resolved(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a reference, and without null."""
    (described,) = [
        form for form in described.get("anyOf", [described]) if form != {"type": "null"}
    ]
    if "$ref" in described:
        return SCHEMA["$defs"][described["$ref"].rpartition("/")[2]]
    return described


def settings(described: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and the schema of each value that is no section."""
    for name, below in described["properties"].items():
        whole = resolved(below)
        if name == "global" or path + name == "service":
            continue
        if "properties" in whole:
            yield from settings(whole, f"{path}{name}.")
        else:
            yield path + name, dict(whole)


SETTINGS = dict(settings(SCHEMA))


def other(path: str, described: dict[str, Any], value: Any) -> Any:
    """Another value that the schema takes."""
    if path in OTHER:
        return OTHER[path]
    if path.endswith("tolerations"):
        return [{"key": "other", "operator": "Exists"}]
    if "enum" in described:
        return next(each for each in described["enum"] if each != value)
    kind = described["type"]
    if kind == "boolean":
        return not value
    if kind in ("integer", "number"):
        return (value or 0) + 1
    return {"string": "7Gi" if "Gi" in str(value) else "other", "array": ["other"]}.get(
        kind, {"other": "other"}
    )


def with_value(values: Mapping[str, Any], path: str, described: dict[str, Any]) -> dict[str, Any]:
    """The values with another one there; empty where its section is not in use."""
    whole = merged(DEFAULTS, values)
    *sections, name = path.split(".")
    place = whole
    for section in sections:
        place = place.get(section) or {}
    if sections and not place:
        return {}
    place[name] = other(path, described, place.get(name))
    return whole


@pytest.fixture(scope="module")
def before() -> dict[str, dict[str, str]]:
    """What the releases render to."""
    return {name: manifests(values) for name, values in RELEASES.items()}


def manifests(values: Mapping[str, Any]) -> dict[str, str]:
    return {path: text for path, text in texts(values).items() if path.endswith(".yaml")}


@pytest.mark.parametrize("path", SETTINGS)
def test_every_value_has_an_effect(path, before):
    """Guards a value that is accepted and does nothing: in some release it changes a manifest."""
    for name, values in RELEASES.items():
        changed = with_value(values, path, SETTINGS[path])
        if not changed:
            continue
        try:
            after = manifests(changed)
        except helm.HelmError:
            continue
        if after != before[name]:
            return
    pytest.fail(f"{path} changes nothing in {', '.join(RELEASES)}")


def test_the_schema_is_up_to_date_and_takes_the_defaults():
    """Guards a schema of an earlier job: it would refuse settings that the service knows."""
    assert yaml.safe_load((CHART / "values.schema.json").read_text()) == SCHEMA, (
        "run python tools/chart_schema.py"
    )
    chart_schema.Values.model_validate(DEFAULTS)


def test_values_yaml_shows_every_value():
    """Guards a value that nobody can find; those of sections that are null are comments there."""
    text = re.sub(r"^( +)# (\w+: .*)$", r"\1\2", (CHART / "values.yaml").read_text(), flags=re.M)
    shown = yaml.safe_load(re.sub(r": null$", ":", text, flags=re.M))
    for path in SETTINGS:
        place = shown
        for name in path.split("."):
            assert name in place, path
            place = place[name]
    assert {*shown} == {*SCHEMA["properties"]} - {"global"}


def test_the_job_is_passed_on_as_it_is():
    """Guards settings that templates lose: zeros and falses by a merge, large numbers by a dot."""
    service = {
        "checkpoint": "org/name",
        "drain_s": 0,
        "update_surge_percent": 0,
        "log_prompts": False,
        "engine": {"cache_bytes": 58_000_000_000, "prefix_cache": False},
        "limits": {"request_s": 1200.5, "body_bytes": 2_000_000},
        "environment": {"A": "1"},
    }
    (made,) = of_kind(rendered({"service": service}), "RayService")
    config = yaml.safe_load(made["spec"]["serveConfigV2"])
    given = merged(DEFAULTS["service"], service)
    chart = {"host": "0.0.0.0", "port": 8000, "model_cache": "/cache/models"}
    chart["keys_file"] = "/etc/mars-ray/keys.toml"
    assert config["applications"][0]["args"] == given | chart
    assert config["http_options"]["request_timeout_s"] == 1260


@pytest.mark.parametrize(
    ("service", "gpus"),
    [
        ({}, 1),
        ({"engine": {"device": "cpu"}}, None),
        ({"gpus_per_replica": 0}, 0),
        ({"gpus_per_replica": 0.5}, 0.5),
        ({"engine": {"type": "vllm"}}, 1),
        ({"engine": {"type": "vllm", "tensor_parallel_size": 2}}, 2),
    ],
)
def test_gpus_of_workers_are_their_replicas(service, gpus):
    """Guards a fleet that computes on CPUs beside GPUs, because none of their workers was there yet
    when the service began."""
    workers = {"gpus": 2, "min": 4, "max": 4}
    made = rendered({"service": service | {"replicas": 2}, "workers": workers})
    config = yaml.safe_load(of_kind(made, "RayService")[0]["spec"]["serveConfigV2"])
    args = config["applications"][0]["args"]
    assert args.get("gpus_per_replica") == gpus
    assert ServeJob.model_validate(args).gpus_per_replica == gpus


def test_a_fixed_number_of_replicas_is_a_job_that_the_service_takes():
    """Guards defaults of the chart that contradict it."""
    (made,) = of_kind(rendered({"service": {"replicas": 3}}), "RayService")
    args = yaml.safe_load(made["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert ServeJob.model_validate(args).replicas == 3


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"autoscaling": {"enabled": True}}, "autoscaling"),
        ({"keda": {}}, "keda"),
        ({"global": {"a": 1}}, "global"),
        ({"workers": {"replicas": 3}}, "replicas"),
        ({"service": {"scaling": {"min_replica": 1}}}, "min_replica"),
        ({"service": {"keys_file": "/x"}}, "keys_file"),
        ({"service": {"engine": {"type": "vllm", "max_batches": 1}}}, "max_batches"),
        ({"workers": {"memory": "16 GB"}}, "memory"),
        ({"workers": {"max": 1}}, "4 replicas have no room on 1 workers, which hold 2"),
        ({"workers": {"max": 2}}, "take 8.2 CPUs and 0 GPUs, which 2 workers do not have"),
        ({"workers": {"min": 9}}, "workers: min is above max"),
        ({"moreWorkers": {"spot": {"min": 2, "max": 1}}}, "spot: min is above max"),
        ({"moreWorkers": {"spot": {"max": 1, "surge": 1}}}, "surge"),
        ({"service": {"resources_per_replica": {"large": 1}}}, "workers.resources"),
        ({"workers": {"pod": {"cpuLimit": 3}}}, "workers.pod.cpuLimit is below workers.cpu"),
        ({"workers": {"pod": {"volumes": []}}}, "volumes"),
        ({"service": {"cpus_per_replica": 8}}, "raise workers.cpu"),
        ({"service": {"gpus_per_replica": 1}}, "1 GPUs and resources {}, and no"),
        ({"moreWorkers": {"workers": {"max": 1}}}, "moreWorkers.workers"),
        ({"service": {"replicas": 2, "scaling": {"max_replicas": 3}}}, "set both to null"),
        ({"model": {"claim": ""}}, "needs model.claim"),
        ({"model": {"hub": {"tokenSecret": ""}}}, "leave model.hub out"),
        ({"env": {"HF_HOME": "/x"}}, "env.HF_HOME"),
        ({"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}, "belong together"),
        ({"job": {"name": "simulate-demo"}}, "kind=RayJob"),
        ({"kind": "RayJob"}, "set job.name"),
        ({"kind": "RayJob", "job": {"name": "demo"}}, "there are bench-demo, "),
        ({"kind": "RayJob", "job": {"name": "train-qwen2.5-7b"}}, "machines-gpu.yaml"),
        ({"kind": "RayJob", "job": {"name": "simulate-demo", "cpus": 5}}, "no worker has 5"),
        ({"kind": "RayCluster", "ingress": example("object-store")["ingress"]}, "kind=RayService"),
        ({"kind": "RayCluster", "model": {"hub": {"tokenSecret": ""}}}, "kind=RayService"),
        ({"gateway": {"host": "a.b"}}, "name a parent"),
        (
            {
                "gateway": {
                    "host": "a.b",
                    "parent": {"name": "p"},
                    "backend": {"name": "b", "port": 1},
                }
            },
            "mars-gateway",
        ),
    ],
)
def test_what_cannot_work_is_refused(values, why):
    """Guards an installation that Kubernetes accepts, and pods that wait for ever after that. Other
    autoscalers are unknown values: the policy scales replicas, and Ray the pods for them."""
    with pytest.raises(helm.HelmError, match=re.escape(why)):
        texts(values)


def test_names_are_those_that_kuberay_takes():
    """Guards a release that Helm installs and the operator never starts."""
    with pytest.raises(helm.HelmError, match="at most 47"):
        texts({}, name="m" * 48)
    with pytest.raises(helm.HelmError, match="a letter first"):
        texts({}, name="4-bits")


def test_an_image_is_pinned_by_its_digest():
    """Guards a tag behind a digest, which no registry knows."""
    digest = f"mars-ray-cpu@sha256:{'0' * 64}"
    (service,) = of_kind(rendered({"head": {"image": digest}}), "RayService")
    head, workers = (group["template"]["spec"]["containers"][0] for group in groups(service))
    assert head["image"] == f"registry.example.com/{digest}"
    assert workers["image"].endswith(
        ":" + yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    )


def test_keys_are_mounted_as_a_directory():
    """Guards a rotation that never arrives: Kubernetes does not renew a file mounted by subPath."""
    (service,) = of_kind(rendered({}), "RayService")
    for group in groups(service):
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        (keys,) = [mount for mount in mounts if mount["name"] == "keys"]
        assert "subPath" not in keys


def test_pods_get_what_kubernetes_knows_besides():
    """Guards lists of ours that a merge replaces, and what is set beside them."""
    plain = groups(of_kind(rendered({}), "RayService")[0])
    (service,) = of_kind(rendered(PODS), "RayService")
    check(service)
    for group, before in zip(groups(service), plain, strict=True):
        pod, ours = group["template"]["spec"], before["template"]["spec"]
        assert pod.items() >= {"runtimeClassName": "nvidia", "priorityClassName": "high"}.items()
        assert pod["securityContext"] == ours["securityContext"] | {"fsGroup": 2000}
        assert pod["volumes"] == ours["volumes"] + MORE["spec"]["volumes"]
        assert pod["tolerations"] == MORE["spec"]["tolerations"]
        ray, sidecar = pod["containers"]
        assert sidecar["name"] == "sidecar"
        assert ray["volumeMounts"] == ours["containers"][0]["volumeMounts"] + MORE["mounts"]
        labels = before["template"]["metadata"]["labels"]
        assert group["template"]["metadata"]["labels"] == labels | MORE["labels"]


def test_workers_request_the_disk_that_their_cache_may_fill():
    """Guards pods that are evicted in the middle of a copy, because the machine's disk is full."""
    for storage_class in ("", "fast"):
        cache = {"size": "50Gi", "storageClass": storage_class}
        made = rendered({"model": {"cache": cache}})
        head, workers = (
            group["template"]["spec"]["containers"][0]["resources"]["requests"]
            for group in groups(of_kind(made, "RayService")[0])
        )
        assert "ephemeral-storage" not in head
        assert workers.get("ephemeral-storage") == (None if storage_class else "50Gi")


@pytest.mark.parametrize(("limit", "shown"), [(None, "4"), (6.5, "6.5"), (0, None)])
def test_a_limit_of_cpus_is_apart_from_what_ray_may_use(limit, shown):
    """Guards replicas on CPUs that a pod may only borrow: Ray would take the limit."""
    values = {"workers": {"pod": {"cpuLimit": limit}}}
    _, workers = groups(of_kind(rendered(values), "RayService")[0])
    resources = workers["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"]["cpu"] == workers["rayStartParams"]["num-cpus"] == "4"
    assert resources["limits"].get("cpu") == shown


def test_labels_and_annotations_of_the_release():
    """Guards a queue of Kueue that is said where nobody reads it."""
    given = {"labels": {"queue": "team"}, "annotations": {"elastic": "true"}}
    for kind, values in {
        "RayService": {},
        "RayCluster": {"kind": "RayCluster"},
        "RayJob": JOB,
    }.items():
        (made,) = of_kind(rendered(merged(values, given)), kind)
        check(made)
        assert made["metadata"]["labels"]["queue"] == "team"
        assert made["metadata"]["annotations"] == given["annotations"]


def test_groups_of_workers_differ_in_what_they_say():
    """Guards a release for two models, of which one needs machines that the other would waste."""
    large = {
        "max": 1,
        "gpus": 2,
        "cpu": 8,
        "resources": {"large": 2},
        "nodeSelector": {"pool": "l"},
    }
    second = {"model_name": "second", "replicas": 2, "resources_per_replica": {"large": 1}}
    service = {
        "gpus_per_replica": 0,
        "more_models": [{"checkpoint": "/shared/models/second"} | second],
    }
    values = {"service": service, "moreWorkers": {"large": large}}
    (made,) = of_kind(rendered(values), "RayService")
    check(made)
    _, workers, other = groups(made)
    assert (other["groupName"], other["minReplicas"], other["maxReplicas"]) == ("large", 0, 1)
    assert workers["rayStartParams"].get("resources") is None
    template = other["template"]["spec"]
    assert template["nodeSelector"] == {"kubernetes.io/arch": "amd64", "pool": "l"}
    limits = template["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["nvidia.com/gpu"]) == ("8", "2")
    # A model takes a GPU where any group has some, unless it says 0.
    args = yaml.safe_load(made["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert [args["gpus_per_replica"], args["more_models"][0]["gpus_per_replica"]] == [0, 1]
    with pytest.raises(helm.HelmError, match="2 replicas have no room on 5 workers, which hold 1"):
        rendered(merged(values, {"moreWorkers": {"large": {"resources": {"large": 1}}}}))


def test_spot_machines_are_asked_for_first_and_none_is_needed():
    """Guards a service that waits for machines which are not to be had."""
    (service,) = of_kind(rendered(example("resilient")), "RayService")
    _, workers, spot = groups(service)
    assert workers["minReplicas"] == 2
    assert spot["minReplicas"] == 0
    assert spot["priority"] > workers.get("priority", 0)


def test_lint_finds_nothing():
    """Guards what `helm lint` says to those who package the chart."""
    report = helm.lint(str(CHART), {})
    assert not [entry for entry in report["messages"] if entry["severity"] not in ("INFO", 0, 1)]


def test_examples_are_all_tested():
    """Guards a file of values that no test renders."""
    kept = {path.stem for path in (CHART / "values").glob("*.yaml")}
    assert kept == {*SERVICES, *MACHINES}
    assert Path(ROOT / "deploy" / "chart" / "files" / "alerts.yml").is_symlink()
