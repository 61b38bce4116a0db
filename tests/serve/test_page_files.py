"""What the page is made of, and what the browser lets it do."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tomllib
from base64 import b64encode
from pathlib import Path

import pytest

from mars_ray.serve.ingress import middleware

ROOT = Path(__file__).parents[2]
PAGE = Path(middleware.__file__).with_name("page")
# Of npm's registry: the release that lib/marked.esm.js and LICENSE were taken from, and its hash.
VERSION = "18.2.1"
INTEGRITY = (
    "sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX"
    "3JOip9NM/cI6p8z57FxliACboTruMA=="
)
SHIPPED = {
    "marked.mjs": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "marked.LICENSE": "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
}
NAMES = {"marked.mjs": "package/lib/marked.esm.js", "marked.LICENSE": "package/LICENSE"}


def test_the_library_is_the_published_one():
    """Guards a change in what is nobody's to change here."""
    for name, expected in SHIPPED.items():
        assert hashlib.sha256((PAGE / name).read_bytes()).hexdigest() == expected
    assert f"marked v{VERSION} " in (PAGE / "marked.mjs").read_text()


@pytest.mark.slow
def test_the_registry_has_the_same_library(tmp_path):
    """Guards a hash that was made of something else than the release."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    command = ["npm", "pack", f"marked@{VERSION}", "--json", "--pack-destination", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot reach the registry: {done.stderr.strip()[-200:]}")
    packed = (tmp_path / json.loads(done.stdout)[0]["filename"]).read_bytes()
    assert "sha512-" + b64encode(hashlib.sha512(packed).digest()).decode() == INTEGRITY
    with tarfile.open(fileobj=io.BytesIO(packed)) as release:
        for name, path in NAMES.items():
            file = release.extractfile(path)
            assert file
            assert file.read() == (PAGE / name).read_bytes()


def test_its_licence_goes_with_the_wheel():
    """Guards a library that is shipped without its terms."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0 AND MIT"
    files = [ROOT / path for path in project["license-files"]]
    assert PAGE / "marked.LICENSE" in files
    assert all(path.is_file() for path in files)


def test_only_files_of_the_service_are_allowed_to_the_page(client):
    """Guards inline scripts, text that becomes HTML, frames, and files of other sites."""
    reply = client.get("/")
    directives = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    allowed = {name: value for name, value in directives.items() if value != "'none'"}
    assert allowed == {
        "connect-src": "'self'",
        "style-src": "'self'",
        "script-src": "'self'",
        "require-trusted-types-for": "'script'",
    }
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} <= directives.keys()
    assert not re.search(r"\son\w+=|style=|<script>|<style>", reply.text)
    assert not re.search(r"(src|href)=\"(https?:)?//", reply.text)


def test_no_script_makes_html_of_text():
    """Guards a shortcut that a browser without trusted types would let pass."""
    for path in PAGE.glob("*.mjs"):
        if path.name not in SHIPPED:
            assert not re.search(r"\.(inner|outer)HTML|insertAdjacent|eval\(", path.read_text())


def test_every_file_arrives_as_what_it_is(client):
    """Also the ones that scripts import; an update is seen at once, and what is the same does not
    travel again."""
    kinds = {".mjs": "text/javascript", ".css": "text/css"}
    for path in PAGE.iterdir():
        if path.suffix not in kinds:
            continue
        reply = client.get(f"/page/{path.name}")
        assert reply.content == path.read_bytes()
        assert reply.headers["content-type"].startswith(kinds[path.suffix])
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = client.get(f"/page/{path.name}", headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")


@pytest.mark.parametrize("path", ["x.mjs", "%2e%2e/routes.py", "..%2froutes.py", "/etc/passwd", ""])
def test_no_other_file_can_be_had(client, path):
    """Guards a way out of the page's directory."""
    assert client.get(f"/page/{path}").status_code == 404
