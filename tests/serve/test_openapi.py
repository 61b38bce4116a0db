"""The served description; that replies keep to it is the fuzzer's to check."""

import schemathesis
from fastapi.testclient import TestClient
from schemathesis.config import SchemathesisConfig
from starlette.routing import Mount

from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.openai.openapi import openapi


def test_every_route_is_described_and_nothing_else(client, job, text_engine):
    """Guards a route that no generated client knows, and one that only they know."""
    served = client.get("/openapi.json").json()
    api = build_api(job, {"tiny": text_engine})
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in api.routes
        if not isinstance(route, Mount)  # the page's files, which are for browsers
        for method in route.methods
    }
    described = {(path, method) for path, ways in served["paths"].items() for method in ways}
    assert described == routes - {("/openapi.json", "get")}
    schema = schemathesis.openapi.from_dict(served, config=SchemathesisConfig())
    schema.validate()


def test_bodies_are_described_by_what_checks_them(client):
    """A field of the model is a field of the description, with its bounds and its models."""
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatBody"]
    # Null is a field not given, whatever its name.
    assert chat["additionalProperties"] == {"type": "null"}
    assert schemas["PlainMessage"]["additionalProperties"] is False
    assert chat["properties"]["model"]["enum"] == ["tiny"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 2,
    }
    assert schemas["TokenizeBody"]["properties"]["model"]["enum"] == ["tiny", None]


def test_keys_are_described_where_there_are_any(job, text_engine, tmp_path):
    """And the description itself is for their holders only."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "0123456789abcdef"\n')
    guarded = job.model_copy(update={"keys_file": str(keys)})
    client = TestClient(build_api(guarded, {"tiny": text_engine}))
    assert client.get("/openapi.json").status_code == 401
    served = client.get("/openapi.json", headers={"Authorization": "Bearer 0123456789abcdef"})
    paths = served.json()["paths"]
    assert paths["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "401" in paths["/v1/models"]["get"]["responses"]
    assert "security" not in paths["/healthz"]["get"]
    assert "401" not in openapi(["m"], with_keys=False)["paths"]["/v1/models"]["get"]["responses"]
