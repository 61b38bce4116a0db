"""Tools as pydantic, zod, and Java's and .NET's libraries describe them (`tool_schemas.json`).

Each has arguments that follow its schema, some that do not, though the schema's author forgot no
keyword that a grammar knows, and the place by which it is refused if it must be followed strictly.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serve.asking import ask, error_of, load_server

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.protocol import GenerationRequest, Tools
from mars_ray.serve.replica.llm_server import LLMServer

TOOLS = json.loads((Path(__file__).parent / "tool_schemas.json").read_text())
MAKERS = {"pydantic": TOOLS[:5], "zod": TOOLS[5:11], "java": TOOLS[11:16], "net": TOOLS[16:]}
BY_NAME = pytest.mark.parametrize("tool", TOOLS, ids=[tool["name"] for tool in TOOLS])


@pytest.fixture(scope="module")
def job(checkpoint) -> ServeJob:
    """Room for the descriptions of a maker's tools, a token for almost every letter."""
    return ServeJob(
        checkpoint=str(checkpoint),
        engine=EngineConfig(max_batch=2, max_context=12_000, device="cpu", threads=1),
        limits=Limits(new_tokens=300),
    )


@pytest.fixture(scope="module")
def text_engine(job) -> Iterator[LLMServer]:
    engine = load_server(job)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def client(job, text_engine) -> TestClient:
    return TestClient(build_api(job, {"tiny": text_engine}), raise_server_exceptions=False)


def described(tool: dict, **fields: Any) -> dict:
    function = {"name": tool["name"], "parameters": tool["parameters"], **fields}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_tools_of_a_server_are_answered(client, maker):
    """As agents send what an MCP server lists. Guards one keyword that refuses them all."""
    tools = [described(tool) for tool in MAKERS[maker]]
    last = tools[-1]["function"]["name"]
    for choice in ("auto", "required", {"type": "function", "function": {"name": last}}):
        reply = ask(client, tools=tools, tool_choice=choice, max_tokens=4)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@BY_NAME
def test_arguments_follow_what_can_be_followed(text_engine, tool, choice):
    """Also of a schema with a keyword that cannot be."""
    tools = Tools(
        (described(tool),),
        is_required=choice != "auto",
        is_parallel=False,
        named=tool["name"] if choice == "named" else None,
    )
    call = GenerationRequest("a", ("x",), ExactMode(), Sampling(), 12, 100, tools=tools)
    grammar = text_engine._grammar(call)

    def is_allowed(arguments: str) -> bool:
        begun = f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": {arguments}'
        tokens = text_engine._tokenizer.encode(begun)
        return grammar.start().admissible(tokens) == len(tokens)

    assert is_allowed(json.dumps(tool["right"]) + "}\n</tool_call>")
    # Without its end, so that it is not what is missing that counts.
    assert not is_allowed(json.dumps(tool["wrong"])[:-1])
    assert not is_allowed("1")


@BY_NAME
def test_a_strict_tool_is_followed_or_refused_by_name(client, tool):
    """With the place, which no tool beside it changes."""
    now = {"type": "function", "function": {"name": "now"}}
    reply = ask(client, tools=[now, described(tool, strict=True)], max_tokens=1)
    if tool["refused"] is None:
        assert reply.status_code == 200, reply.text
        return
    error = error_of(reply, 400)
    assert error["param"] == f"tools.1.function.parameters.{tool['refused']}"
    assert error["message"].startswith(f"'{error['param']}' cannot be followed: ")
