"""How long a request may take, and a client to read its answer."""

import json
import socket
import time

import pytest
from fastapi.testclient import TestClient
from serve.asking import ask, error_of, text_of
from serve.real_port import served
from serve.saying import Saying, call

from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.app import build_api
from mars_ray.serve.messages import Finish, Piece, Refusal
from mars_ray.serve.slow_readers import LIMIT_HEADER, SlowReaders


def test_an_answer_that_is_late_is_an_error_not_half_an_answer(client, text_engine):
    """And not one that OpenAI's clients would ask for again by themselves."""
    late = ask(client, max_tokens=100, timeout_s=0.01)
    error = error_of(late, 408)
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout_s")
    assert late.headers["x-should-retry"] == "false"
    assert text_engine.open_answers == 0
    assert text_of(ask(client, timeout_s=60)) == text_of(ask(client))


def test_a_stream_that_is_late_keeps_what_it_has_and_says_so(job, text_engine):
    """The last event is the error, and there is no [DONE]."""
    first, late = Piece("half"), Refusal(408, "late", code="deadline_exceeded")
    client = TestClient(build_api(job, "tiny", Saying(first, late)))
    *_, chunk, error = ask(client, stream=True).text.removesuffix("\n\n").split("\n\n")
    assert json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"]["content"] == "half"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_a_request_may_not_give_itself_more_time_than_there_is(client, job, text_engine):
    """The server's limit holds for those that name none, too."""
    refused = error_of(ask(client, timeout_s=601), 400)
    assert (refused["param"], "600 s" in refused["message"]) == ("timeout_s", True)
    assert error_of(ask(client, timeout_s=0), 400)["param"] == "timeout_s"
    hurried = job.model_copy(update={"limits": Limits(request_s=0.01)})
    assert error_of(ask(TestClient(build_api(hurried, "tiny", text_engine))), 408)


class Endless(Saying):
    """More than any buffer on the way holds."""

    async def answer(self, call):
        for _ in range(2000):
            yield Piece("x" * 100_000)
        yield Piece("", Finish("stop", 1, 1, 1))


@pytest.mark.parametrize("limit_s", [0.3])
def test_a_client_that_does_not_read_is_dropped(limit_s):
    """Guards connections, and what waits in them, that a few idle clients can pile up."""
    job = ServeJob(checkpoint="x", limits=Limits(slow_reader_s=limit_s))
    ended = []
    body = json.dumps({"model": "m", "stream": True, "messages": call("x").prompts[0]})
