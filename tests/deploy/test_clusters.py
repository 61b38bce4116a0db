"""The files of `clusters/`: valid, closed to strangers, and of the versions that are tested."""

import re
from typing import Any

import pytest
import ray
import yaml
from deploy.manifests import (
    CHART,
    MACHINES,
    ROOT,
    SERVICES,
    check,
    check_groups,
    cluster_of,
    documents,
    example,
    groups,
    merged,
    of_kind,
    rendered,
    texts,
)
from jsonschema import ValidationError
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import NodeState, NodeStatus
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

from mars_ray import __version__
from mars_ray.cluster.machine import NODE_ENVIRONMENT

LAUNCHED = ("aws", "gcp", "on-premise")


def launcher_file(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "clusters" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", LAUNCHED)
def test_launcher_files_pass_rays_own_check(name):
    """Guards a typo that `ray up` finds after it has made machines."""
    config = launcher_file(name)
    validate_config(prepare_config(config))
    with pytest.raises(ValidationError, match="idle_timeout_minute"):
        validate_config(prepare_config(config | {"idle_timeout_minute": 1}))


@pytest.mark.parametrize("name", LAUNCHED)
def test_launched_clusters_ask_for_a_token_and_hide_their_dashboard(name):
    """Guards a public dashboard, which runs code for whoever asks."""
    config = launcher_file(name)
    options = config["docker"]["run_options"]
    assert "--env RAY_AUTH_MODE=token" in options
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    head = " ".join(config["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head
    assert "--autoscaling-config" in head
    for variable, value in NODE_ENVIRONMENT.items():
        assert f"--env {variable}={value}" in options


@pytest.mark.parametrize("name", LAUNCHED)
def test_nothing_is_installed_on_what_has_the_image(name):
    """Guards Ray's own setup commands, which stand where a file gives none: another Ray, by pip."""
    config = prepare_config(launcher_file(name))
    for key in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        assert not config[key]


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launched_clusters_token_is_made_for_its_owner(name):
    """Guards a token that Ray leaves readable for everybody."""
    text = (ROOT / "clusters" / f"{name}.yaml").read_text()
    assert text.count("get-auth-token") == 1
    assert "(umask 077; ray get-auth-token --generate)" in text


@pytest.mark.parametrize("name", LAUNCHED)
def test_containers_have_no_rights_and_storage_that_all_see(name):
    """Guards runs that are lost with their container, and programs that gain what they lack."""
    options = launcher_file(name)["docker"]["run_options"]
    assert {"--cap-drop=ALL", "--security-opt=no-new-privileges"} <= set(options)
    assert "--volume /shared:/shared" in options


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_shared_storage_is_mounted_before_the_container_starts(name):
    """Guards a /shared that Docker makes, on each machine another, for root alone."""
    commands = launcher_file(name)["initialization_commands"]
    (mounted,) = (place for place, line in enumerate(commands) if "sudo mount " in line)
    assert commands[mounted].endswith(" /shared")
    assert "sudo chown 1000:1000 /shared" in commands[mounted:]
    header = (ROOT / "clusters" / f"{name}.yaml").read_text().partition("\ncluster_name")[0]
    assert "/shared" in header.partition("To change:")[2]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> None:
    """A home with the token that the files of launched clusters copy to their nodes."""
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_kind_of_machine_gets_its_image(name):
    """Guards workers that never start: `ray up` does without `docker.image`, its autoscaler not."""
    config = prepare_config(launcher_file(name))
    images = {
        kind: AutoscalingConfig(config).get_docker_config(kind)["image"].partition(":")[0]
        for kind in config["available_node_types"]
    }
    cpu, cuda = "registry.example.com/mars-ray-cpu", "registry.example.com/mars-ray-cuda"
    clouds = {"head": cpu, "cpu": cpu, "gpu": cuda}
    # On-premise all are of one kind, and the first version of the autoscaler tells workers apart.
    assert images == ({"local.cluster.node": cpu} if name == "on-premise" else clouds)
    assert config["docker"]["worker_image"].startswith(cuda)


def launches(config: dict[str, Any], *bundles: dict[str, float]) -> dict[str, int]:
    """The machines that the autoscaler asks for, beside a head that computes nothing."""
    return asked_for(AutoscalingConfig(prepare_config(config)), *bundles)


def asked_for(settings: AutoscalingConfig, *bundles: dict[str, float]) -> dict[str, int]:
    kind = settings.get_head_node_type()
    head = AutoscalerInstance(
        cloud_instance_id="head",
        im_instance=Instance(
            instance_id="head",
            instance_type=kind,
            status=Instance.RAY_RUNNING,
            node_kind=NodeKind.HEAD,
            cloud_instance_id="head",
            node_id="head",
        ),
        ray_node=NodeState(node_id=b"head", ray_node_type_name=kind, status=NodeStatus.RUNNING),
    )
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=settings.get_node_type_configs(),
        max_num_nodes=settings.get_max_num_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count(
            [ResourceRequestUtil.make(bundle) for bundle in bundles]
        ),
        current_instances=[head],
    )
    reply = ResourceDemandScheduler(None).schedule(request)
    return {launch.instance_type: launch.count for launch in reply.to_launch}


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_heads_compute_nothing_and_machines_come_for_what_is_asked(name):
    """Guards work on the head, whose end is the cluster's, and machines with GPUs that are paid for
    while nobody uses them."""
    config = launcher_file(name)
    types = config["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0, "GPU": 0}
    assert launches(config) == {}
    # An ingress; a replica without a GPU; the driver of a simulation.
    assert launches(config, {"CPU": 0.1}, {"CPU": 1.0}, {"CPU": 2.0}) == {"cpu": 1}
    assert launches(config, *[{"CPU": 8.0, "GPU": 1.0}] * 9) == {"gpu": 2}
    most = sum(kind.get("max_workers", 0) for kind in types.values())
    assert config["max_workers"] == most


def test_on_premise_takes_the_autoscalers_first_version():
    """Guards a cluster that stays a head: to the second version machines of one's own have nothing,
    and the head is one of `min_workers`. Where the last line fails, Ray has mended it."""
    text = (ROOT / "clusters" / "on-premise.yaml").read_text()
    assert 0 < text.find("export RAY_UP_enable_autoscaler_v2=0") < text.find("ray up clusters")
    config = launcher_file("on-premise")
    assert "--num-cpus=0 --num-gpus=0" in " ".join(config["head_start_ray_commands"])
    # Would be read, for a hash.
    del config["auth"]["ssh_private_key"]
    assert launches(config, {"CPU": 1.0}) == {}


@pytest.mark.parametrize("name", MACHINES)
def test_kuberay_clusters_are_valid(name):
    """Guards keys that the API server drops without a word."""
    release = rendered(example(name))
    (cluster,) = of_kind(release, "RayCluster")
    for document in release:
        check(document)
    check_groups(groups(cluster))
    cluster["spec"]["rayVersoin"] = "2.60.0"
    with pytest.raises(AssertionError, match="rayVersoin"):
        check(cluster)


def kuberay_settings(values: dict[str, Any]) -> AutoscalingConfig:
    """As Ray's autoscaler reads a release's cluster beside the head."""
    (ours,) = (document for document in rendered(values) if document["apiVersion"] == "ray.io/v1")
    cluster = {"metadata": {"name": "mars", "namespace": "default"}, "spec": cluster_of(ours)}
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    return AutoscalingConfig(config, skip_content_hash=True)


def test_pods_come_for_what_is_asked():
    """Guards values that Ray reads as another machine, and pods with GPUs that nobody uses."""
    gpus = kuberay_settings(example("machines-gpu"))
    assert asked_for(gpus) == {}
    assert asked_for(gpus, *[{"CPU": 8.0, "GPU": 1.0}] * 9) == {"workers": 2}
    part = {"workers": {"gpuResource": "nvidia.com/mig-3g.40gb"}}
    parts = kuberay_settings(merged(example("machines-gpu"), part))
    assert asked_for(parts, {"GPU": 8.0}) == {"workers": 1}
    large = {"max": 1, "resources": {"large": 1}}
    shapes = kuberay_settings(merged(example("cpu"), {"moreWorkers": {"large": large}}))
    assert asked_for(shapes, {"CPU": 1.0, "large": 1.0}) == {"workers": 1, "large": 1}
    groups_of_two = kuberay_settings(example("vllm"))
    # A replica's placement group: its process, and vLLM's workers.
    assert asked_for(groups_of_two, {"CPU": 8.0, "GPU": 2.0}) == {"workers": 1}


@pytest.mark.parametrize(("priority", "group"), [(1, "spot"), (-1, "workers")])
def test_machines_that_may_be_taken_away_are_asked_for_first(priority, group):
    """Guards a priority that Ray reads the other way round; what stays in any case comes first."""
    values = merged(example("resilient"), {"moreWorkers": {"spot": {"priority": priority}}})
    asked = asked_for(kuberay_settings(values), *[{"CPU": 4.0}] * 3)
    assert asked == merged({"workers": 2}, {group: 3 if group == "workers" else 1})


@pytest.mark.parametrize("name", [*SERVICES, *MACHINES])
def test_kuberay_clusters_ask_for_a_token_and_have_this_ray(name):
    """Guards a cluster that runs code for whoever asks, or that KubeRay takes for another Ray."""
    (ours,) = (
        document for document in rendered(example(name)) if document["apiVersion"] == "ray.io/v1"
    )
    cluster = cluster_of(ours)
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["enableInTreeAutoscaling"] is True


def test_all_pods_mount_the_claim_that_is_there():
    """Guards pods that wait for ever for a volume of another name."""
    (claim,) = documents(ROOT / "clusters" / "kuberay" / "volume.yaml")
    check(claim)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in ("cpu", *MACHINES):
        text = "\n".join(texts(example(name)).values())
        named = re.findall(r"claimName: ([\w-]+)", text)
        assert len(named) == 2
        assert set(named) == {claim["metadata"]["name"]}


def test_images_are_those_of_make_image_and_of_this_version():
    """Guards a release whose files still start another, and images that nothing builds."""
    files = [
        text
        for name in ("clusters", "deploy", "jobs")
        for path in (ROOT / name).rglob("*.yaml")
        if "{{" not in (text := path.read_text())
    ]
    files += ["\n".join(texts(example(name)).values()) for name in (*SERVICES, *MACHINES)]
    images = set(re.findall(r"registry\.example\.com/(\S+:\S+)", "\n".join(files)))
    built = ("mars-ray-cpu", "mars-ray-cuda", "mars-ray-vllm")
    assert images == {f"{name}:{__version__}" for name in built}
    (chart,) = documents(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == __version__
