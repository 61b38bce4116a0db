"""Models of the hub in the chart: fetched before Ray starts, by a container of their own."""

import os
import subprocess
import sys

import pytest
from deploy.manifests import check, example, groups, of_kind, rendered
from model.small_hub import COMMIT, NAME, hub

# In the environment of a pod; torch has no part in it.
READ = f"""
from pathlib import Path
from mars_ray.storage import copies
from mars_ray.storage.place import Place

place = Place({NAME!r}, {COMMIT!r})
with copies.pinned(place, "config.json") as (known, directory):
    assert (directory / "config.json").read_text() == "of config.json"
if COMPONENT == "worker":
    directory = copies.fetched(place, "unused", lambda *_: None, "checkpoint")
    assert (directory / "model.safetensors").read_text() == "of model.safetensors"
else:
    assert not (directory / "model.safetensors").exists()
"""


@pytest.mark.parametrize("component", ["head", "worker"])
def test_what_is_fetched_is_enough_without_the_hub(component, tmp_path):
    """Runs the init container's command against a hub, then reads where there is none. Guards a
    pod that starts, and a replica in it that does not find its model."""
    held = tmp_path / "hub"
    held.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (held / name).write_text(f"of {name}")
    values = {"checkpoint": NAME, "revision": COMMIT}
    release = rendered({"service": values, "model": {"hub": {"tokenSecret": ""}}})
    (service,) = of_kind(release, "RayService")
    pod = groups(service)[component == "worker"]["template"]["spec"]
    (fetch,) = pod["initContainers"]
    assert fetch["command"][0] == "hf"
    words = [sys.executable, "-m", "huggingface_hub.cli.hf", *fetch["command"][1:], *fetch["args"]]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    with hub(held) as endpoint:
        subprocess.run(words, env=environment | {"HF_ENDPOINT": endpoint}, check=True)
    assert not list((tmp_path / "cache").rglob("*.bin"))
    offline = environment | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    read = f"COMPONENT = {component!r}{READ}"
    subprocess.run([sys.executable, "-c", read], env=offline, check=True)


def test_only_the_init_container_has_the_hubs_token():
    """Guards a token in the processes that run a model, and a hub that they ask at work."""
    (service,) = of_kind(rendered(example("hub")), "RayService")
    for group in groups(service):
        pod = group["template"]["spec"]
        (fetch,), (ray,) = pod["initContainers"], pod["containers"]
        assert "hub-token" in str(fetch)
        assert "hub-token" not in str(ray)
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in ray["env"]
        assert {mount["mountPath"] for mount in fetch["volumeMounts"]} == {"/cache"}
    head, workers = (str(group["template"]["spec"]["initContainers"]) for group in groups(service))
    assert "safetensors" in workers
    assert "safetensors" not in head


def test_every_model_of_the_hub_is_fetched():
    """Guards a second model, or an adapter, that offline processes do not find."""
    service = {
        "checkpoint": "org/first",
        "more_models": [
            {"checkpoint": "org/second", "revision": "v2"},
            {"checkpoint": "/shared/x"},
        ],
        "engine": {"draft_adapter": "org/adapter@v3"},
    }
    values = {"service": service, "model": {"hub": {"tokenSecret": ""}}, "workers": {"max": 6}}
    (made,) = of_kind(rendered(values), "RayService")
    fetches = groups(made)[1]["template"]["spec"]["initContainers"]
    asked = [(*each["command"][2:], each["args"][0]) for each in fetches]
    assert asked == [
        ("org/first", "--include=*.json"),
        ("org/adapter", "--revision=v3"),
        ("org/second", "--revision=v2"),
    ]
    assert len({each["name"] for each in fetches}) == 3
    check(made)
