"""The files of `clusters/`: valid, closed to strangers, and of the versions that are tested."""

import re
from typing import Any

import pytest
import ray
import yaml
from deploy.manifests import ROOT, check, check_groups, documents, groups
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from mars_ray import __version__
from mars_ray.cluster.environment import NODE_ENVIRONMENT

LAUNCHED = ("aws", "gcp", "on-premise")
KUBERAY = ("cpu", "gpu")


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


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_launched_heads_have_no_gpus_and_workers_come_and_go(name):
    """Guards GPU machines that are paid for while nobody uses them."""
    types = launcher_file(name)["available_node_types"]
    assert types["head"]["resources"]["GPU"] == 0
    assert types["gpu"]["resources"]["GPU"] > 0
    assert types["gpu"]["min_workers"] == 0


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_clusters_are_valid(name):
    """Guards keys that the API server drops without a word."""
    (cluster,) = documents(ROOT / "clusters" / "kuberay" / f"{name}.yaml")
    check(cluster)
    check_cluster(cluster)
    cluster["spec"]["rayVersoin"] = "2.60.0"
    with pytest.raises(AssertionError, match="rayVersoin"):
        check(cluster)


def check_cluster(document: dict[str, Any]) -> None:
    """What the schema does not say and KubeRay or Ray would only say at work."""
    spec = document["spec"]
    assert spec["rayVersion"] == ray.__version__
    assert spec["authOptions"]["mode"] == "token"
    assert spec["enableInTreeAutoscaling"] is True
    check_groups(groups(document))


def test_images_are_those_of_make_image_and_of_this_version():
    """Guards a release whose files still start another, and images that nothing builds."""
    files = [
        path for name in ("clusters", "deploy", "jobs") for path in (ROOT / name).rglob("*.yaml")
    ]
    text = "\n".join(path.read_text() for path in files)
    images = set(re.findall(r"registry\.example\.com/(\S+:\S+)", text))
    assert images == {f"mars-ray-cpu:{__version__}", f"mars-ray-cuda:{__version__}"}
    tags = re.findall(r"newTag: (.+)", text)
    assert len(tags) == 3
    assert set(tags) == {__version__}
