"""The list of inputs that failed: its tests exist, and result and page are of it."""

import json

import faults


def test_every_named_test_is_there():
    """Guards a list that outlives the tests which it names."""
    found = faults.collected()
    assert not faults.unknown(found)
    gone = {"kinds": [{"members": [{"tests": ["tests/nowhere.py::a", f"{HERE}::test_nothing"]}]}]}
    assert faults.unknown(gone) == [f"{HERE}::test_nothing", "tests/nowhere.py::a"]


HERE = "tests/benchmarks/test_fault_list.py"


def test_result_and_page_are_of_the_list():
    found = faults.collected()
    assert json.loads(faults.RESULT.read_text()) == found
    assert faults.PAGE.read_text() == faults.page(found)
    assert [kind["number"] for kind in found["kinds"]] == list(range(1, len(found["kinds"]) + 1))
    assert all(member["tests"] for kind in found["kinds"] for member in kind["members"])
