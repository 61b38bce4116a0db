"""Writes deploy/chart/values.schema.json, by which Helm refuses what the chart does not know.

    python tools/chart_schema.py            # writes it
    python tools/chart_schema.py --check    # exit code 1 if it is out of date

The service is described by `ServeJob`, so an unknown key of a job is refused before anything is
installed. What no schema says is in the chart's templates/_check.tpl.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mars_ray.config.base import Config
from mars_ray.config.serve import ServeJob

_FILE = Path(__file__).parents[1] / "deploy" / "chart" / "values.schema.json"
# Fields of a job that the chart sets.
_OF_THE_CHART = ("kind", "host", "port", "keys_file", "model_cache")

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
NameOrNone = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
Repository = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/-]*(@sha256:[0-9a-f]{64})?$")]
Size = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$")]
Host = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Percent = Annotated[int, Field(ge=1, le=100)]
Labels = dict[str, str]
Machines = Annotated[float, Field(gt=0)]


class Image(Config):
    registry: Annotated[str, Field(min_length=1)]
    tag: str
    pullPolicy: Literal["Always", "IfNotPresent", "Never"]
    pullSecrets: list[Name]


class Toleration(Config):
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: Count | None = None


class Incremental(Config):
    gatewayClassName: Name
    stepSizePercent: Percent
    intervalSeconds: Positive
    maxSurgePercent: Percent | None = None


class Upgrade(Config):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    incremental: Incremental | None


class Job(Config):
    name: str | None = None
    entrypoint: str | None = None
    cpus: Count | None = None
    gpus: Count | None = None
    hours: Positive | None = None
    retries: Count | None = None
    keepSeconds: Count | None = None


class Cache(Config):
    size: Size
    storageClass: NameOrNone


class Hub(Config):
    tokenSecret: NameOrNone


class Model(Config):
    claim: NameOrNone
    credentials: NameOrNone
    cache: Cache
    hub: Hub | None


class Secret(Config):
    secret: NameOrNone


class Store(Config):
    name: Name
    kind: Literal["SecretStore", "ClusterSecretStore"]


class ExternalSecrets(Config):
    store: Store
    refreshInterval: Annotated[str, Field(pattern=r"^([0-9]+(s|m|h))+$")] | None = None
    secrets: dict[Name, dict[str, str]]


class ServiceAccount(Config):
    name: Name
    annotations: Labels | None = None


class Pod(Config):
    labels: Labels | None = None
    cpuLimit: Annotated[float, Field(ge=0)] | None = None
    mounts: list[dict[str, Any]] | None = None
    spec: dict[str, Any] | None = None


class Head(Config):
    image: Repository
    cpu: Machines
    memory: Size
    objectStoreGB: Positive
    nodeSelector: Labels
    tolerations: list[Toleration]
    pod: Pod | None


class Workers(Head):
    min: Count
    max: Positive
    surge: Count
    gpus: Count
    gpuResource: str
    resources: dict[str, Machines]
    idleSeconds: Positive


class MoreWorkers(Config):
    """What is None is as in `workers`."""

    image: Repository | None = None
    cpu: Machines | None = None
    memory: Size | None = None
    objectStoreGB: Positive | None = None
    nodeSelector: Labels | None = None
    tolerations: list[Toleration] | None = None
    pod: Pod | None = None
    min: Count | None = None
    max: Positive
    gpus: Count | None = None
    gpuResource: str | None = None
    resources: dict[str, Machines] | None = None
    priority: int | None = None


class Spread(Config):
    topologyKey: str
    maxSkew: Positive | None = None
    whenUnsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] | None = None


class Redis(Config):
    address: Annotated[str, Field(pattern=r"^(rediss?://)?[\w.-]+:[0-9]+$")]
    username: str | None = None
    passwordSecret: NameOrNone | None = None


class Backend(Config):
    name: Name
    port: Positive


class Parent(Config):
    name: Name
    namespace: Name | None = None
    sectionName: Name | None = None


class Gateway(Config):
    host: Host
    className: Name | None = None
    tlsSecret: Name | None = None
    annotations: Labels | None = None
    parent: Parent | None = None
    backend: Backend | None = None


class Ingress(Config):
    host: Host
    className: Name
    tlsSecret: Name
    annotations: Labels | None = None
    backend: Backend | None = None


class NetworkPolicy(Config):
    enabled: bool
    clients: Annotated[Labels, Field(min_length=1)]
    gateways: Annotated[Labels, Field(min_length=1)]
    scrapers: Annotated[Labels, Field(min_length=1)]


class DisruptionBudget(Config):
    workers: Count
    head: bool


class Monitoring(Config):
    podMonitor: bool
    rules: bool
    dashboard: bool
    labels: Labels


class Values(Config):
    """The values of the chart; their defaults and meanings are in its values.yaml."""

    kind: Literal["RayService", "RayJob", "RayCluster"]
    image: Image
    rayVersion: Annotated[str, Field(pattern=r"^2\.[0-9]+\.[0-9]+$")]
    service: ServeJob
    upgrade: Upgrade
    job: Job | None
    model: Model
    keys: Secret
    token: Secret
    externalSecrets: ExternalSecrets | None
    serviceAccount: ServiceAccount | None
    head: Head
    workers: Workers
    moreWorkers: dict[Name, MoreWorkers] | None
    spread: Spread | None
    redis: Redis | None
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]
    labels: Labels
    annotations: Labels
    podAnnotations: Labels
    gateway: Gateway | None
    ingress: Ingress | None
    networkPolicy: NetworkPolicy
    disruptionBudget: DisruptionBudget
    monitoring: Monitoring


def schema() -> dict[str, Any]:
    """The schema of all values. Sections that are null may be missing: Helm drops them."""
    written = _any(Values.model_json_schema())
    serve = written["$defs"]["ServeJob"]["properties"]
    for name in _OF_THE_CHART:
        del serve[name]
    for part in [written, *written["$defs"].values()]:
        properties = part.get("properties", {})
        required = [name for name in part.get("required", ()) if not _may_be_null(properties[name])]
        if "required" in part:
            part["required"] = required
    # Helm gives it to every chart.
    written["properties"]["global"] = {"type": "object", "maxProperties": 0}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | written


def _may_be_null(described: dict[str, Any]) -> bool:
    return {"type": "null"} in described.get("anyOf", ())


def _any(part: Any) -> Any:
    """Without `oneOf`: an engine that names no type fits the sections of both engines."""
    if isinstance(part, list):
        return [_any(entry) for entry in part]
    if isinstance(part, dict):
        return {"anyOf" if key == "oneOf" else key: _any(entry) for key, entry in part.items()}
    return part


def main() -> int:
    """Writes the file, or says that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(schema(), indent=1) + "\n"
    if not parser.parse_args().check:
        _FILE.write_text(text)
        return 0
    if not _FILE.exists() or _FILE.read_text() != text:
        print(f"{_FILE.name} is not up to date", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
