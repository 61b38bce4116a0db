"""Checkpoint directories and metrics files: what counts, and what a death leaves behind."""

import json
import os
import resource
import struct

import pytest
import torch
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from mars_ray.config.train import MarsObjective
from mars_ray.data.loader import LoaderState
from mars_ray.errors import CheckpointError
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import CheckpointStore, TrainState
from mars_ray.train.metrics import Meter, MetricsReader, MetricsWriter, ModelFlops
from mars_ray.train.model_step import StageObjective
from mars_ray.train.ranks import Ranks

RANKS = Ranks(0, 1, torch.device("cpu"))
STATE = TrainState(7, 20, 1.5, 1, "abc", LoaderState(1, 3), {"loss": 0.5}, "data", 0)


def write(directory):
    def write_model(path):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"12345678")

    checkpoint.write(directory, RANKS, STATE, {"values": torch.arange(3)}, write_model)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    """Guards the round trip, nested dataclasses included."""
    directory = checkpoint.directory_of(tmp_path, 7)
    write(directory)
    checkpoint.verify(directory)
    assert checkpoint.read_state(directory) == STATE
    assert checkpoint.read_rank_state(directory, 0)["values"].tolist() == [0, 1, 2]


def test_without_a_manifest_it_is_no_checkpoint(tmp_path):
    """Guards resuming from a directory whose writer was killed."""
    write(tmp_path / "step")
    (tmp_path / "step" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        checkpoint.verify(tmp_path / "step")


def test_a_run_goes_on_from_its_newest_complete_checkpoint(tmp_path):
    """Guards lost steps, and a half-written directory taken for a checkpoint."""
    assert checkpoint.newest(tmp_path / "nothing yet") is None
    for step in (7, 100, 93):
        write(checkpoint.directory_of(tmp_path, step))
    (checkpoint.directory_of(tmp_path, 100) / "manifest.json").unlink()
    assert checkpoint.newest(tmp_path) == checkpoint.directory_of(tmp_path, 93)


def test_what_a_user_puts_aside_is_no_checkpoint(tmp_path):
    """Guards a run against a copy beside its checkpoints, which ended every save on one rank."""
    write(checkpoint.directory_of(tmp_path, 7))
    for name in ("step_00000007.bak", "step_best", "step_7"):
        write(tmp_path / name)
    assert checkpoint.complete(tmp_path) == [checkpoint.directory_of(tmp_path, 7)]
    assert CheckpointStore(f"file://{tmp_path.parent}", tmp_path.name).steps() == {7}


def test_what_a_killed_attempt_left_is_removed(tmp_path):
    """Guards the disk against half a checkpoint for each attempt with other steps."""
    for step in (7, 10):
        write(checkpoint.directory_of(tmp_path, step))
    write(tmp_path / "step_00000007.bak")
    for name in ("step_00000007", "step_00000007.bak"):
        (tmp_path / name / "manifest.json").unlink()
    write(tmp_path / ".step_00000010.draft")
    checkpoint.clear_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000010", "step_00000007.bak"}


def test_missing_and_truncated_files_are_named(tmp_path):
    """Guards a full disk: files that are there but short."""
    directory = tmp_path / "step"
    write(directory)
    (directory / "model" / "model.safetensors").write_bytes(b"123")
    (directory / "trainer" / "rank_0.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(directory)
    assert "model/model.safetensors has 3 bytes, not 8" in str(caught.value)
    assert "trainer/rank_0.pt is missing" in str(caught.value)


def test_leftovers_of_a_dead_attempt_are_replaced(tmp_path):
    """Guards mixing: the dead attempt's manifest vouching for files of the new one."""
    directory = tmp_path / "step"
    write(directory)
    (directory / "trainer" / "rank_5.pt").write_bytes(b"old")
    write(directory)
    checkpoint.verify(directory)
    assert not (directory / "trainer" / "rank_5.pt").exists()


def test_a_checkpoint_cannot_run_code(tmp_path):
    """Guards pickled code in a checkpoint from elsewhere."""

    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    write(tmp_path / "step")
    torch.save(Malice(), tmp_path / "step" / "trainer" / "rank_0.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_rank_state(tmp_path / "step", 0)
    assert not (tmp_path / "ran").exists()


def test_a_rank_without_state_is_told_why(tmp_path):
    """Guards a checkpoint that lost a rank's file before its manifest was written."""
    write(tmp_path / "step")
    with pytest.raises(CheckpointError, match="no state of rank 1"):
        checkpoint.read_rank_state(tmp_path / "step", 1)


def test_metrics_after_the_restored_step_are_dropped(tmp_path):
    """Guards steps that stand twice in the curve, and the half line of a killed process."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, 0, 9, 1)
    for step in (1, 2, 3):
        writer.write("train", step, {"loss": float(step)})
    writer.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    writer = MetricsWriter(path, 2, 9, 1)
    writer.write("train", 3, {"loss": 30.0})
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("start", 0),
        ("train", 1),
        ("train", 2),
        ("start", 2),
        ("train", 3),
    ]
    assert lines[-1]["loss"] == 30.0
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_full_disk_is_an_error_at_once_and_closing_is_none(tmp_path):
    """Guards against waiting for ever for TensorBoard's thread, which a full disk ends; and the
    error that ends a run against one of closing its logs.

    The system refuses to make this process's files longer: first TensorBoard's, which grow faster.
    """
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0, 99, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = {f"m{index}": 0.0 for index in range(80)}
    writer.write("train", 1, metrics)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
        with pytest.raises(OSError, match="File too large"):
            writer.write("train", 2, metrics)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    [events] = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size == 2500
    assert (tmp_path / "metrics.jsonl").stat().st_size < 2500


def test_tensorboard_reads_what_is_written(tmp_path):
    """Guards the framing of an event file, whose readers stop at the first false checksum."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 4, 9, 1)
    writer.write("eval", 5, {"loss": 0.5, "clean_ce": 0.25})
    writer.close()
    [path] = (tmp_path / "tensorboard").iterdir()
    content, events = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data, end = content[12 : 12 + length], 16 + length
        assert content[8:12] == struct.pack("<I", masked_crc32c(content[:8]))
        assert content[12 + length : end] == struct.pack("<I", masked_crc32c(data))
        events.append(event_pb2.Event.FromString(data))
        content = content[end:]
    assert [event.step for event in events] == [0, 5, 5]
    assert [(value.tag, value.simple_value) for value in events[2].summary.value] == [
        ("eval/loss", 0.5),
        ("eval/clean_ce", 0.25),
    ]


def test_the_reader_follows_and_survives_a_cut(tmp_path):
    """Guards the progress display when workers restart and rank 0 cuts the file back."""
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in reader.new()] == [1, 2]
    assert reader.new() == []
    path.write_text('{"step": 1}\n')
    assert [line["step"] for line in reader.new()] == [1]


def test_the_reader_survives_a_cut_that_has_grown_again(tmp_path):
    """Guards an offset in the middle of a line: more was written than cut before the next look."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    reader = MetricsReader(path)
    reader.new()
    writer = MetricsWriter(path, step=1, total_steps=3, workers=2)
    writer.write("train", 2, {"loss": 0.123456789})
    assert path.stat().st_size > reader.offset
    # What was told before is not told again.
    assert [(line["kind"], line["step"]) for line in reader.new()] == [("start", 1), ("train", 2)]
    writer.write("train", 3, {"loss": 1.0})
    assert [line["step"] for line in reader.new()] == [3]
    writer.close()


def test_means_by_hand_and_across_a_checkpoint():
    """Guards a logged mean that starts anew where a checkpoint fell between two log lines."""
    # 10 weights of the body, 5 of the head, attention 2 wide; a million FLOPs a second at best.
    flops, streams = ModelFlops(10, 5, 2), StageObjective(MarsObjective(), 0, 0).streams
    meter, resumed = (Meter(RANKS.device, flops, 1e6, streams) for _ in range(2))
    counts = [4.0, 2.0, 10.0, 15.0, 20.0, 6.0, 40.0, 2.0, 30.0]
    counts = torch.tensor(counts, dtype=torch.float64)
    meter.add(torch.tensor([1.0, 8.0, 3.0], dtype=torch.float64), counts)
    resumed.load(meter.state())
    resumed.add(torch.tensor([3.0, 16.0, 5.0], dtype=torch.float64), counts)
    metrics = resumed.flush(RANKS)
    assert (metrics["loss"], metrics["clean_ce"], metrics["noisy_ce"]) == (2.0, 3.0, 2.0)
    assert metrics["padding_share"] == 0.25
    # Over the same seconds: 2 steps of 10 tokens, and of 6 * (10 * 15 + 5 * 6) + 12 * 2 * 40 FLOPs.
    elapsed = 20 / metrics["tokens_per_s"]
    assert metrics["flops_utilisation"] * elapsed == pytest.approx(2 * (1080 + 960) / 1e6)
    assert metrics["mask_tokens_per_s"] == pytest.approx(metrics["tokens_per_s"] / 5)
    # A batch without rows of a stream has no part in that stream's mean.
    none = counts.clone()
    none[1] = 0.0
    meter.add(torch.tensor([5.0, 4.0, 0.0], dtype=torch.float64), none)
    metrics = meter.flush(RANKS)
    assert (metrics["loss"], metrics["clean_ce"], metrics["noisy_ce"]) == (3.0, 1.5, 1.5)
    assert resumed.flush(RANKS)["loss"] == 0


def test_means_of_a_gpu_reach_their_numbers():
    """Guards the first log line of every training on a GPU. Tensors without values stop at the
    first number that is asked of them, and know which devices do not go together."""
    cuda = torch.device("cuda")
    streams = StageObjective(MarsObjective(), 0, 0).streams
    with FakeTensorMode():
        meter = Meter(cuda, ModelFlops(1, 1, 1), 1.0, streams)
        with pytest.raises(DataDependentOutputException):
            meter.flush(Ranks(0, 1, cuda))
