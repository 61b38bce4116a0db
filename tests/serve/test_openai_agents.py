"""OpenAI's agents library on a real port: a loop that calls a Python function and goes on.

It wants websockets below 17, and `constraints.txt` has a newer one, so it lives in an environment
of its own: `pip install -e ".[dev]" openai-agents` in a new one.
"""

import asyncio
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

agents = pytest.importorskip(
    "agents", reason="openai-agents is not installed: it wants older websockets than we pin"
)

ASK = "Paint it."
Colour = Literal["red", "green", "blue"]
Count = Annotated[int, Field(ge=0, le=99)]


class Verdict(BaseModel):
    """The last answer, which ends by itself for being JSON."""

    grade: Literal["good", "bad"]


def agent_of(official: openai.AsyncOpenAI, route: str, painted: list[Any], reply: str) -> Any:
    """An agent whose first answer must be a call, and the second none: random weights would choose
    by chance."""

    @agents.function_tool(is_enabled=lambda *_: not painted)
    def paint(colour: Colour, count: Count, twice: bool) -> str:
        """Paints.

        Args:
            colour: of what
        """
        painted.append((colour, count, twice))
        return reply

    kinds = {
        "responses": agents.OpenAIResponsesModel,
        "chat": agents.OpenAIChatCompletionsModel,
    }
    settings = agents.ModelSettings(
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=250,
        include_usage=True,
        extra_body={"mode": "exact"},
    )
    return agents.Agent(
        name="Painter",
        output_type=Verdict,
        instructions="Be brief.",
        model=kinds[route](model="tiny", openai_client=official),
        model_settings=settings,
        tools=[paint],
    )


def run(url: str, route: str, painted: list[Any], reply: str, *, is_streamed: bool) -> Any:
    async def all_of_it() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        # Its connections belong to this event loop.
        async with client as official:
            agent = agent_of(official, route, painted, reply)
            if not is_streamed:
                return await agents.Runner.run(agent, ASK, max_turns=3)
            result = agents.Runner.run_streamed(agent, ASK, max_turns=3)
            async for _ in result.stream_events():
                pass
            return result

    agents.set_tracing_disabled(True)  # it would tell OpenAI
    return asyncio.run(all_of_it())


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["responses", "chat"])
def test_a_loop_calls_the_function_and_hands_its_result_back(roomy_url, route, is_streamed):
    """Twice, with results of different lengths: the next prompt is longer by as much, so the model
    has been told of them."""
    prompts = []
    for reply in ("done", "done" + " and done" * 9):
        painted: list[Any] = []
        result = run(roomy_url, route, painted, reply, is_streamed=is_streamed)
        ((colour, count, twice),) = painted
        assert colour in ("red", "green", "blue")
        assert 0 <= count <= 99
        assert isinstance(twice, bool)
        called, returned = (
            item for item in result.to_input_list() if item.get("type", "").startswith("function")
        )
        assert (called["name"], returned["output"]) == ("paint", reply)
        assert returned["call_id"] == called["call_id"]
        assert isinstance(result.final_output, Verdict)
        prompts.append([response.usage.input_tokens for response in result.raw_responses])
    (first, second), (again, longer) = prompts
    assert first == again
    sizes = [
        httpx.post(f"{roomy_url}/tokenize", json={"prompt": text}).json()["count"]
        for text in ("done", "done" + " and done" * 9)
    ]
    assert longer - second == sizes[1] - sizes[0]
