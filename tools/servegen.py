"""Makes the two files of a trace of type `servegen` from one of ServeGen's directories.

    git clone --depth 1 https://github.com/alibaba/ServeGen /tmp/ServeGen
    python tools/servegen.py /tmp/ServeGen/data/reason/deepseek-r1 data

writes `data/deepseek-r1_clients_trace.csv.gz` and `data/deepseek-r1_clients_lengths.jsonl.gz`.
Windows without requests and counts that never occur are left out; numbers have six digits.
"""

import argparse
import ast
import csv
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_COLUMNS = ("client_id", "window_start_s", "rate_rps", "cv", "pattern", "param1", "param2")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Merges the files of ServeGen's clients.")
    parser.add_argument("source", type=Path, help="with chunk-N-trace.csv and chunk-N-dataset.json")
    parser.add_argument("target", type=Path, help="a directory")
    arguments = parser.parse_args()
    for path in merge(arguments.source, arguments.target):
        print(path)


def merge(source: Path, target: Path) -> tuple[Path, Path]:
    """The rates and the token counts of all clients, each in one file."""
    if not clients(source, "trace.csv"):
        sys.exit(f"{source} has no chunk-N-trace.csv: it is not a directory of ServeGen's data")
    target.mkdir(parents=True, exist_ok=True)
    rates = target / f"{source.name}_clients_trace.csv.gz"
    with gzip.open(rates, "wt", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(_rates(source))
    lengths = target / f"{source.name}_clients_lengths.jsonl.gz"
    with gzip.open(lengths, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in _lengths(source))
    return rates, lengths


def clients(source: Path, kind: str) -> list[tuple[int, Path]]:
    """Number and file of every client, in order."""
    found = [(re.fullmatch(rf"chunk-(\d+)-{kind}", path.name), path) for path in source.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def _rates(source: Path) -> Iterator[list[str | int]]:
    for client, path in clients(source, "trace.csv"):
        for start, rate, cv, law, *parameters in csv.reader(path.read_text().splitlines()):
            if float(rate) > 0:
                yield [client, start, _short(rate), _short(cv), law, *map(_short, parameters)]


def _lengths(source: Path) -> Iterator[dict[str, Any]]:
    for client, path in clients(source, "dataset.json"):
        for start, counts in json.loads(path.read_text()).items():
            # The text of a Python dict: {45: 0.0097, 46: 0.0117}.
            yield {"client_id": client, "window_s": int(start)} | {
                name: {
                    tokens: float(_short(share))
                    for tokens, share in ast.literal_eval(counts[name]).items()
                    if share > 0
                }
                for name in ("input_tokens", "output_tokens")
            }


def _short(number: str | float) -> str:
    return f"{float(number):.6g}"


if __name__ == "__main__":
    main()
