"""What an operator does with the memory of the policy, over HTTP."""

import json

import pytest
from fastapi.testclient import TestClient
from serve.asking import error_of

from mars_ray.autoscale.policy import Feedback, State
from mars_ray.serve.ingress.routes import build_api

PATH = "/v1/mars/autoscaling"
ADMIN, OTHER = "an-admins-secret-key", "a-clients-secret-key"
KEYS = f"""
[[keys]]
name = "admin"
key = "{ADMIN}"
admin = true
[[keys]]
name = "client"
key = "{OTHER}"
"""
WISE = json.loads(State(feedback=Feedback(utilisation=0.55)).to_json())


class Policy:
    """A backend of which only the memory is asked for."""

    def __init__(self) -> None:
        self.memory: str | None = None

    async def learnt(self) -> str | None:
        return self.memory

    async def relearn(self, memory: str | None) -> None:
        self.memory = memory


@pytest.fixture
def client(job) -> TestClient:
    return TestClient(build_api(job, {"tiny": Policy()}))


def test_a_memory_is_exported_reset_and_put_back(client):
    """What one service has exported another one takes."""
    assert client.get(PATH).json() == {"model": "tiny", "memory": None}
    assert client.put(PATH, json={"memory": WISE}).json()["memory"] == WISE
    exported = client.get(PATH, params={"model": "tiny"}).json()
    assert exported == {"model": "tiny", "memory": WISE}
    assert client.delete(PATH).json()["memory"] is None
    assert client.get(PATH).json()["memory"] is None
    assert client.put(PATH, json=exported).status_code == 200
    assert client.get(PATH).json() == exported


def test_what_cannot_be_gone_on_from_is_refused(client, job):
    """And changes nothing. Guards a policy that is reset by a file of another release."""
    client.put(PATH, json={"memory": WISE})
    strange = WISE | {"feedback": {"utilisation": "high"}}
    fault = error_of(client.put(PATH, json={"memory": strange}), 400)
    assert fault["param"] == "memory"
    assert "feedback.utilisation" in fault["message"]
    assert "another release" in fault["message"]
    error_of(client.put(PATH, json={"memory": {}}), 400)
    error_of(client.get(PATH, params={"model": "none"}), 404)
    assert client.get(PATH).json()["memory"] == WISE
    fixed = job.model_copy(update={"replicas": 2})
    fault = error_of(TestClient(build_api(fixed, {"tiny": Policy()})).get(PATH), 400)
    assert "fixed number" in fault["message"]


def test_only_admins_may(job, tmp_path):
    """A client that could reset it could have the fleet scaled down under the others."""
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    guarded = job.model_copy(update={"keys_file": str(keys)})
    client = TestClient(build_api(guarded, {"tiny": Policy()}))
    for ask in (client.get, client.delete, client.put):
        assert ask(PATH).status_code == 401
        refused = ask(PATH, headers={"Authorization": f"Bearer {OTHER}"})
        error = error_of(refused, 403)
        assert "not an admin's" in error["message"]
        assert error["code"] == "insufficient_permissions"
    allowed = {"Authorization": f"Bearer {ADMIN}"}
    assert client.get(PATH, headers=allowed).status_code == 200
    assert client.put(PATH, headers=allowed, json={"memory": WISE}).status_code == 200
