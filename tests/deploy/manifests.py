"""What the Helm chart renders, and what Kubernetes manifests are held to."""

import copy
import functools
import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import validate

from mars_ray.cluster.machine import NODE_ENVIRONMENT

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
# Files of the chart's values/.
SERVICES = ("cpu", "gpu", "vllm", "vllm-1gpu", "hub", "object-store", "resilient")
MACHINES = ("machines-cpu", "machines-gpu")
# KubeRay's schemas are not ours to ship.
_SCHEMAS = ROOT.parent / "shared" / "schemas" / "kuberay"
_KUBERNETES = "1.33"
# Kinds of operators whose schemas are not here.
_OTHERS = ("external-secrets.io", "gateway.networking.k8s.io", "monitoring.coreos.com")


def documents(path: Path) -> list[dict[str, Any]]:
    """What a YAML file of the repository holds."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@functools.cache
def _chart() -> Any:
    helm = pytest.importorskip("helm_python", reason="no helm-python-sdk for this machine")
    return helm.Chart.load(str(CHART))


def example(name: str) -> dict[str, Any]:
    """A file of the chart's values/."""
    (values,) = documents(CHART / "values" / f"{name}.yaml")
    return values


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges values: tables key by key, all else by the last one."""
    whole: dict[str, Any] = {}
    for part in values:
        for key, value in part.items():
            is_table = isinstance(value, Mapping)
            whole[key] = merged(whole.get(key) or {}, value) if is_table else value
    return whole


def texts(values: Mapping[str, Any], name: str = "mars") -> dict[str, str]:
    """What the chart's templates render to for a release. Raises helm_python.HelmError."""
    return _chart().render(dict(values), name=name, namespace="default")


def rendered(values: Mapping[str, Any], name: str = "mars") -> list[dict[str, Any]]:
    """What `helm install` would send."""
    files = [text for path, text in texts(values, name).items() if path.endswith(".yaml")]
    return [document for text in files for document in yaml.safe_load_all(text) if document]


def of_kind(rendered_documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of a kind."""
    return [document for document in rendered_documents if document["kind"] == kind]


def check(document: dict[str, Any]) -> None:
    """The document by its kind's schema, unknown keys refused; pods by their own."""
    if document["apiVersion"].partition("/")[0] in _OTHERS:
        return
    if document["apiVersion"] != "ray.io/v1":
        validate(document, _KUBERNETES, strict=True)
        return
    errors = [
        f"{document['kind']} {'/'.join(map(str, error.path))}: {error.message[:300]}"
        for error in _validator(document["kind"].lower()).iter_errors(document)
    ]
    assert not errors, "\n".join(errors)
    for template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        metadata = pod["metadata"] | template.get("metadata", {})
        validate(pod | template | {"metadata": metadata}, _KUBERNETES, strict=True)


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    """The part that describes a Ray cluster, of any of KubeRay's kinds."""
    part = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
    name = part[document["kind"]]
    return document["spec"][name] if name else document["spec"]


def groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The head and the groups of workers."""
    cluster = cluster_of(document)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a cluster."""
    return [group["template"] for group in groups(document)]


def check_groups(head_and_workers: list[dict[str, Any]], **more: str) -> None:
    """What no schema says and KubeRay or Ray would only say at work; more: of their environment."""
    head, *workers = head_and_workers
    assert head["rayStartParams"]["num-cpus"] == "0"
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        # The autoscaler's second version replaces pods itself.
        assert pod.get("restartPolicy", "Never") == "Never"
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            requests = dict(container["resources"]["requests"])
            requests.pop("ephemeral-storage", None)
            assert container["resources"]["limits"] == requests
        for container in pod["containers"]:
            names = {entry["name"]: entry["value"] for entry in container["env"]}
            assert names.items() >= (NODE_ENVIRONMENT | more).items()
    for group in workers:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", group["groupName"])
        # The autoscaler's number: one here would be set anew by every upgrade.
        assert "replicas" not in group
        assert group["minReplicas"] <= group["maxReplicas"]


@functools.cache
def _validator(kind: str) -> Draft202012Validator:
    path = _SCHEMAS / f"{kind}s.v1.schema.json.gz"
    if not path.exists():
        pytest.skip(f"no KubeRay schemas at {_SCHEMAS}")
    schema = json.loads(gzip.decompress(path.read_bytes()))
    strict = _strict(schema)
    # Every object has them, whatever its schema says.
    strict["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    strict["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(strict)


def _strict(schema: Any) -> Any:
    """Kubernetes' dialect as JSON Schema that refuses what the API server would drop."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(part) for key, part in copy.copy(schema).items() if key != "format"}
    if strict.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not keeps_unknown:
        strict.setdefault("additionalProperties", False)
    return strict
