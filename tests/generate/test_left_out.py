"""What a generation leaves out: said by reason and line."""

import io
import json
from pathlib import Path

from generate.engines import make_job, run
from rich.console import Console

from mars_ray.config.decode import EngineConfig


def test_all_that_is_left_out_is_said(model: Path, tmp_path: Path):
    """Guards a file of prompts that comes back shorter, and nobody knows why."""
    prompts, evaluation = tmp_path / "prompts.jsonl", tmp_path / "evaluation.jsonl"
    rows = ["How many?", "word " * 300, "", "Ask me not.", "And you?"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows) + "{no\n")
    evaluation.write_text('{"prompt": "ask me not"}\n')
    output, said = tmp_path / "own.jsonl", Console(file=io.StringIO(), width=300)
    job = make_job(
        model,
        output,
        prompts=[{"type": "files", "paths": [str(prompts)]}],
        exclude=(str(evaluation),),
        max_bad_share=0.5,
        engine=EngineConfig(max_batch=2, max_context=200),
    )
    result = run(job, said)
    assert result.conversations == 2
    assert result.left_out == 1, "of the prompts that could be asked"
    table = json.loads(output.with_suffix(".json").read_text())
    places = {reason.partition(":")[0]: origins for reason, origins in table["left_out"].items()}
    bad = [o for reason, origins in table["left_out"].items() if "bad" in reason for o in origins]
    assert places["too long"] == [f"{prompts}:2"]
    assert places["excluded"] == [f"{prompts}:4"]
    assert bad == [f"{prompts}:3", f"{prompts}:6"]
    assert result.left_out_why == {reason: len(at) for reason, at in table["left_out"].items()}
    printed = said.file.getvalue()
    assert f"left out: 1, too long: no room for {job.max_new_tokens} new tokens" in printed
    assert f"left out: 1, bad row: the prompt is empty ({prompts}:3)" in printed


def test_cut_answers_are_left_out_by_name(model: Path, tmp_path: Path):
    job = make_job(model, tmp_path / "own.jsonl", keep_cut=False, max_new_tokens=1)
    result = run(job, Console(quiet=True))
    assert result.left_out_why == {"the answer was cut off by max_new_tokens": result.left_out}
