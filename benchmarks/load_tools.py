"""Load tools of others against a live service, unchanged: GuideLLM, AIPerf, `vllm bench serve`.

    python benchmarks/load_tools.py models/smollm2 --adapter adapters/smollm2 \
        --guidellm DIR/bin/guidellm --aiperf DIR/bin/aiperf --vllm DIR/bin/python

benchmarks/install_load_tool.sh installs the first two, tools/vllm_cpu_env.sh the third. What each
reports is kept, shortened to its numbers. tests/serve/test_load_tools.py runs them, too.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib.load_servers import Command, mars_command, started

from mars_ray.provenance import provenance

MODEL = "mars"
# The options that say where the tools' reports go.
_OUTPUTS = ("--output", "--artifact-dir", "--save-result")
_TIMEOUT_S = 500.0
# Nothing is looked for on the hub: the tokenizer is in a directory.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# vLLM's command looks for its version under another name than that of its build for CPUs.
_VLLM = """
import importlib.metadata as metadata
def version(name, known=metadata.version):
    try:
        return known(name)
    except metadata.PackageNotFoundError:
        return known(name + "-cpu")
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a tool is to ask of a service."""

    url: str
    tokenizer: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    clients: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a tool says at the end; times are medians."""

    completed: int
    failed: int
    output_tokens: int
    output_tokens_per_s: float
    first_token_ms: float
    per_token_ms: float


def guidellm_words(asked: Asked, output: Path) -> list[str]:
    """GuideLLM's arguments."""
    words = ["run", "--backend", f"kind=openai_http,target={asked.url},model={MODEL}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={asked.tokenizer}"]
    sizes = f"prompt_tokens={asked.prompt_tokens},output_tokens={asked.output_tokens}"
    words += ["--data", f"kind=synthetic_text,{sizes}"]
    words += ["--profile", f"kind=concurrent,streams={asked.clients}"]
    words += ["--constraint", f"kind=max_requests,count={asked.requests}"]
    return [*words, "--output", f"kind=json,path={output}", "--disable-console-interactive"]


def guidellm_report(output: Path) -> Report:
    """The numbers of its report."""
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    good = {name: metrics[name]["successful"] for name in _GUIDELLM.values()}
    return Report(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        output_tokens=round(good["output_token_count"]["total_sum"]),
        output_tokens_per_s=good["output_tokens_per_second"]["mean"],
        first_token_ms=good["time_to_first_token_ms"]["median"],
        per_token_ms=good["inter_token_latency_ms"]["median"],
    )


_GUIDELLM = {
    "tokens": "output_token_count",
    "speed": "output_tokens_per_second",
    "first": "time_to_first_token_ms",
    "each": "inter_token_latency_ms",
}


def aiperf_words(asked: Asked, output: Path) -> list[str]:
    """AIPerf's arguments."""
    words = ["profile", "--model", MODEL, "--url", asked.url, "--endpoint-type", "chat"]
    words += ["--streaming", "--use-server-token-count", "--tokenizer", asked.tokenizer]
    words += ["--synthetic-input-tokens-mean", str(asked.prompt_tokens)]
    words += ["--output-tokens-mean", str(asked.output_tokens), "--extra-inputs", "ignore_eos:true"]
    words += ["--concurrency", str(asked.clients), "--request-count", str(asked.requests)]
    return [*words, "--artifact-dir", str(output.with_suffix("")), "--ui", "none"]


def aiperf_report(output: Path) -> Report:
    """The numbers of its report."""
    told = json.loads((output.with_suffix("") / "profile_export_aiperf.json").read_text())
    return Report(
        completed=round(told["request_count"]["avg"]),
        failed=round((told.get("error_request_count") or {"avg": 0})["avg"]),
        output_tokens=round(told["total_output_tokens"]["avg"]),
        output_tokens_per_s=told["output_token_throughput"]["avg"],
        first_token_ms=told["time_to_first_token"]["p50"],
        per_token_ms=told["inter_token_latency"]["p50"],
    )


def vllm_words(asked: Asked, output: Path) -> list[str]:
    """vLLM's arguments."""
    words = [
        "bench",
        "serve",
        "--base-url",
        asked.url,
        "--model",
        asked.tokenizer,
        "--served-model-name",
        MODEL,
    ]
    words += ["--dataset-name", "random", "--random-input-len", str(asked.prompt_tokens)]
    words += ["--random-output-len", str(asked.output_tokens), "--ignore-eos"]
    words += ["--num-prompts", str(asked.requests), "--max-concurrency", str(asked.clients)]
    words += ["--save-result", "--result-dir", str(output.parent)]
    return [*words, "--result-filename", output.name]


def vllm_report(output: Path) -> Report:
    """The numbers of its report."""
    told = json.loads(output.read_text())
    return Report(
        completed=told["completed"],
        failed=told["failed"],
        output_tokens=told["total_output_tokens"],
        output_tokens_per_s=told["output_throughput"],
        first_token_ms=told["median_ttft_ms"],
        per_token_ms=told["median_tpot_ms"],
    )


@dataclass(frozen=True, slots=True)
class Tool:
    """A load tool: its arguments, how its report is read, and what it is called with."""

    package: str
    words: Callable[[Asked, Path], list[str]]
    report: Callable[[Path], Report]
    environment: dict[str, str]
    before: tuple[str, ...] = ()  # between the program and its arguments


TOOLS = {
    "GuideLLM": Tool("guidellm", guidellm_words, guidellm_report, _OFFLINE),
    # Offline it takes a directory's name for one of the hub.
    "AIPerf": Tool("aiperf", aiperf_words, aiperf_report, {}),
    "vllm bench serve": Tool("vllm", vllm_words, vllm_report, _OFFLINE, ("-c", _VLLM)),
}


def run_tool(tool: Tool, program: str, asked: Asked, directory: Path) -> Report:
    """Run the tool to its end. Raises RuntimeError with what it said if it fails."""
    output = directory / f"{tool.package}.json"
    done = subprocess.run(
        [program, *tool.before, *tool.words(asked, output)],
        cwd=directory,
        env=os.environ | tool.environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise RuntimeError(f"{tool.package} ended with {done.returncode}:\n{said}")
    return tool.report(output)


def main() -> None:
    """Run the tools that are named, one after the other, against one service."""
    arguments = _arguments()
    programs = {
        "GuideLLM": arguments.guidellm,
        "AIPerf": arguments.aiperf,
        "vllm bench serve": arguments.vllm,
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        url = arguments.url or stack.enter_context(started(_service(arguments))).wait()
        asked = Asked(
            url=url,
            tokenizer=str(Path(arguments.checkpoint).absolute()),
            requests=arguments.requests,
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            clients=arguments.clients,
        )
        for name, program in programs.items():
            if program:
                report = run_tool(TOOLS[name], program, asked, Path(directory))
                rows.append({"tool": name, "version": _version(program, TOOLS[name])})
                rows[-1] |= asdict(report)
                print(rows[-1])
    result = {
        "tools": rows,
        "model": Path(arguments.checkpoint).name,
        "adapter": arguments.adapter,
        "requests": arguments.requests,
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
        "clients": arguments.clients,
        "provenance": provenance(),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def shown(tool: Tool, asked: Asked) -> str:
    """The command line as people write it: without where the report goes."""
    words = tool.words(asked, Path("report.json"))
    end = next(number for number, word in enumerate(words) if word in _OUTPUTS)
    return " ".join([tool.package, *words[:end]])


def _service(arguments: argparse.Namespace) -> Command:
    command = mars_command(arguments.checkpoint, arguments.clients, 1)
    command.words.append("engine.max_context=1024")
    if arguments.adapter:
        command.words.append(f"engine.draft_adapter={Path(arguments.adapter).absolute()}")
    return command


def _version(program: str, tool: Tool) -> str:
    """The version of the package in the program's environment."""
    python = Path(program).with_name("python")
    code = f"import importlib.metadata as m; print(m.version({tool.package!r}))"
    if tool.package == "vllm":
        code = "import importlib.metadata as m; print(next(d.version for d in m.distributions() "
        code += "if (d.name or '').startswith('vllm')))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="directory of a model, whose tokenizer the tools use")
    parser.add_argument("--adapter", help="its draft adapter")
    parser.add_argument("--url", help="of a service that runs already, whose model is named mars")
    parser.add_argument("--guidellm", help="the program")
    parser.add_argument("--aiperf", help="the program")
    parser.add_argument("--vllm", help="the Python of vLLM's environment")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/load_tools.json"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
