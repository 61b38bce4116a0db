"""`benchmarks/replies.py`: what of a stream depends on time is taken away, and nothing else."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from lib.reply_requests import cases
from replies import compare, joined


def event(index: int, reason: str | None = None, **delta: object) -> str:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]}, separators=(',', ':'))}\n\n"


def call(arguments: str, **more: object) -> dict[str, object]:
    return {"index": 0, **more, "function": {"arguments": arguments}}


def test_chunks_are_joined_however_they_were_cut():
    """Texts and arguments of each choice for itself; a finish stays a chunk of its own."""
    first = [event(0, role="assistant", content="He"), event(0, content="llo"), event(0, "stop")]
    second = [
        event(1, role="assistant"),
        event(1, tool_calls=[call("{", id="x")]),
        event(1, tool_calls=[call("}")]),
        event(1, "stop"),
    ]
    done = "data: [DONE]\n\n"
    cut = "".join(sum(zip(second, [*first, ""], strict=True), ())) + done
    assert joined(cut, by_step=True) == "".join([*first, *second, done])
    first[:2] = [event(0, role="assistant", content="Hello")]
    second[1:3] = [event(1, tool_calls=[call("{}", id="x")])]
    assert joined(cut, by_step=False) == "".join([*first, *second, done])


def test_what_is_no_chunk_is_kept_as_it_is():
    """Guards other bytes of the same JSON, and an error, made equal."""
    odd = event(0, content="a").replace('":', '": ') + 'data: {"error":{}}\n\n'
    assert joined(odd + "rest", by_step=False) == odd + "rest"


def test_differences_are_counted_and_told(tmp_path):
    """By kind, with the place; the requests themselves are always the same ones."""
    line = {
        "name": "a",
        "kind": "errors",
        "request": "",
        "status": 400,
        "headers": {},
        "body": "x1",
    }
    for name, body in (("before", "x1"), ("after", "x2")):
        lines = [{"provenance": {"commit": name}}, line | {"body": body}, line | {"name": "b"}]
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert not compare(tmp_path / "before", tmp_path / "after", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["requests"], result["equal"], result["different"]) == (2, 1, 1)
    assert result["kinds"] == {"errors": {"requests": 2, "different": 1}}
    assert result["differences"][0]["differs"] == {"body": ["x1", "x2"]}
    assert result["after"] == {"commit": "after"}
    assert compare(tmp_path / "before", tmp_path / "before", tmp_path / "result.json")
    assert cases() == cases()
    assert len(cases()) > 200
