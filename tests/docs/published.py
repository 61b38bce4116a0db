"""Small files in the forms, and at the places, in which others publish theirs."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from mars_ray.data.corpus import problems

_GSM8K = "openai/grade-school-math/master/grade_school_math/data"
_AZURE = "Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_code.csv"
_MOONCAKE = "kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl"
_SERVEGEN = "alibaba/ServeGen"
# Where the jobs begin, by ServeGen's directory.
_BEGINS_S = {
    "reason/deepseek-r1": (36_000, 75_600),
    "language/m-small": (172_800, 252_000),
    "language/m-mid": (198_000,),
}
# Requests of the other traces are for two minutes.
_LENGTH_S = 120


def publish(directory: Path) -> dict[str, str]:
    """What stands for the addresses in the documentation, by address; curl and git read both."""
    raw, repositories = directory / "raw", directory / "repositories"
    rows = {"train": 200, "test": 16}
    for split, count in rows.items():
        made = (
            {"question": item.question, "answer": item.solution}
            for item in problems("train" if split == "train" else "test", count, 0)
        )
        _write(raw / _GSM8K / f"{split}.jsonl", map(json.dumps, made))
    azure = (f"2023-11-16 18:{s // 60:02}:{s % 60:02}.0000000,900,30" for s in range(_LENGTH_S))
    _write(raw / _AZURE, ["TIMESTAMP,ContextTokens,GeneratedTokens", *azure])
    mooncake = (
        {"timestamp": 1000 * s, "input_length": 900, "output_length": 30, "hash_ids": [0, s]}
        for s in range(0, _LENGTH_S, 3)
    )
    _write(raw / _MOONCAKE, map(json.dumps, mooncake))
    _commit_servegen(repositories / _SERVEGEN)
    return {
        "https://raw.githubusercontent.com": f"file://{raw}",
        "https://github.com": f"file://{repositories}",
    }


def _commit_servegen(repository: Path) -> None:
    counts = {"input_tokens": "{900: 1.0}", "output_tokens": "{30: 1.0}", "reason_ratio": "{}"}
    for name, begins_s in _BEGINS_S.items():
        data = repository / "data" / name
        _write(data / "chunk-0-dataset.json", [json.dumps({str(begins_s[0]): counts})])
        rates = [f"{begin_s},1.0,1.0,Gamma,1,1" for begin_s in begins_s]
        _write(data / "chunk-0-trace.csv", ["0,0,0,,0,0", *rates])
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "data"]):
        subprocess.run(["git", "-C", str(repository), *who, *words], check=True)


def _write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
