"""lm-eval's GSM8K against the live service, by the command of docs/how-to/measure.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fastapi.testclient import TestClient
from serve.asking import ask, load_server, text_of
from serve.real_port import served
from transformers import AutoTokenizer

from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import Gsm8kTask
from mars_ray.config.serve import Limits
from mars_ray.evaluate.tasks import FINAL_ANSWER, gsm8k_problems, is_correct
from mars_ray.model.load import load_model
from mars_ray.serve.ingress.app import build_api

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PROBLEMS = 3


def evaluate(directory: Path, *options: str) -> tuple[dict, list[dict]]:
    """Results and samples, sorted by problem."""
    command = [
        *(str(Path(sys.executable).parent / "lm-eval"), "run", *options),
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
        results, samples = evaluate(
            tmp_path,
            *("--model", "local-chat-completions", "--apply_chat_template"),
            *("--model_args", f"base_url={url}/v1/chat/completions,model=tiny,num_concurrent=2"),
            *("--include_path", str(ROOT / "jobs" / "lm-eval"), "--tasks", "mars_gsm8k"),
            *("--gen_kwargs", "max_gen_toks=24", "--limit", str(PROBLEMS)),
        )
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


CHOICES = """
task: counting
dataset_path: json
dataset_kwargs:
  data_files:
    test: counting.jsonl
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
COUNTED = [
    {"question": "one two", "choices": [" three", " six", " nine"], "answer": 0},
    {"question": "seven eight", "choices": [" one", " nine"], "answer": 1},
    {"question": "four", "choices": [" five", " two seven ten"], "answer": 0},
]


@pytest.mark.long
def test_lm_eval_scores_choices_as_the_model_does(job, checkpoint, tmp_path):
    """Multiple-choice tasks, which ask for the log-probabilities of the prompt (`echo`)."""
    (tmp_path / "counting.yaml").write_text(CHOICES)
    lines = (json.dumps(row) + "\n" for row in COUNTED)
    (tmp_path / "counting.jsonl").write_text("".join(lines))
    text_engine = load_server(job)
    text_engine.start()
    with served(build_api(job, {"tiny": text_engine})) as url:
        arguments = f"base_url={url}/v1/completions,model=tiny,tokenizer={checkpoint}"
        results, samples = evaluate(
            tmp_path,
            *("--model", "local-completions", "--model_args", arguments),
            *("--include_path", str(tmp_path), "--tasks", "counting"),
        )
    text_engine.stop()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load_model(checkpoint, dtype=torch.float32)
    right = 0
    for row, sample in zip(COUNTED, samples, strict=True):
        scores = []
        for choice in row["choices"]:
            before = len(tokenizer.encode(row["question"]))
            ids = torch.tensor([tokenizer.encode(row["question"] + choice)])
            with torch.inference_mode():
                log_p_LV = model(ids).logits[0].float().log_softmax(dim=-1)
            places = range(before - 1, ids.shape[1] - 1)
            scores.append(sum(float(log_p_LV[place, ids[0, place + 1]]) for place in places))
        said = [float(response[0][0]) for response in sample["resps"]]
        assert said == pytest.approx(scores, abs=1e-2)
        right += scores.index(max(scores)) == row["answer"]
    assert results["results"]["counting"]["acc,none"] == pytest.approx(right / len(COUNTED))
