"""`mars-ray doctor`: what is on a machine, and what is wrong there."""

import json
import os
import socket
from importlib import metadata

import pytest
from typer.testing import CliRunner

from mars_ray import doctor
from mars_ray.cli import app
from mars_ray.cluster.machine import free_port
from mars_ray.decode.cpu.compiling import NoLibraryError
from mars_ray.decode.cpu.library import is_available


def by_name() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.findings()}


def test_this_machine_is_well():
    """By the command: a line for each thing, and one of JSON. A step has been computed."""
    done = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["mars-ray"].startswith("0.")
    assert result["ray"] == metadata.version("ray")
    if is_available():
        assert "is right" in result["compiled step"]
    for finding in result["problems"]:
        assert "install" not in finding


def test_what_is_wrong_is_said_with_what_to_do(monkeypatch, tmp_path):
    """Guards a report that always says all is well."""
    token = tmp_path / "token"
    token.write_text("secret")
    os.chmod(token, 0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setattr(doctor, "free_on_node", lambda: 1e9)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(doctor, "_NEEDED", ("no-such-package",))

    def broken(instructions: str) -> None:
        raise NoLibraryError("its results are wrong on this processor")

    monkeypatch.setattr(doctor, "check", broken)
    found = by_name()
    assert found["no-such-package"].found == "missing"
    assert "install" in str(found["no-such-package"].advice)
    assert "torch" in str(found["compiled step"].advice)
    assert "may not fit" in str(found["memory"].advice)
    assert "unset RAY_ADDRESS" in str(found["RAY_ADDRESS"].advice)
    assert f"chmod 600 {token}" in str(found["Ray's token"].advice)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_port_that_is_taken(monkeypatch, is_taken):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if is_taken:
            other.listen()
        else:
            other.close()
        monkeypatch.setattr(doctor, "_SERVICE_PORT", port)
        assert ("in use" in by_name()[f"port {port}"].found) == is_taken
