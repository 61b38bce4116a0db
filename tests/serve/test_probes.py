"""What load tools, load balancers and clients ask before their first request."""

import openai
import pytest
from fastapi.testclient import TestClient
from serve.asking import error_of
from serve.saying import Saying

from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.middleware import Gate

PROBES = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/readyz")]
HUB_NAME = "HuggingFaceTB/SmolLM2-135M"


@pytest.mark.parametrize(("method", "path"), PROBES)
def test_a_probe_is_200_only_if_requests_can_be_served(client, job, text_engine, method, path):
    """As vLLM's: 503 while no engine answers, and from the moment on that the service stops.
    Guards a load balancer that sends requests to where they are refused."""
    assert client.request(method, path).status_code == 200
    unready = TestClient(build_api(job, {"tiny": Saying()}))
    assert unready.request(method, path).status_code == 503
    gate = Gate(is_open=False)
    stopping = TestClient(build_api(job, {"tiny": text_engine}, gate))
    assert stopping.request(method, path).status_code == 503


@pytest.mark.parametrize("name", ["tiny", HUB_NAME])
def test_a_model_is_found_by_its_id(name):
    """As the official client asks, which escapes the slashes of the hub's names."""
    job = ServeJob(checkpoint="x", model_name=name)
    http = TestClient(build_api(job, {name: Saying()}))
    with openai.OpenAI(
        base_url="http://testserver/v1", api_key="x", http_client=http, max_retries=0
    ) as asking:
        (listed,) = asking.models.list()
        assert asking.models.retrieve(name) == listed
        assert http.get(f"/v1/models/{name}").json()["id"] == name
        with pytest.raises(openai.NotFoundError) as caught:
            asking.models.retrieve(f"{name}/other")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert error_of(http.get("/v1/models/other"), 404)["type"] == "invalid_request_error"
