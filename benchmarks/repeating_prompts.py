"""Prompts whose answers repeat them: twenty texts to be summarised, twenty programs to be edited.

    python benchmarks/repeating_prompts.py ../shared/data OUTPUT_DIRECTORY

writes summarise.jsonl and edit.jsonl there, with a `prompt` each, which
`decoders/bench-decode-ngram.toml` reads. The texts are of the news-summary templates of P3, the
programs of GPTeacher's code instructions; neither is part of this repository.
"""

import gzip
import json
import sys
from pathlib import Path

COUNT = 20
TEXT_WORDS, CODE_WORDS = range(120, 420), range(30, 110)
TEMPLATES = ("cnn_dailymail", "xsum", "multi_news", "samsum")
EDIT = (
    "Add a comment to the first line of this program. Change nothing else, and give all of it.\n\n"
)


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(parents=True, exist_ok=True)
    with gzip.open(source / "p3_t0_sample" / "p3_t0_sample.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    texts = [
        row["prompt"]
        for row in rows
        if row["template"].startswith(TEMPLATES) and len(row["prompt"].split()) in TEXT_WORDS
    ]
    codes = json.loads(
        gzip.decompress((source / "gpteacher_codegen" / "codegen-instruct.json.gz").read_bytes())
    )
    programs = [
        f"{EDIT}```\n{row['response'].strip()}\n```"
        for row in codes
        if len(row["response"].split()) in CODE_WORDS and "def " in row["response"]
    ]
    for name, prompts in (("summarise", texts), ("edit", programs)):
        step = len(prompts) // COUNT  # spread over all that there are
        chosen = prompts[: step * COUNT : step]
        written = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chosen)
        (target / f"{name}.jsonl").write_text(written)
        print(f"{name}: {len(chosen)} of {len(prompts)}")


if __name__ == "__main__":
    main()
