"""`mars-ray chat` against a real service on a real port."""

import io
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console
from serve.real_port import served

from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServedModel
from mars_ray.errors import EngineError
from mars_ray.serve.chat_client import Conversation, _read, chat, models, status, status_table
from mars_ray.serve.ingress.app import build_api


@pytest.fixture(scope="module")
def url(job, text_engine) -> Iterator[str]:
    second = ServedModel(checkpoint=job.checkpoint, model_name="second", default_mode=ExactMode())
    two = job.model_copy(update={"more_models": (second,)})
    with served(build_api(two, {"tiny": text_engine, "second": text_engine})) as url:
        yield url


def said(url: str, *lines: str) -> str:
    """What the terminal shows after these lines, typed one after the other."""
    typed = iter(lines)
    console = Console(file=io.StringIO(), width=200)

    def read(_prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    console.input = read  # type: ignore[method-assign]
    chat(url, None, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_conversation(url):
    """An answer, its figures, and a setting that changes them."""
    typed = ("count", "/mode confidence", "/threshold 0", "/new", "go on")
    shown = said(url, *typed, "/quit", "never said")
    assert "tiny at http" in shown
    assert "verified at 1" in shown
    assert "settings: {'temperature': 0, 'mode': 'confidence', 'threshold': 0.0}" in shown
    assert "confidence at 0" in shown
    assert "never said" not in shown


def test_an_answer_beside_that_of_exact(url):
    """The same words from the same seed, though both are sampled; what was asked only to compare is
    not remembered, and answers that were decoded alike have a mean."""
    typed = ("/temperature default", "/compare", "count", "/compare", "/new", "/compare", "count")
    shown = said(url, *typed)
    assert "settings: the service's own" in shown
    assert shown.count("ask something first") == 2
    assert "times the tokens a second of exact, the same text" in shown
    rows = [line.split() for line in shown.splitlines() if "█" in line]
    assert [row[:-3] for row in rows] == [["verified", "at", "1"], ["exact"]]
    assert rows[1][-2] == "1.00"
    assert shown.count("over 2 answers") == 1


def test_tokens_that_came_together_are_underlined_together():
    """Two groups in a row have two colours; one token alone is plain."""
    pieces = [("one", 1), (" two three", 2), (" four five", 2), (" six", 1)]
    chunks = [
        {"choices": [{"delta": {"content": text}, "mars": {"tokens": count}}]}
        for text, count in pieces
    ]
    mars = {"tokens_per_forward": 1.5, "mode": "exact", "threshold": None, "adapter": None}
    chunks += [{"choices": [{"delta": {}}]}, {"choices": [], "usage": {"mars": mars}}]
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    answered = _read(iter(chunks), [], console)
    assert answered
    assert (answered.text, answered.how) == ("one two three four five six", "exact")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.startswith("one\x1b[4;32m two three\x1b[0m\x1b[4;36m four five\x1b[0m six")


def test_thoughts_are_shown_apart_from_the_answer():
    """Guards a terminal that stays empty while the model thinks, and thoughts taken for words."""
    console = Console(file=io.StringIO(), width=80)
    deltas = [{"role": "assistant", "reasoning": "hm, "}, {"reasoning": "so"}, {"content": "yes"}]
    chunks = [{"choices": [{"delta": delta, "mars": {"tokens": 1}}]} for delta in deltas]
    usage = {"completion_tokens": 3, "mars": {"tokens_per_forward": 1.0}}
    answered = _read(iter([*chunks, {"choices": [], "usage": usage}]), [], console)
    assert answered
    assert answered.text == "yes"
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "hm, so\n\nyes\n"


def test_another_model_is_asked(url):
    """With its own default mode; a name that is none changes nothing."""
    shown = said(url, "/model second", "count", "/model third", "/model")
    assert "asking second; there are tiny, second" in shown
    assert shown.count("asking second") == 3
    assert "a forward, exact" in shown


def test_what_is_wrong_is_said_and_the_conversation_goes_on(url):
    """Guards a traceback in the user's face."""
    shown = said(url, "/nonsense", "/mode nonsense", "count", "/mode default", "count")
    assert "Ctrl-D" in shown
    assert "Input should be" in shown
    assert "verified at 1" in shown


def test_messages_are_remembered(url):
    """The next question is asked with what was said before; a refused one is forgotten."""
    conversation = Conversation(url, "tiny", settings={"max_tokens": 5, "temperature": 0})
    answer = "".join(
        choice["delta"].get("content", "")
        for chunk in conversation.ask("one")
        for choice in chunk["choices"]
    )
    assert conversation.messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": answer},
    ]
    conversation.settings["threshold"] = 2
    with pytest.raises(EngineError, match="threshold"):
        list(conversation.ask("two"))
    assert len(conversation.messages) == 2


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_is_lost_within_the_answer_is_told(reset):
    """Closed or reset, as by a service that is killed; guards a traceback in the user's face."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard = threading.Event()

        def half_an_answer() -> None:
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            event = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))
            heard.wait(10)
            if reset:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()

        thread = threading.Thread(target=half_an_answer)
        thread.start()
        conversation = Conversation(f"http://127.0.0.1:{listening.getsockname()[1]}", "tiny")
        chunks = conversation.ask("one")
        assert next(chunks)["choices"][0]["delta"]["content"] == "hi"
        heard.set()
        with pytest.raises(EngineError):
            next(chunks)
        thread.join()
    assert conversation.messages[-1] == {"role": "assistant", "content": "hi"}


def test_the_state_of_a_service_is_a_table(url):
    """A line a model, also of one that has answered nothing yet."""
    states = status(f"{url}/v1/", None)
    assert [state["id"] for state in states] == ["tiny", "second"]
    console = Console(file=io.StringIO(), width=200)
    console.print(status_table(states))
    assert isinstance(console.file, io.StringIO)
    head, *lines = console.file.getvalue().splitlines()
    assert head.split()[:2] == ["model", "mode"]
    assert head.split()[2:4] == ["threshold", "set-point"]
    assert [line.split()[0] for line in lines] == ["tiny", "second"]


def test_no_service_is_told_so():
    """With the address that was tried."""
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9.* cannot be reached"):
        models("http://127.0.0.1:9", None)
