"""Compares the replies of two commits byte for byte.

    PYTHONPATH=TREE python benchmarks/replies.py record MODEL OUTPUT.jsonl
    python benchmarks/replies.py compare BEFORE.jsonl AFTER.jsonl OUTPUT.json

`record` starts the service of the tree that PYTHONPATH names, else the installed one, on loopback
with a small checkpoint directory MODEL. It sends the requests of `reply_requests.py` one after the
other, and writes a line of JSON for each: the request, the status, the headers and the body. Of the
tree it uses only the command `mars-ray serve`, so that trees of any age can be recorded. MODEL must
have a context of 1024 tokens, and masks (`mars.json`) for the modes that need them. Takes about two
minutes on two CPU cores.

`compare` counts the requests whose replies are equal, lists the others with their first difference,
writes the result with its provenance, and exits with status 1 if any differ. Two recordings of one
commit show first that nothing is random: requests are greedy or have a seed, the engine has window
control and prefix cache off, and in bodies these are made equal:

- ids of requests and times of their creation
- the live figures of `/v1/mars/status` (rates and sizes), and all of `/metrics` but its type
- the chunks of a stream in which the service may send several steps together: those of one choice
  are joined, and choices follow one another. Streams with `return_forwards` have a chunk for each
  step, and are compared chunk by chunk within each choice.
"""

import argparse
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from reply_requests import BODY_BYTES, BODY_S, KEYS, Case, cases

_START_S, _STOP_S, _ANSWER_S = 300.0, 40.0, 120.0
_VOLATILE_HEADERS = ("date", "content-length", "x-request-id")
_ID = re.compile(r"(chatcmpl|cmpl|detok|tok)-[0-9a-f]{32}")
_CREATED = re.compile(r'("created": ?)\d+')
_LIVE = re.compile(
    r'("(?:tokens_per_second|tokens_per_forward|disagreement|kv_cache_usage|cache_bytes'
    r'|cache_tokens)":)(?:null|[\d.e+-]+)'
)
_SHOWN = 5  # differences on the terminal
_AROUND = 80  # characters shown on each side of a difference


def main() -> None:
    """Records, or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record", help="ask a service everything, and keep its replies")
    command.add_argument("model", type=Path)
    command.add_argument("output", type=Path)
    command = commands.add_parser("compare", help="two recordings")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.add_argument("output", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.model, asked.output)
    elif not compare(asked.before, asked.after, asked.output):
        sys.exit(1)


def record(model: Path, output: Path) -> None:
    """Write the replies to all cases, after a line of provenance; all of them or no file."""
    draft = output.with_suffix(".draft")
    asked = cases()
    with draft.open("w") as lines, _service(model.resolve()) as port:
        lines.write(json.dumps({"provenance": _provenance()}) + "\n")
        for number, case in enumerate(asked, start=1):
            lines.write(json.dumps(_replied(case, port), ensure_ascii=False) + "\n")
            lines.flush()
            if number % 50 == 0 or number == len(asked):
                print(f"{number} of {len(asked)} requests answered", flush=True)
    draft.replace(output)


def _provenance() -> dict[str, Any]:
    """The provenance that the recorded tree reports of itself."""
    code = (
        "import json; from mars_ray.provenance import provenance; print(json.dumps(provenance()))"
    )
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.check_output([sys.executable, "-c", code], cwd=folder, env=_environment())
    return json.loads(said)


def _environment() -> dict[str, str]:
    """The environment of the recorded tree's processes. They run in an empty directory, because
    Python would prefer a tree that it is started in to that of PYTHONPATH."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    return os.environ | own | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def _service(model: Path) -> Iterator[int]:
    """The port of a service with two models of one checkpoint, which requires API keys."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "keys.toml").write_text(KEYS)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        job, log = folder / "job.toml", folder / "log"
        job.write_text(tomli_w.dumps(_job(str(model), str(folder / "keys.toml"), port)))
        process = subprocess.Popen(
            [sys.executable, "-m", "mars_ray", "serve", str(job)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(),
            # A session of its own, so that its children can be ended with it.
            start_new_session=True,
        )
        try:
            _wait(process, port, log)
            yield port
        finally:
            _end(process)


def _job(model: str, keys: str, port: int) -> dict[str, Any]:
    """A serve job independent of the machine's speed: no window control, no prefix cache."""
    engine = {
        "max_batch": 8,
        "max_context": 1024,
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
        "window_control": False,
        "prefix_cache": False,
    }
    own = {"checkpoint": model, "replicas": 1, "cpus_per_replica": 0.5, "stream_interval_s": 0}
    own["engine"] = engine
    return own | {
        "kind": "serve",
        "model_name": "first",
        "port": port,
        "keys_file": keys,
        "request_log": os.devnull,
        "drain_s": 1,
        "limits": {"body_bytes": BODY_BYTES, "body_s": BODY_S, "new_tokens": 300},
        "more_models": [own | {"model_name": "second", "default_mode": {"type": "exact"}}],
    }


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the service is ready. Raises RuntimeError with the end of its log if it fails."""
    begin = time.monotonic()
    url = f"http://127.0.0.1:{port}/readyz"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < begin + _START_S and process.poll() is None:
        with suppress(OSError), direct.open(url, timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the service did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _replied(case: Case, port: int) -> dict[str, Any]:
    """Send a case; its line of the recording."""
    status, headers, body = _answer(case, port)
    text = body.decode("utf-8", "backslashreplace")
    is_stream = headers.get("content-type", "").startswith("text/event-stream")
    if is_stream:
        text = joined(text, by_step=case.by_step)
    elif case.path == "/metrics" and status == 200:
        text = ""
    elif case.path == "/v1/mars/status":
        text = _LIVE.sub(r"\g<1>0", text)
    return {
        "name": case.name,
        "kind": case.kind if status and status < 400 else "errors",
        "request": case.shown(),
        "status": status,
        "headers": {name: _ID.sub(r"\1-ID", value) for name, value in sorted(headers.items())},
        "body": _CREATED.sub(r"\g<1>0", _ID.sub(r"\1-ID", text)),
    }


def _answer(case: Case, port: int) -> tuple[int | None, dict[str, str], bytes]:
    """Status, headers and body; the status is None if the service closes without a reply."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S)) as link:
        link.sendall(case.raw)
        reply = http.client.HTTPResponse(link, method=case.method)
        try:
            reply.begin()
            body = reply.read()
        except (ConnectionResetError, http.client.RemoteDisconnected, http.client.BadStatusLine):
            return None, {}, b""
        headers = {name.lower(): value for name, value in reply.getheaders()}
    kept = {name: value for name, value in headers.items() if name not in _VOLATILE_HEADERS}
    return reply.status, kept, body


def joined(stream: str, *, by_step: bool) -> str:
    """A stream's events without their dependence on time: choice by choice, with the chunks of a
    choice joined unless `by_step`. Events of another form are kept."""
    *events, rest = stream.split("\n\n")
    chunks: list[Any] = []  # texts as received, or chunks that serialize to the same bytes
    for event in events:
        chunk = _chunk(event)
        last = next((c for c in reversed(chunks) if _choice(c) == _choice(chunk)), None)
        if by_step or chunk is event or last is None or not _join(last, chunk):
            chunks.append(chunk)
    # Events of no choice come last, in their order.
    ordered = sorted(chunks, key=_choice)
    return "".join(f"{_written(chunk)}\n\n" for chunk in ordered) + rest


def _written(chunk: Any) -> str:
    if isinstance(chunk, str):
        return chunk
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}"


def _chunk(event: str) -> Any:
    """A chunk of one choice, if serializing it gives the same bytes; else the text itself."""
    with suppress(ValueError, KeyError, TypeError):
        chunk = json.loads(event.removeprefix("data: "))
        if len(chunk["choices"]) == 1 and _written(chunk) == event:
            return chunk
    return event


def _choice(chunk: Any) -> float:
    return math.inf if isinstance(chunk, str) else chunk["choices"][0]["index"]


def _join(last: dict[str, Any], chunk: dict[str, Any]) -> bool:
    """Append the chunk to the last one if it only continues its text, tokens or arguments; returns
    whether it does."""
    first, second = last["choices"][0], chunk["choices"][0]
    if first["finish_reason"] or second["finish_reason"]:
        return False
    if "text" in first:
        first["text"] += second["text"]
    else:
        before, more = first["delta"], second["delta"]
        if before.get("tool_calls") or more.get("tool_calls"):
            if not before.get("tool_calls") or not _is_rest(before, more):
                return False
            before["tool_calls"][0]["function"]["arguments"] += more["tool_calls"][0]["function"][
                "arguments"
            ]
        elif "content" in more:
            before["content"] = before.get("content", "") + more["content"]
    if first["logprobs"] and second["logprobs"]:
        for name, value in second["logprobs"].items():
            if value:
                first["logprobs"][name] += value
    return True


def _is_rest(before: dict[str, Any], more: dict[str, Any]) -> bool:
    """Whether `more` holds only further arguments of the same call."""
    if more.keys() != {"tool_calls"} or len(more["tool_calls"]) != 1:
        return False
    (added,) = more["tool_calls"]
    same = added["index"] == before["tool_calls"][0]["index"]
    return (
        same and added.keys() == {"index", "function"} and set(added["function"]) == {"arguments"}
    )


def compare(before: Path, after: Path, output: Path) -> bool:
    """Print and write the comparison; returns whether all replies are equal."""
    from mars_ray.provenance import provenance

    (one, first), (two, second) = _read(before), _read(after)
    differences = [
        {"name": name, "kind": (first.get(name) or second[name])["kind"], "differs": differs}
        for name in dict.fromkeys([*first, *second])
        if (differs := _difference(first.get(name), second.get(name)))
    ]
    kinds = Counter(line["kind"] for line in first.values())
    unlike = Counter(difference["kind"] for difference in differences)
    result = {
        "requests": len(first),
        "equal": len(first) - sum(difference["name"] in first for difference in differences),
        "different": len(differences),
        "kinds": {
            kind: {"requests": count, "different": unlike[kind]} for kind, count in kinds.items()
        },
        "differences": differences,
        "before": one,
        "after": two,
        "provenance": provenance(),
    }
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for difference in differences[:_SHOWN]:
        print(json.dumps(difference, indent=1, ensure_ascii=False))
    print(
        f"{result['requests']} requests: {result['equal']} equal, {result['different']} different"
    )
    for kind, counts in result["kinds"].items():
        print(f"  {kind}: {counts['requests']}, of which {counts['different']} different")
    return not differences


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The provenance of a recording, and its lines by name."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    return head["provenance"], {line["name"]: line for line in lines}


def _difference(one: dict[str, Any] | None, two: dict[str, Any] | None) -> dict[str, Any] | None:
    """The parts that differ, on both sides; None if all are the same."""
    if one is None or two is None:
        return {"recorded": [one is not None, two is not None]}
    differs: dict[str, Any] = {
        part: [one[part], two[part]]
        for part in ("request", "status", "headers")
        if one[part] != two[part]
    }
    if one["body"] != two["body"]:
        texts = one["body"], two["body"]
        pairs = zip(*texts, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, texts)))
        differs["body"] = [text[max(0, at - _AROUND) : at + _AROUND] for text in texts]
    return differs or None


if __name__ == "__main__":
    main()
