"""deploy/Dockerfile, as far as it can be held to account without building it."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

from deploy.manifests import ROOT

from mars_ray.cluster.machine import NODE_ENVIRONMENT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TARGETS = ("cpu", "cuda", "vllm")
TEXT = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())


def test_hadolint_has_nothing_to_say():
    """Guards the usual mistakes: unpinned bases, caches in layers, shells as entry points."""
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, DOCKERFILE, "--failure-threshold", "info"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def copied() -> list[str]:
    """Sources of COPY lines that come from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE)
    assert lines
    return [source for line in lines for source in line.split()[:-1]]


def test_everything_copied_is_there_and_not_ignored():
    """Guards a build that fails on a file which was renamed, or which .dockerignore hides."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignore if line.startswith("!")]
    assert "*" in ignore
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in kept), source


def test_what_the_wheel_is_built_from_is_copied():
    """Guards an image whose build misses a file that pyproject.toml names."""
    settings = (ROOT / "pyproject.toml").read_text()
    for name in ("README.md", "LICENSE"):
        assert name in settings
        assert name in copied()


def test_bases_are_named_by_digest_and_nobody_is_root():
    """Guards another base next month, and processes that own the machine if they break out."""
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", TEXT, re.MULTILINE)
    names = {name for _, name in stages}
    for source, _ in stages:
        assert source in names or source == "${BASE_IMAGE}@${BASE_DIGEST}"
    assert "\nARG BASE_DIGEST\n" in TEXT
    for target in TARGETS:
        body = TEXT.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert re.findall(r"^USER (.+)$", body, re.MULTILINE)[-1] == "1000"


def test_final_images_have_no_compiler_of_the_build_stage():
    """Guards images that grow: final stages take one directory of what the others made."""
    for target in TARGETS:
        body = TEXT.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert re.findall(r"^COPY (.+)$", body, re.MULTILINE) == [
            f"--from=packages-{target} /opt/mars-ray /opt/mars-ray"
        ]


def stage(name: str) -> str:
    return TEXT.split(f" AS {name}\n")[1].split("\nFROM ")[0]


def test_a_login_shell_finds_the_programs(tmp_path):
    """Guards `ray up`, whose commands run in login shells: Debian's /etc/profile sets PATH anew."""
    (line, name) = re.findall(r"^RUN (echo .+) > /etc/profile\.d/(\S+)$", stage("runtime"), re.M)[0]
    assert name.endswith(".sh")
    (tmp_path / name).write_text(subprocess.check_output(["sh", "-c", line], text=True))
    shown = subprocess.check_output(["sh", "-c", f"PATH=/bin; . {tmp_path / name}; echo $PATH"])
    assert shown.decode().strip() == "/opt/mars-ray/bin:/bin"


def test_the_image_says_where_its_users_home_is():
    """Guards a token that is not found: `ray up` mounts it below the image's HOME, else /root."""
    (home,) = re.findall(r" HOME=(\S+)", stage("runtime"))
    (user,) = re.findall(r"useradd .*--create-home (\S+)", stage("runtime"))
    assert home == f"/home/{user}"


def test_processes_of_the_image_have_what_nodes_need():
    """Guards a cluster that is started by hand from the image."""
    for variable, value in NODE_ENVIRONMENT.items():
        assert f" {variable}={value}" in stage("runtime")


def test_the_heads_image_can_ask_clouds_for_machines():
    """Guards a head whose autoscaler cannot import the provider: no machine would ever come."""
    for package in ("boto3", "google-api-python-client"):
        assert re.search(rf"pip install .*\b{package}==", stage("packages-cpu"))


def test_the_cpu_image_can_simulate():
    """Guards the chart's job simulate-demo: numba is in an extra."""
    assert '"${wheel}[simulate]"' in stage("packages-cpu")


def test_all_images_have_one_ray():
    """Guards a worker that the head of its cluster refuses: its Ray is another one."""
    (ray,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"\nARG RAY={ray}\n" in stage("packages-vllm")
