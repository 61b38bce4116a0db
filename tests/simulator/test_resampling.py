"""What seeds draw from a recorded trace, what they keep, and prompts that share a beginning."""

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mars_ray.errors import DataError
from mars_ray.simulator.config import AzureTrace, FileTrace, MooncakeTrace, ServeGenTrace
from mars_ray.simulator.traces.load import Window, drawn_clients, from_blocks, load_trace
from mars_ray.simulator.traces.trace import Trace, resampled

HEAD = "arrival_s,prompt_tokens,output_tokens"
DATA = Path(__file__).parents[3] / "shared" / "data"
published = pytest.mark.skipif(not DATA.is_dir(), reason="the published traces are not here")


def file_of(tmp_path: Path, head: str, rows: list[tuple], **changes) -> FileTrace:
    path = tmp_path / "requests.csv"
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]))
    return FileTrace(path=str(path), **changes)


def conversations(tmp_path: Path, **changes) -> FileTrace:
    """200 conversations, one every 10 s, of 1 to 4 turns 20 s apart, each with its own tokens."""
    rows = []
    for session in range(200):
        for turn in range(1 + session % 4):
            rows.append((10 * session + 20 * turn, 1000 * (turn + 1) + session, 50, f"s{session}"))
    return file_of(tmp_path, f"{HEAD},session", sorted(rows), **changes)


def crowds(tmp_path: Path, **changes) -> FileTrace:
    """Fifty crowds in 50 minutes: a request each 0.1 s for 1 to 20 s, then silence."""
    rows = [
        (60 * crowd + 0.1 * i, 100 + crowd, 1 + i)
        for crowd in range(50)
        for i in range(10 + 20 * (7 * crowd % 10))
    ]
    return file_of(tmp_path, HEAD, rows, **changes)


def columns(trace: Trace) -> list[list[float]]:
    return [trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()]


@pytest.mark.parametrize("record", [conversations, crowds])
def test_seed_0_is_the_record_and_others_are_not(tmp_path, record):
    """Guards seeds that differ by nothing, and results of a record that nobody recorded."""
    source = record(tmp_path)
    as_recorded = columns(load_trace(source, 0))
    rows = np.loadtxt(source.path, delimiter=",", skiprows=1, usecols=(0, 1, 2))
    assert as_recorded == rows.T.tolist()
    drawn = [columns(load_trace(source, seed)) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2]
    assert as_recorded != drawn[0] != drawn[1]
    fixed = source.model_copy(update={"resample": False})
    assert columns(load_trace(fixed, 3)) == as_recorded


def test_sessions_are_drawn_whole(tmp_path):
    """A conversation comes with all its turns, 20 s apart, a minute earlier or later at most."""
    source = conversations(tmp_path)
    record, drawn = load_trace(source, 0), load_trace(source, 1)
    assert drawn.duration_s <= record.duration_s
    sessions, session = np.unique(drawn.sessions(), return_inverse=True)
    assert len(sessions) == 200
    who = drawn.prompt_tokens % 1000
    for index in range(len(sessions)):
        mine = np.flatnonzero(session == index)
        assert len(set(who[mine])) == 1
        assert len(mine) == 1 + who[mine[0]] % 4
        np.testing.assert_allclose(np.diff(drawn.arrival_s[mine]), 20)
        assert abs(drawn.arrival_s[mine[0]] - 10 * who[mine[0]]) <= 60
        assert drawn.parent[mine].tolist() == [-1, *mine[:-1].tolist()]
    # With replacement some come twice, and 1/e of them never (0.37 +- 0.02).
    assert len(set(who)) == pytest.approx(200 * (1 - np.exp(-1)), abs=5 * 0.022 * 200)


def test_more_sessions_come_at_moments_of_their_own(tmp_path):
    """Guards copies that ask the same at the same moment: a factor of 3 is three times as many."""
    trace = load_trace(conversations(tmp_path, rate_factor=3), 0)
    assert len(trace) == pytest.approx(3 * 500, rel=0.1)
    firsts = trace.arrival_s[trace.parent < 0]
    assert len(firsts) == 600
    assert len(np.unique(firsts)) == 600
    record = load_trace(conversations(tmp_path), 0)
    assert set(zip(*columns(record), strict=True)) <= set(zip(*columns(trace), strict=True))
    few = load_trace(conversations(tmp_path, rate_factor=0.25), 0)
    assert (few.parent < 0).sum() == 50
    assert set(zip(*columns(few), strict=True)) <= set(zip(*columns(record), strict=True))


def test_bursts_are_drawn_whole_with_their_silence(tmp_path):
    """Guards seeds with all crowds at the recorded moments, and crowds on top of each other."""
    drawn = load_trace(crowds(tmp_path), 1)
    begins = np.flatnonzero(np.diff(drawn.arrival_s, prepend=-np.inf) > 1)
    # Every minute one, or a little later behind the record's last one, whose silence is a guess.
    after = np.diff(drawn.arrival_s[begins])
    assert set(after[drawn.prompt_tokens[begins[:-1]] < 149].round(6)) == {60}
    assert ((after > 40) & (after < 70)).all()
    crowd = drawn.prompt_tokens[begins]
    assert len(set(crowd)) < len(crowd)
    assert set(np.diff(crowd)) != {1}
    # Each is whole but for the last, which the trace's end may cut.
    for first, last in pairwise(begins):
        size = 10 + 20 * (7 * (drawn.prompt_tokens[first] - 100) % 10)
        assert drawn.output_tokens[first:last].tolist() == list(range(1, size + 1))


def test_a_slow_rise_stays_where_it_was(tmp_path):
    """Guards a night in the middle of a day: bursts come from within half an hour."""
    rows = [(second, 1 + second // 3600, 1 + second) for second in range(8 * 3600)]
    drawn = load_trace(file_of(tmp_path, HEAD, rows), 1)
    moved = drawn.arrival_s / 3600 - (drawn.prompt_tokens - 0.5)
    assert np.abs(moved).max() <= 0.5 + 0.5 + 60 / 3600
    assert len(set(drawn.output_tokens)) < 0.8 * len(rows) < 0.9 * len(drawn)


def test_more_requests_keep_the_bursts(tmp_path):
    """Ten times as many in every crowd, none at the moment of another, none in the silence."""
    record, more = (load_trace(crowds(tmp_path, rate_factor=f), 0) for f in (1, 10))
    assert len(more) == 10 * len(record)
    assert len(np.unique(more.arrival_s)) == len(more)
    assert (more.arrival_s // 60 == more.prompt_tokens - 100).all()
    windows = np.arange(0, 3001, 30)
    one, ten = (np.histogram(trace.arrival_s, windows)[0] for trace in (record, more))
    np.testing.assert_allclose(ten, 10 * one, atol=10)
    fewer = load_trace(crowds(tmp_path, rate_factor=0.3), 0)
    assert len(fewer) == pytest.approx(0.3 * len(record), abs=5 * (0.21 * len(record)) ** 0.5)


@pytest.mark.parametrize("count", [1, 2])
def test_a_tiny_trace_can_be_drawn(tmp_path, count):
    """Guards means and gaps of nothing."""
    source = file_of(tmp_path, HEAD, [(7, 5, 6)] * count, rate_factor=3)
    for seed in (0, 1):
        trace = load_trace(source, seed)
        assert set(trace.prompt_tokens) == {5}
        assert len(trace) >= 3
    with pytest.raises(DataError, match="is none; raise rate_factor"):
        load_trace(source.model_copy(update={"rate_factor": 1e-9}), 0)


def test_what_seeds_keep(tmp_path):
    """The mean of many seeds is the record: requests, and tokens of a prompt, within 5%."""
    rng = np.random.default_rng(0)
    for record in (conversations, crowds):
        trace = load_trace(record(tmp_path), 0)
        drawn = [resampled(trace, 1.0, True, rng) for _ in range(60)]
        assert np.mean([*map(len, drawn)]) == pytest.approx(len(trace), rel=0.05)
        tokens = [one.prompt_tokens.mean() for one in drawn]
        assert np.mean(tokens) == pytest.approx(trace.prompt_tokens.mean(), rel=0.05)


def test_clients_are_drawn_with_their_total_rate():
    """Guards an hour without its largest client: totals stay, shares change, on average not."""
    windows = [
        Window(client, start, 1.0 + client**2, "Gamma", 1.0)
        for client in range(20)
        for start in (0.0, 600.0)
    ]
    total = sum(window.rate_rps for window in windows)
    rng = np.random.default_rng(0)
    sums = np.zeros(20)
    for _ in range(400):
        drawn = drawn_clients(windows, rng)
        assert sum(window.rate_rps for window in drawn) == pytest.approx(total)
        assert 2 <= len({window.client for window in drawn}) < 20
        for window in drawn:
            sums[window.client] += window.rate_rps / 400
    expected = np.array([2 * (1.0 + client**2) for client in range(20)])
    # A draw is worth total / 20; its number is binomial.
    error = 5 * total / 20 * np.sqrt(20 * expected / total / 400)
    assert (np.abs(sums - expected) < error).all()


def test_a_session_shares_its_whole_context(tmp_path):
    """Prompt and answer of the request before, or the whole prompt if that is shorter."""
    rows = [
        (0, 100, 20, "a"),
        (1, 500, 30, ""),
        (2, 150, 10, "a"),
        (3, 40, 10, "b"),
        (4, 90, 5, "a"),
        (5, 500, 30, ""),
    ]
    trace = load_trace(file_of(tmp_path, f"{HEAD},session", rows), 0)
    assert trace.parent.tolist() == [-1, -1, 0, -1, 2, -1]
    assert trace.shared_tokens.tolist() == [0, 0, 120, 0, 90, 0]
    part = load_trace(file_of(tmp_path, f"{HEAD},session", rows, start_s=1), 0)
    assert part.parent.tolist() == [-1, -1, -1, 1, -1]
    assert part.shared_tokens.tolist() == [0, 0, 0, 90, 0]


def test_sessions_have_names_or_numbers(tmp_path):
    """A list is neither."""
    path = tmp_path / "a.jsonl"
    row = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1}
    path.write_text("".join(json.dumps(row | {"session": name}) + "\n" for name in (7, 7, "7")))
    assert load_trace(FileTrace(path=str(path)), 0).parent.tolist() == [-1, 0, 1]
    path.write_text(json.dumps(row | {"session": [7]}))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*neither a text nor a whole number"):
        load_trace(FileTrace(path=str(path)), 0)


def test_blocks_share_their_longest_beginning():
    """The latest of those that share most; a last block that is not full counts for nothing."""
    blocks = [[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3, 6], [7, 9], [1, 2, 8], [1, 2, 3]]
    tokens = np.array([30, 30, 20, 40, 20, 25, 30])
    parent, shared = from_blocks(blocks, tokens, 10)
    assert parent.tolist() == [-1, 0, 1, 0, -1, 3, 3]
    assert shared.tolist() == [0, 20, 10, 30, 0, 20, 30]


def mooncake(tmp_path: Path, rows: list[tuple[int, list[int]]], **changes) -> MooncakeTrace:
    """Prompts of whole blocks at these seconds."""
    path = tmp_path / "mooncake.jsonl"
    made = [
        {"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 5}
        | {"hash_ids": ids}
        for at, ids in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return MooncakeTrace(path=str(path), **changes)


def test_a_system_prompt_is_no_session(tmp_path):
    """Guards one session of everybody, where all prompts begin alike."""
    rows = [(0, [0, 1]), (3, [0, 2]), (6, [0, 1, 3]), (9, [0, 4]), (12, [0, 1, 3, 5])]
    trace = load_trace(mooncake(tmp_path, rows), 0)
    assert trace.common_tokens == 512
    assert trace.sessions().tolist() == [0, 1, 0, 3, 0]
    assert trace.parent.tolist() == [-1, 0, 0, 2, 2]
    assert trace.shared_tokens.tolist() == [0, 512, 1024, 512, 1536]
    # Whose own session began before the part shares the system prompt with the one before it.
    part = load_trace(mooncake(tmp_path, rows, start_s=5), 0)
    assert part.parent.tolist() == [-1, 0, 0]
    assert part.shared_tokens.tolist() == [0, 512, 1536]


def test_a_spread_keeps_the_order_of_a_session(tmp_path):
    """Guards an answer to what was not yet asked: turns of one slot do not change places."""
    rows = [(0, [0, *range(1, turn)]) for turn in range(2, 30)]
    trace = load_trace(mooncake(tmp_path, [(0, [0]), *rows]), 0)
    assert (np.diff(trace.arrival_s) > 0).all()
    later = trace.prompt_tokens > 1024
    assert (np.diff(trace.prompt_tokens[later]) == 512).all()
    assert (trace.shared_tokens[later] == trace.prompt_tokens[later] - 512).all()


def test_blocks_are_required(tmp_path):
    """A row without them is none of Mooncake's."""
    source = mooncake(tmp_path, [(0, [0])])
    Path(source.path).write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    with pytest.raises(DataError, match=r":1: .*no 'hash_ids'"):
        load_trace(source, 0)


@published
def test_published_conversations_keep_what_they_share():
    """A third of the prompts' tokens, in 7,401 sessions, three times as many by the factor."""
    path = DATA / "trace_mooncake_fast25" / "conversation_trace.jsonl.gz"
    source = MooncakeTrace(path=str(path))
    record = load_trace(source, 0)
    shared = record.shared_tokens.sum() / record.prompt_tokens.sum()
    assert shared == pytest.approx(0.37, abs=0.01)
    assert len(np.unique(record.sessions())) == 7401
    more = load_trace(source.model_copy(update={"rate_factor": 3}), 1)
    assert len(more) == pytest.approx(3 * len(record), rel=0.05)
    assert more.shared_tokens.sum() / more.prompt_tokens.sum() == pytest.approx(shared, abs=0.03)


@published
def test_published_bursts_stay_bursts():
    """Guards ten crowds that fill each other's silence: the peak of 30 s stays above four means."""
    path = DATA / "trace_azure_llm_2023" / "AzureLLMInferenceTrace_code.csv"
    for seed in range(4):
        trace = load_trace(AzureTrace(path=str(path), rate_factor=10), seed)
        counts = np.histogram(trace.arrival_s, np.arange(0, 3420, 30))[0]
        assert len(trace) == pytest.approx(88_190, rel=0.4)
        assert 4 < counts.max() / counts.mean() < 9


@published
def test_two_days_are_loaded_in_seconds():
    """A million requests in the shape of two days; processor seconds, whatever else runs."""
    files = DATA / "trace_servegen"
    source = ServeGenTrace(
        rates_path=str(files / "m-small_clients_trace.csv.gz"),
        lengths_path=str(files / "m-small_clients_lengths.jsonl.gz"),
        start_s=172_800,
        duration_s=172_800,
        rate_factor=0.005,
    )
    started = time.process_time()
    trace = load_trace(source, 0)
    assert time.process_time() - started < 20
    assert len(trace) == pytest.approx(989_000, rel=0.01)
    hours = np.histogram(trace.arrival_s, np.arange(0, 172_801, 3600))[0]
    # Nights at four, evenings at eight or nine.
    for day in (hours[:24], hours[24:]):
        assert 1 <= day[:8].argmin() <= 6
        assert day[18:23].mean() > 1.5 * day[1:6].mean()
