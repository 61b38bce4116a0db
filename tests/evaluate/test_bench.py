"""`mars-ray bench`: our modes beside transformers, small everything. No times are judged here."""

import io
import json

import pytest
from rich.console import Console
from serve.bigram import write_base, write_perfect
from typer.testing import CliRunner

from mars_ray.cli import app
from mars_ray.errors import ConfigError
from mars_ray.evaluate import bench
from mars_ray.evaluate.bench import most_ratio, timed

SMALL = ("batch_sizes=[2]", "prompts=4", "max_new_tokens=16", "rounds=2")
ENGINE = ("engine.max_context=256", "engine.threads=1", "engine.dtype=float32")
# Window control would buy as many masks as this machine is fast.
FIXED = "engine.window_control=false"


@pytest.mark.slow
def test_a_draft_adapter_is_measured_on_prompts_of_files(tmp_path):
    """Guards an adapter that never reaches the engine, and a result that programs cannot read."""
    base = write_base(tmp_path / "base")
    adapter = write_perfect(base, tmp_path / "perfect")
    prompts = tmp_path / "letters.jsonl"
    prompts.write_text("".join(f'{{"prompt": "letters {n}"}}\n' for n in range(4)))
    task = f"task={{kinds={{letters={{type='files', paths=['{prompts}']}}}}}}"
    output = tmp_path / "new" / "result.json"
    words = ["bench", str(base), *SMALL, *ENGINE, FIXED, task, "--output", str(output)]
    words.append(f"engine.draft_adapter={adapter}")
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(output.read_text()) == result
    assert result["adapter"] == "perfect"
    exact, verified, theirs = result["cases"]
    assert [case["label"] for case in result["cases"]] == ["exact", "verified 1", "transformers"]
    for case in result["cases"]:
        assert case["tokens"] == 4 * 16
        assert case["same_output"] == 1
        assert len(case["seconds"]) == 2
    assert exact["tokens_per_forward"] == 1
    assert verified["tokens_per_forward"] > 1.5
    assert "tokens_per_forward" not in theirs


def test_prompts_that_have_no_room_are_refused_before_the_first_round(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base")
    monkeypatch.setattr(bench, "mars_answer", None)
    words = ["bench", str(base), "modes=['exact']", "transformers=false", "prompts=1"]
    words += ["max_new_tokens=60", "engine.max_context=64", "engine.threads=1"]
    with pytest.raises(ConfigError, match=r"engine\.max_context 64 is too small: the longest"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_no_ratio_that_cannot_be():
    """Guards figures that say nothing: of one round, and of a round in which something else had the
    processor."""
    plain = {"tokens": [[1, 2, 3, 4]], "seconds": 4.0, "forwards": 4, "steps": 4}
    fast = plain | {"seconds": 1.0, "forwards": 2, "steps": 2}
    most = most_ratio(fast, plain)
    assert most == 2
    found = timed([fast] * 2, [plain] * 2, most)
    assert found["fault"].startswith("the rounds say 4.00 times exact")
    assert found["speed_up"] is None
    assert timed([fast] * 2, [plain] * 2, 4.5)["speed_up"] == 4
    assert timed([fast], [plain], 4.5)["fault"] == "one round tells no ratio"


def test_a_table_has_a_line_for_each(capsys):
    case = {"label": "exact", "temperature": 0.0, "batch": 1, "fault": "one round tells no ratio"}
    console = Console(file=io.StringIO(), width=120)
    bench.print_cases("decoding", [case | {"same_output": 1.0}], console)
    assert isinstance(console.file, io.StringIO)
    assert "1 of 1 without a ratio: one round tells no ratio" in console.file.getvalue()
