"""Scalars for TensorBoard, written where they are logged.

tensorboardX's own writer has a thread and a queue of ten places: a full disk ends the thread, and
the training loop then waits for a place for ever.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter


class Board:
    """An event file of its own; `write` and `close` raise OSError if the storage does."""

    def __init__(self, directory: Path, purge_step: int) -> None:
        """TensorBoard then drops what files before this one have of `purge_step` and later."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(str(directory / name))
        self._append(Event(file_version="brain.Event:2"))
        self._append(Event(session_log=SessionLog(status=SessionLog.START), step=purge_step))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Points of several curves."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(summary=Summary(value=values), step=step))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()
