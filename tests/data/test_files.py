import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from mars_ray.data.files import expand, rows
from mars_ray.errors import DataError

ROWS = [{"prompt": "a\n", "response": "é"}, {"prompt": "b", "response": [1]}, {"prompt": "🙂"}]


def write(path, data):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_json_lines(tmp_path, name):
    """Line numbers count blank lines, as an editor does."""
    lines = [json.dumps(ROWS[0]), "", json.dumps(ROWS[1], ensure_ascii=False), ""]
    path = write(tmp_path / name, "\n".join(lines).encode())
    assert list(rows([path])) == [(f"{path}:1", ROWS[0]), (f"{path}:3", ROWS[1])]


def test_a_broken_line_does_not_end_the_file(tmp_path):
    """Neither cut JSON, nor bytes that are not UTF-8, nor what is nested too deeply."""
    deep = b"[" * 200_000
    path = write(tmp_path / "d.jsonl", b'{"a": 1\n"\xff"\n' + deep + b'\n{"a": 2}\n')
    found = list(rows([path]))
    assert [origin for origin, _ in found] == [f"{path}:{line}" for line in (1, 2, 3, 4)]
    assert all(isinstance(content, ValueError) for _, content in found[:3])
    assert found[3][1] == {"a": 2}


@pytest.mark.parametrize("name", ["d.json", "d.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_list(tmp_path, name, indent):
    """Each row with the line where it starts, whatever the layout."""
    text = json.dumps(ROWS, indent=indent, ensure_ascii=False)
    path = write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())
    starts = [1, 1, 1]
    if indent:
        starts = [n for n, line in enumerate(text.split("\n"), start=1) if line == "  {"]
    assert list(rows([path])) == [(f"{path}:{n}", row) for n, row in zip(starts, ROWS, strict=True)]


def test_empty_json_list(tmp_path):
    """No rows, no error: that none is left is found later, over all files."""
    assert list(rows([write(tmp_path / "d.json", b" [ ]\n")])) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{"a": 2}', "name JSON lines .jsonl"),
        (b'[{"a": 1} {"a": 2}]', "line 1 column 11"),
        (b'[{"a": 1},\n', "line 2 column 1"),
        (b'[{"a": 1}\n', "line 2 column 1"),
        (b'[{"a": 1}]\n[{"a": 2}]\n', "line 2 column 1"),
        (b'[\n{"a": 1},\n{"a": }]', "line 3"),
        (b'["\xff"]', "utf-8"),
        (b"", "not a list"),
        (b"[" * 200_000, "recursion"),
    ],
)
def test_a_damaged_json_list_is_an_error(tmp_path, data, message):
    """What follows the damage cannot be found, so the file cannot be used."""
    with pytest.raises(DataError, match=message):
        list(rows([write(tmp_path / "d.json", data)]))


def test_parquet(tmp_path):
    """Lists of messages come as lists of dictionaries."""
    content = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(3)]
    path = str(tmp_path / "d.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path, row_group_size=2)
    assert list(rows([path])) == [(f"{path}:{n}", row) for n, row in enumerate(content, start=1)]


def test_a_parquet_column_that_is_no_text_is_an_error(tmp_path):
    """Its type says text, and nothing checked it when it was written."""
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    path = str(tmp_path / "d.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path)
    with pytest.raises(DataError, match=r"d\.parquet: 'utf-8' codec"):
        list(rows([path]))


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl.gz", "d.json.gz"])
def test_unreadable_files_are_errors(tmp_path, name):
    """A download that broke off, with the file's name."""
    whole = gzip.compress(json.dumps(ROWS * 100).encode())
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{name}"):
        list(rows([str(tmp_path / name)]))


def test_files_are_found_sorted_and_once(tmp_path):
    """Guards the order of rows, on which every seed rests, against that of the file system."""
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "[x].jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    found = expand([str(tmp_path / "b.jsonl"), str(tmp_path / "**/*.jsonl")])
    assert [path.name for path in found] == ["b.jsonl", "[x].jsonl", "a.jsonl", "c.jsonl"]
    assert [path.name for path in expand([str(tmp_path / "[x].jsonl")])] == ["[x].jsonl"]


def test_missing_and_unknown_files_are_errors(tmp_path):
    """With the path, and what to write instead."""
    with pytest.raises(DataError, match=r"no such file: .*none\*\.jsonl"):
        list(rows([str(tmp_path / "none*.jsonl")]))
    with pytest.raises(DataError, match=r"is a directory; name its files"):
        list(rows([str(tmp_path)]))
    with pytest.raises(DataError, match=r"none of the known endings \.jsonl"):
        list(rows([write(tmp_path / "d.csv", b"")]))
