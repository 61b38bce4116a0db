"""lm-eval's GSM8K against the live service, by the command of docs/serving.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from serve.asking import ask, load_server, text_of
from serve.real_port import served

from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import Gsm8kTask
from mars_ray.config.serve import Limits
from mars_ray.evaluate.tasks import FINAL_ANSWER, gsm8k_problems, is_correct
from mars_ray.serve.ingress.routes import build_api

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PROBLEMS = 3


def evaluate(url: str, directory: Path) -> tuple[dict, list[dict]]:
    """Results and samples, sorted by problem."""
    command = [
        *(str(Path(sys.executable).parent / "lm-eval"), "run"),
        *("--model", "local-chat-completions", "--apply_chat_template"),
        *("--model_args", f"base_url={url}/v1/chat/completions,model=tiny,num_concurrent=2"),
        *("--include_path", str(ROOT / "jobs" / "lm-eval"), "--tasks", "mars_gsm8k"),
        *("--gen_kwargs", "max_gen_toks=24", "--limit", str(PROBLEMS)),
        *("--output_path", "out", "--log_samples"),
    ]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache")}
    done = subprocess.run(
        command, cwd=directory, env=os.environ | quiet, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (directory / "out").rglob("results_*.json")
    (samples,) = (directory / "out").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text()), sorted(rows, key=lambda row: row["doc_id"])


def test_the_task_grades_as_our_own_evaluation():
    """By the same pattern, on the last place where it is found."""
    task = yaml.safe_load((ROOT / "jobs" / "lm-eval" / "mars_gsm8k.yaml").read_text())
    (step, _) = task["filter_list"][0]["filter"]
    assert step["group_select"] == -1
    assert re.findall(step["regex_pattern"], "#### 1\n#### -1,007.5") == ["1", "-1,007.5"]
    assert step["regex_pattern"] == FINAL_ANSWER.pattern


@pytest.mark.long
@pytest.mark.skipif(not (DATA / "gsm8k").exists(), reason="needs GSM8K beside the checkout")
def test_lm_eval_says_what_the_service_says(job, tmp_path):
    """The same answers as asked directly, and the same share of them right."""
    (tmp_path / "data").symlink_to(DATA)
    sizes = EngineConfig(max_batch=2, max_context=1500, device="cpu", threads=1)
    job = job.model_copy(update={"engine": sizes, "limits": Limits()})
    text_engine = load_server(job)
    text_engine.start()
    api = build_api(job, {"tiny": text_engine})
    with served(api) as url:
        results, samples = evaluate(url, tmp_path)
    problems = gsm8k_problems(Gsm8kTask(path=str(DATA / "gsm8k" / "test.jsonl"), count=PROBLEMS))
    client = TestClient(api)
    answers = [
        text_of(ask(client, messages=[{"role": "user", "content": problem.question}]))
        for problem in problems
    ]
    text_engine.stop()
    assert [sample["resps"][0][0] for sample in samples] == answers
    right = [is_correct(*pair) for pair in zip(problems, answers, strict=True)]
    score = results["results"]["mars_gsm8k"]["exact_match,last-number"]
    assert score == sum(right) / PROBLEMS
