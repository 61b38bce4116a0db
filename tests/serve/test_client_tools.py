"""JSON by schema and calls of tools, as the official client and LangChain ask for them."""

from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict
from serve.asking import ASK

CHAT = [{"role": "user", "content": ASK}]
ASKED = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "temperature": 0}


class Paint(BaseModel):
    """Paints."""

    # Random weights would never end the white space between two keys.
    model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})
    colour: Literal["red", "green"]
    twice: bool


@pytest.fixture(scope="module")
def official(roomy_url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{roomy_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def chat(roomy_url) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny",
        base_url=f"{roomy_url}/v1",
        api_key="unused",
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


def test_the_official_client_parses_into_a_model(official):
    """Whole and streamed: the schema is what pydantic and the client make of the class."""
    whole = official.chat.completions.parse(**ASKED, response_format=Paint)
    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Paint)
    with official.chat.completions.stream(**ASKED, response_format=Paint) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_the_official_client_parses_calls(official):
    """The arguments become an object of the class; the stream helper puts them together."""
    tools = [openai.pydantic_function_tool(Paint)]
    asked = ASKED | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    whole = official.chat.completions.parse(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint)
    assert whole.choices[0].finish_reason == "tool_calls"
    with official.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_langchain_binds_tools(chat):
    """Its own calls, whole and streamed, and their results back into the conversation."""
    bound = chat.bind_tools([Paint], tool_choice="required", strict=True, parallel_tool_calls=False)
    said = bound.invoke(ASK)
    (call,) = said.tool_calls
    assert call["name"] == "Paint"
    Paint.model_validate(call["args"])
    whole = None
    for chunk in bound.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert [made["args"] for made in whole.tool_calls] == [call["args"]]
    turns = [HumanMessage(ASK), said, ToolMessage("done", tool_call_id=call["id"])]
    assert chat.bind(max_tokens=4).invoke(turns).usage_metadata["output_tokens"] == 4


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_structured_output(chat, method):
    """By both of its ways."""
    structured = chat.with_structured_output(Paint, method=method, strict=True)
    assert isinstance(structured.invoke(ASK), Paint)
