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
# The jobs begin there; requests of the others are for two minutes.
_BEGIN_S = {"reason/deepseek-r1": (36_000, 72_000), "language/m-small": (50_000,)}
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
    for name, begins in _BEGIN_S.items():
        windows = [600 * (begin // 600) for begin in begins]
        lengths = {str(window): counts for window in windows}
        rates = [f"{window},1.0,1.0,Gamma,1,1" for window in windows]
        _write(repository / "data" / name / "chunk-0-dataset.json", [json.dumps(lengths)])
        _write(repository / "data" / name / "chunk-0-trace.csv", ["0,0,0,,0,0", *rates])
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "data"]):
        subprocess.run(["git", "-C", str(repository), *who, *words], check=True)


def _write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
