"""Two jobs that write one directory would mix their checkpoints."""

import errno
import fcntl
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.errors import ConfigError
from mars_ray.files import check_writable, replaced, replaced_directory, sole_writer

HOLD = """
import sys, time
from pathlib import Path
from mars_ray.files import sole_writer
directory = Path(sys.argv[1])
with sole_writer(directory, directory / ".lock", "output_dir"):
    print("held", flush=True)
    time.sleep(60)
"""


def writer_of(directory: Path):
    return sole_writer(directory, directory / ".lock", "output_dir")


def test_a_directory_has_one_writer_at_a_time(tmp_path):
    """Also if that one is killed: nothing has to be removed by hand."""
    directory = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"another process is writing .*runs/a"):
            writer_of(directory).__enter__()
        with writer_of(tmp_path / "runs" / "b"):
            pass
        other.kill()
    with writer_of(directory):
        pass
    assert not list(directory.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_storage_without_locks_is_written_all_the_same(tmp_path, monkeypatch, caplog, number):
    """With a word, and nothing that would keep others out after a kill."""

    def refuse(*_):
        raise OSError(number, "not here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with caplog.at_level(logging.WARNING), writer_of(tmp_path), writer_of(tmp_path):
            pass
    assert "cannot be locked" in caplog.text


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        writer_of(tmp_path / "file" / "run").__enter__()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    """Guards half a result in the place of an older one; nothing else is left there."""
    path = tmp_path / "results.json"
    for text in ("old", "new"):
        with replaced(path) as draft:
            draft.write_text(text)
    with pytest.raises(KeyboardInterrupt), replaced(path) as draft:
        interrupt(draft)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def interrupt(draft: Path) -> None:
    draft.write_text("half")
    raise KeyboardInterrupt


def test_a_look_at_a_file_leaves_it_as_it_is(tmp_path):
    """Whether it can be written is asked before the work; one that was not there is not made."""
    path = tmp_path / "new" / "result.json"
    check_writable(path, "--output")
    assert not path.exists()
    path.write_text("1")
    check_writable(path, "--output")
    assert path.read_text() == "1"


def test_a_directory_that_cannot_be_replaced_stays(tmp_path):
    """Guards the loss of the old directory where the new one has no way into its place."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "weights").write_text("old")
    with pytest.raises(FileNotFoundError), replaced_directory(directory) as fresh:
        fresh.rmdir()
    assert (directory / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
