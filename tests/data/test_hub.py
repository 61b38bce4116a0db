import json

import datasets.config
import pytest

from mars_ray.config.inputs import HubSource
from mars_ray.data import files
from mars_ray.data.sources import BadRows, read
from mars_ray.errors import DataError


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A directory with data files, which `datasets` loads by the same route as a hub name."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "dolci"
    directory.mkdir()
    fields = {"function_calls": None, "functions": None}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"id": "1", "messages": [turn | fields for turn in turns], "source": "s"}
    lines = [json.dumps(row | {"id": str(number)}) for number in range(5)]
    (directory / "train.jsonl").write_text("\n".join(lines))
    return directory


def test_rows_of_a_data_set(dataset):
    """In the form of Dolci-Instruct-SFT, with the data set's name in the origin."""
    source = HubSource(name=str(dataset), limit=3)
    records = list(read(source, BadRows()))
    assert [record.origin for record in records] == [f"{dataset}:{n}" for n in (1, 2, 3)]
    assert [message.content for message in records[0].messages] == ["q", "a"]


def test_the_fingerprint_is_that_of_the_content(dataset):
    """Guards against tokens of an older version of a data set."""
    source = HubSource(name=str(dataset))
    before = files.hub_fingerprint(source)
    assert before == files.hub_fingerprint(source)
    (dataset / "train.jsonl").write_text('{"prompt": "q", "response": "a"}\n')
    assert files.hub_fingerprint(source) != before


def test_what_cannot_be_loaded_is_an_error(dataset, tmp_path):
    """With the name and the split, and what there is instead."""
    with pytest.raises(DataError, match=r"split dev.*train"):
        files.load_hub(HubSource(name=str(dataset), split="dev"))
    with pytest.raises(DataError, match="nothing"):
        files.load_hub(HubSource(name=str(tmp_path / "nothing")))


def test_what_cannot_be_read_is_its_own_error(dataset, monkeypatch):
    """Not an OSError, which to whoever writes the rows would mean that its own disk is full."""

    def broken():
        yield {"prompt": "q", "response": "a"}
        raise OSError("Input/output error")

    monkeypatch.setattr(files, "load_hub", lambda source: broken())
    source = HubSource(name=str(dataset))
    rows = files.hub_rows(source)
    assert next(rows)[0] == f"{dataset}:1"
    with pytest.raises(DataError, match=r"cannot read data set .*Input/output error"):
        next(rows)
