"""Traces: files, published ones, clients, made-up ones."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from servegen import merge

from mars_ray.errors import DataError
from mars_ray.simulator.config import (
    AzureTrace,
    FileTrace,
    FlashTrace,
    MooncakeTrace,
    RampTrace,
    ServeGenTrace,
    SineTrace,
)
from mars_ray.simulator.traces.load import Window, load_trace, window_arrivals

DATA = Path(__file__).parents[3] / "shared" / "data"
HEAD = "arrival_s,prompt_tokens,output_tokens"


def load(tmp_path: Path, name: str, text: str, **changes):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return load_trace(FileTrace(path=str(path), **changes), seed=0)


def test_csv_and_jsonl_say_the_same(tmp_path):
    """Optional columns may be missing or empty; gzip makes no difference."""
    rows = [(0.0, 10, 5, "", 0.9), (1.5, 20, 1, 2.0, "")]
    table = f"{HEAD},deadline_s,pinned_threshold\n" + "".join(
        ",".join(map(str, row)) + "\n" for row in rows
    )
    keys = [*HEAD.split(","), "deadline_s", "pinned_threshold"]
    lines = "".join(
        json.dumps({k: v for k, v in zip(keys, row, strict=True) if v != ""}) + "\n" for row in rows
    )
    one, two = load(tmp_path, "a.csv", table), load(tmp_path, "a.jsonl.gz", lines)
    for trace in (one, two):
        assert trace.arrival_s.tolist() == [0.0, 1.5]
        assert trace.prompt_tokens.tolist() == [10, 20]
        assert trace.deadline_s.tolist() == [np.inf, 2.0]
        assert trace.pinned_threshold.tolist() == [0.9, 0.0]
        assert trace.priority.tolist() == [0, 0]


def test_a_trace_may_begin_whenever_it_likes(tmp_path):
    """Guards 50 years before the first request of a trace in Unix time."""
    rows = [(0.0, 5, 6), (1.5, 7, 8), (9.0, 1, 2)]
    ones = "".join(f"{at},{prompt},{output}\n" for at, prompt, output in rows)
    others = "".join(f"{at + 1.7e9},{prompt},{output}\n" for at, prompt, output in rows)
    one = load(tmp_path, "one.csv", f"{HEAD}\n{ones}")
    other = load(tmp_path, "other.csv", f"{HEAD}\n{others}")
    assert one.arrival_s.tolist() == other.arrival_s.tolist() == [0.0, 1.5, 9.0]


def test_a_trace_thinned_to_nothing_is_refused(tmp_path):
    """Guards the traceback of whoever divides by its requests."""
    path = tmp_path / "one.csv"
    path.write_text(f"{HEAD}\n1,1,1\n")
    with pytest.raises(DataError, match="of 1 requests"):
        load_trace(FileTrace(path=str(path), rate_factor=1e-9), seed=0)
    source = servegen_files(tmp_path).model_copy(update={"rate_factor": 1e-9})
    with pytest.raises(DataError, match="no request at rate_factor"):
        load_trace(source, seed=0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,1,1", "could not convert"),
        ("nan,1,1", "arrives at nan"),
        ("-1,1,1", "arrives at -1"),
        ("5,0,1", "must be 1 to"),
        ("5,1,10000000000", "must be 1 to"),
        ("5,1,1.5", "invalid literal"),
        ("5,1", "not as many fields"),
        ("5,1,1,1", "not as many fields"),
        ("0.5,1,1", "arrives before the row above"),
        (",1,1", "no 'arrival_s'"),
    ],
)
def test_a_malformed_row_is_refused_by_line(tmp_path, row, reason):
    """Guards a trace with holes, which would be another load."""
    with pytest.raises(DataError, match=reason) as caught:
        load(tmp_path, "bad.csv", f"{HEAD}\n1,1,1\n{row}\n9,1,1\n")
    assert "bad.csv:3: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"arrival_s": 1}\n', ":1: .*no 'prompt_tokens'"),
        ("a.jsonl", "[1]\n", ":1: not a JSON object"),
        ("a.jsonl", "{\n", ":1: no JSON"),
        ("a.csv", f"{HEAD},tokens\n1,1,1,1\n", ":2: .*unknown column 'tokens'"),
        ("a.csv", f"{HEAD},pinned_threshold\n1,1,1,2\n", r"is not in \[0, 1\]"),
        ("a.csv", f"{HEAD}\n", "no requests"),
        (
            "a.jsonl",
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1.5}',
            "1.5 is no whole",
        ),
        (
            "a.jsonl",
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1e400}',
            "inf is no whole",
        ),
        ("a.txt", "", "a .csv or .jsonl file"),
    ],
)
def test_other_refusals(tmp_path, name, text, message):
    """Each says what is wrong with the file."""
    with pytest.raises(DataError, match=message):
        load(tmp_path, name, text)


def test_what_editors_and_spreadsheets_add(tmp_path):
    """Guards a trace that is refused for an empty last line, or a mark at its beginning."""
    line = json.dumps({"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1})
    assert len(load(tmp_path, "a.jsonl", f"{line}\n\n{line}\n\n")) == 2
    assert len(load(tmp_path, "a.csv", f"\ufeff{HEAD}\n1,1,1\n")) == 1
    assert len(load(tmp_path, "a.csv.gz", f"\ufeff{HEAD}\n1,1,1\n")) == 1


def test_a_damaged_file_is_one_line(tmp_path):
    """Guards a traceback of zlib, which is no error of files."""
    source = servegen_files(tmp_path)
    damaged = bytearray(gzip.compress(Path(source.rates_path).read_bytes(), mtime=0))
    damaged[10] = 0xFF  # the first byte behind the head
    path = tmp_path / "damaged.csv.gz"
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"damaged\.csv\.gz: cannot be read"):
        load_trace(FileTrace(path=str(path)), 0)
    with pytest.raises(DataError, match=r"damaged\.csv\.gz: cannot be read"):
        load_trace(source.model_copy(update={"rates_path": str(path)}), 0)


def test_a_home_directory_is_one(tmp_path, monkeypatch):
    """As in jobs that train."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = servegen_files(tmp_path)
    (tmp_path / "a.csv").write_text(f"{HEAD}\n1,1,1\n")
    assert len(load_trace(FileTrace(path="~/a.csv"), 0)) == 1
    assert len(load_trace(source.model_copy(update={"rates_path": "~/m_rates.csv"}), 0)) == 1800


def test_a_missing_file_and_an_empty_part(tmp_path):
    """Typed errors instead of tracebacks."""
    with pytest.raises(DataError, match=r"no such file.*capacity-and-cost"):
        load_trace(FileTrace(path=str(tmp_path / "none.csv")), 0)
    with pytest.raises(DataError, match="no request between"):
        load(tmp_path, "a.csv", f"{HEAD}\n1,1,1\n", start_s=5)


def test_a_part_begins_at_zero(tmp_path):
    """What comes before and after is left out."""
    text = f"{HEAD}\n" + "".join(f"{i},{i + 1},1\n" for i in range(1000))
    part = load(tmp_path, "a.csv", text, start_s=100, duration_s=50)
    assert len(part) == 50
    assert part.arrival_s[0] == 0
    assert part.prompt_tokens[0] == 101


def test_a_spread_moves_later_by_at_most_that(tmp_path):
    """And leaves nothing out."""
    text = f"{HEAD}\n" + "".join(f"{i},{i + 1},1\n" for i in range(1000))
    moved = load(tmp_path, "a.csv", text, spread_s=3)
    assert sorted(moved.prompt_tokens) == list(range(1, 1001))
    later = moved.arrival_s - (moved.prompt_tokens - 1)
    assert 0 <= later.min() < 0.1 < 2.9 < later.max() < 3


@pytest.mark.parametrize("source", [RampTrace(), FlashTrace(), SineTrace()])
def test_made_up_traces_keep_their_rates(source):
    """Counts within five standard deviations; the same seed gives the same trace."""
    expected = {"ramp": 360 * 35, "flash": 2 * 1500 + 10 * 300, "sine": 4.5 * 7200}[source.type]
    trace = load_trace(source, seed=1)
    assert abs(len(trace) - expected) < 5 * expected**0.5
    np.testing.assert_array_equal(trace.arrival_s, load_trace(source, seed=1).arrival_s)
    assert len(trace) != len(load_trace(source, seed=2))


@pytest.mark.parametrize("source", [RampTrace(), FlashTrace(), SineTrace()])
def test_a_factor_multiplies_the_rate_of_a_made_up_trace(source):
    """Guards copies, which no Poisson process has: gaps are as long as they are wide."""
    one = load_trace(source, seed=0)
    more = load_trace(source.model_copy(update={"rate_factor": 4.0}), seed=0)
    assert abs(len(more) - 4 * len(one)) < 5 * (20 * len(one)) ** 0.5
    assert len(np.unique(more.arrival_s)) == len(more)
    busiest = np.histogram(more.arrival_s, 100)[0].argmax()
    assert busiest == pytest.approx(np.histogram(one.arrival_s, 100)[0].argmax(), abs=15)


def test_a_flash_crowd_comes_and_goes():
    """Five times as many a second in its time."""
    trace = load_trace(FlashTrace(), seed=0)
    inside = ((trace.arrival_s >= 600) & (trace.arrival_s < 900)).sum() / 300
    assert inside == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("law", "shape"), [("Gamma", 0.3), ("Weibull", 0.5), ("Gamma", 4.0)])
def test_a_clients_window_has_its_rate_and_its_law(law, shape):
    """The number of requests is exact; gaps vary as the law says (squared cv of the gaps)."""
    rng = np.random.default_rng(0)
    window = Window(0, 1200.0, 20.0, law, shape)
    times = window_arrivals(window, 600.0, 1.0, rng)
    assert len(times) == 12_000
    assert 1200 <= times.min() < times.max() <= 1800
    gaps = np.diff(times)
    cv2 = gaps.var() / gaps.mean() ** 2
    assert cv2 == pytest.approx({"Gamma": 1 / shape, "Weibull": 5.0}[law], rel=0.25)


def servegen_files(tmp_path: Path, **row) -> ServeGenTrace:
    rates, lengths = tmp_path / "m_rates.csv", tmp_path / "lengths.jsonl"
    rates.write_text(
        "client_id,window_start_s,rate_rps,cv,pattern,param1,param2\n"
        "0,0,2.0,1,Gamma,1.0,0.5\n1,600,1.0,2,Weibull,0.7,0.1\n"
    )
    counts = {"client_id": 0, "window_s": 0, "input_tokens": {"7": 1.0}, "output_tokens": {"3": 1}}
    lengths.write_text(json.dumps(counts | row) + "\n")
    return ServeGenTrace(rates_path=str(rates), lengths_path=str(lengths), duration_s=1200)


def test_servegen_merges_clients(tmp_path):
    """1,200 requests of the first client, 600 of the second, which has no counts of its own."""
    trace = load_trace(servegen_files(tmp_path), seed=0)
    assert len(trace) == 1800
    assert (trace.arrival_s < 600).sum() == 1200
    assert set(trace.prompt_tokens) == {7}
    assert set(trace.output_tokens) == {3}


def test_servegen_may_begin_within_a_window(tmp_path):
    """Guards minutes of silence before the first request: the window that has begun counts."""
    source = servegen_files(tmp_path).model_copy(update={"start_s": 300.0, "duration_s": 600.0})
    trace = load_trace(source, seed=0)
    # 2 a second for 300 s, then 1 a second by a law that comes in crowds.
    assert (trace.arrival_s < 300).sum() == pytest.approx(600, abs=5 * 600**0.5)
    assert trace.arrival_s[0] < 5
    assert trace.arrival_s[-1] < 600


def test_servegen_refuses_what_it_cannot_use(tmp_path):
    """By file and line."""
    source = servegen_files(tmp_path, input_tokens=[1])
    with pytest.raises(DataError, match=r"lengths.jsonl:1: "):
        load_trace(source, 0)
    source = servegen_files(tmp_path)
    Path(source.rates_path).write_text("client_id,rate_rps\n0,1\n")
    with pytest.raises(DataError, match=r"m_rates.csv:2: "):
        load_trace(source, 0)


def test_servegens_own_files_become_a_trace(tmp_path):
    """Guards a published trace that nobody but us has in the form that is read."""
    source = tmp_path / "m"
    source.mkdir()
    counts = {"input_tokens": "{7: 1.0, 8: 0.0}", "output_tokens": "{3: 1.0}", "reason_ratio": "{}"}
    for client in (0, 10):
        (source / f"chunk-{client}-dataset.json").write_text(json.dumps({"0": counts}))
        (source / f"chunk-{client}-trace.csv").write_text(
            "0,0,0,,0,0\n600,0.5,1.2345678,Gamma,1,1\n"
        )
    rates, lengths = merge(source, tmp_path / "data")
    assert gzip.decompress(rates.read_bytes()).decode().splitlines()[1:] == [
        "0,600,0.5,1.23457,Gamma,1,1",
        "10,600,0.5,1.23457,Gamma,1,1",
    ]
    trace = load_trace(
        ServeGenTrace(rates_path=str(rates), lengths_path=str(lengths), duration_s=1200), seed=0
    )
    assert len(trace) == 600
    assert set(trace.prompt_tokens) == {7}


@pytest.mark.skipif(not DATA.is_dir(), reason="the published traces are not here")
def test_published_traces():
    """Rows, means and spans as their descriptions say."""
    azure = DATA / "trace_azure_llm_2023" / "AzureLLMInferenceTrace_code.csv"
    trace = load_trace(AzureTrace(path=str(azure)), 0)
    assert len(trace) == 8819
    assert trace.duration_s == pytest.approx(3436, abs=1)
    mooncake = DATA / "trace_mooncake_fast25" / "conversation_trace.jsonl.gz"
    trace = load_trace(MooncakeTrace(path=str(mooncake)), 0)
    assert len(trace) == 12031
    # Spread over their slots of 3 s: no two arrive together.
    assert (np.diff(trace.arrival_s) > 0).all()
