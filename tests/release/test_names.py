"""Names and versions that meet: what a release pushes is what the chart and the clusters pull."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.manifests import MACHINES, ROOT, SERVICES, example, merged, texts

from mars_ray import __version__

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def pushed(tmp_path: Path, tag: str) -> set[str]:
    """What the release's images are named, by its own steps."""
    job = RELEASE["jobs"]["image"]
    (step,) = [step for step in job["steps"] if step.get("id") == "name"]
    (push,) = [step for step in job["steps"] if "build-push-action" in step.get("uses", "")]
    assert push["with"]["tags"] == "${{ steps.name.outputs.image }}"
    assert push["with"]["target"] == step["env"]["TARGET"] == "${{ matrix.target }}"
    output = tmp_path / "output"
    for target in job["strategy"]["matrix"]["target"]:
        environment = {"GITHUB_REPOSITORY_OWNER": "Some-Owner", "GITHUB_REF_NAME": tag}
        environment |= {"TARGET": target, "GITHUB_OUTPUT": str(output)}
        subprocess.run(["bash", "-c", step["run"]], check=True, env=environment)
    return set(re.findall(r"^image=(.+)$", output.read_text(), re.MULTILINE))


def test_a_release_pushes_what_is_pulled(tmp_path):
    """Guards an image `v0.1.0` beside a chart that pulls `0.1.0`, and names by another rule."""
    found = pushed(tmp_path, f"v{__version__}")
    registry = {"image": {"registry": "ghcr.io/some-owner"}}
    files = [texts(merged(example(name), registry)) for name in (*SERVICES, *MACHINES)]
    whole = "\n".join(text for each in files for text in each.values())
    pulled = re.findall(r"ghcr\.io/\S+", whole)
    assert pulled
    assert set(pulled) == found
    clusters = "\n".join(path.read_text() for path in (ROOT / "clusters").glob("*.yaml"))
    by_hand = re.findall(r"registry\.example\.com/([^\s},]+)", clusters)
    assert by_hand
    assert {f"ghcr.io/some-owner/{name}" for name in by_hand} <= found


def test_images_of_make_and_of_the_release_have_the_same_names(tmp_path):
    made = re.findall(r"--target (\w+) .*\\\n\t\t--tag (\S+):\$\(VERSION\)", MAKEFILE)
    names = {image.rpartition("/")[2].partition(":")[0] for image in pushed(tmp_path, "v1.2.3")}
    assert {name for _, name in made} == names
    assert all(name == f"mars-ray-{target}" for target, name in made)
    stages = set(re.findall(r" AS (\w+)$", DOCKERFILE, re.MULTILINE))
    assert {target for target, _ in made} <= stages


def test_images_wait_for_the_check_of_the_tag():
    """Guards images under a version that the package does not have."""
    assert RELEASE["jobs"]["image"]["needs"] == "wheel"
    steps = "\n".join(step.get("run", "") for step in RELEASE["jobs"]["wheel"]["steps"])
    assert 'test "$GITHUB_REF_NAME" = "v$(' in steps


def pinned(package: str) -> str:
    (version,) = re.findall(
        rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    return version


@pytest.mark.parametrize(
    ("place", "pattern", "package"),
    [
        ("Makefile", r"^PINNED := torch==(\S+)$", "torch"),
        ("deploy/Dockerfile", r"^ARG TORCH=torch==(\S+)$", "torch"),
        ("tools/vllm_cpu_env.sh", r"TORCH_VERSION:-([^}]+)", "torch"),
        ("tools/pace_env.sh", r"TORCH_VERSION:-([^}]+)", "torch"),
        ("deploy/Dockerfile", r"^ARG RAY=(\S+)$", "ray"),
        ("deploy/chart/values.yaml", r'^rayVersion: "(\S+)"', "ray"),
        ("docs/how-to/vllm.md", r'"ray\[serve\]==([^"]+)"', "ray"),
    ],
)
def test_versions_are_those_of_the_constraints(place, pattern, package):
    """Guards an upgrade that forgets a place: Ray's processes refuse each other."""
    found = re.findall(pattern, (ROOT / place).read_text(), re.MULTILINE)
    assert found
    assert set(found) == {pinned(package)}


def test_one_vllm():
    """In the image, in the environment of the tests, in the extra and in the docs."""
    (image,) = re.findall(r"^ARG VLLM=vllm==(\S+)$", DOCKERFILE, re.MULTILINE)
    tested = re.search(r"VLLM_VERSION:-([^}]+)", (ROOT / "tools/vllm_cpu_env.sh").read_text())
    assert tested
    assert tested[1] == image
    series = f"vllm=={image.rpartition('.')[0]}.*"
    assert f'vllm = ["{series}"]' in (ROOT / "pyproject.toml").read_text()
    assert f'"{series}"' in (ROOT / "docs/how-to/vllm.md").read_text()


def test_one_base_image():
    """By its whole name, also where the digest is asked for."""
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert RELEASE["jobs"]["image"]["env"]["BASE_IMAGE"] == base
    short = base.rpartition("/")[2]
    for place in ("Makefile", "docs/how-to/kubernetes.md"):
        assert set(re.findall(r"python:3[\w.-]+", (ROOT / place).read_text())) == {short}
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    python = re.findall(r'python-version: "([\d.]+)"', workflow)
    assert set(python) == {short.partition(":")[2].partition("-")[0]}
