"""The table of request fields holds every field, and names tests that there are."""

import ast
import re
from pathlib import Path

import pytest
from openai.types import chat, completion_create_params

from mars_ray.serve.openai.request_models import ChatBody, CompletionBody, no_ops_of

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/reference/api.md").read_text().split("## Request fields")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith("| `")
]
OURS = set(ChatBody.model_fields) | set(CompletionBody.model_fields)


def named(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


def section(heading: str) -> set[str]:
    """The fields below one of the table's headings."""
    rows = TABLE.split(f"| **{heading}**")[1].split("| **")[0]
    listed = [row for row in rows.splitlines() if row.startswith("| `")]
    return {name for row in listed for name in named(row.split("|")[1])}


def test_every_field_is_listed_and_no_other():
    """Of ours each has a row of its effect, of OpenAI's all others one of the refusal."""
    known = {
        name
        for params in (chat.completion_create_params, completion_create_params)
        for name in params.CompletionCreateParamsNonStreaming.__annotations__
    }
    listed = [name for row in ROWS for name in named(row[0])]
    refused = section("null only")
    assert set(listed) - refused == OURS
    assert known - OURS <= refused
    assert not refused & OURS
    twice = {name for name in listed if listed.count(name) > 1}
    assert twice == {"logprobs"}, "which is a number of completions, and yes or no of chats"


@pytest.mark.parametrize(
    ("heading", "kind"), [("chats", ChatBody), ("completions", CompletionBody)]
)
def test_fields_of_one_kind_stand_under_its_heading(heading, kind):
    """Guards a field that is looked for in the wrong kind of request."""
    others = {ChatBody: CompletionBody, CompletionBody: ChatBody}[kind]
    own = set(kind.model_fields) - set(others.model_fields)
    # `echo` and `add_special_tokens` do nothing in chats, and their rows say it.
    assert section(heading) | no_ops_of(ChatBody) >= own


def test_every_row_names_a_test_that_there_is():
    """Guards a promise without a test behind it."""
    tests = {
        node.name
        for path in (ROOT / "tests/serve").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(ROWS) > 40
    for row in ROWS:
        assert len(row) == 5, row[0]
        assert re.fullmatch(r"`(test_\w+)`", row[4]), row[0]
        assert row[4].strip("`") in tests, row[0]
