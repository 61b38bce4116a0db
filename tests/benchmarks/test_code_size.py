"""What a change of the tree did to its lines."""

from code_size import Change, compare, pages, parse_changes, part_of


def test_lines_by_what_became_of_them():
    """By hand. In the package a.py is renamed as it is, b.py loses 30 of 50 lines and gains 5,
    c.py is gone; d.py goes to the benchmarks, where it counts on both sides."""
    before = {"mars_ray/a.py": 10, "mars_ray/b.py": 50, "mars_ray/c.py": 7, "mars_ray/d.py": 20}
    after = {"mars_ray/core/a.py": 10, "mars_ray/b.py": 25, "benchmarks/d.py": 22}
    changes = [
        Change("mars_ray/a.py", "mars_ray/core/a.py", 0, 0),
        Change("mars_ray/b.py", "mars_ray/b.py", 5, 30),
        Change("mars_ray/c.py", "mars_ray/c.py", 0, 7),
        Change("mars_ray/d.py", "benchmarks/d.py", 3, 1),
        Change("docs/log.md", "docs/log.md", 9, 9),
    ]
    parts = compare(before, after, changes)
    assert parts["mars_ray"] == {
        "files_before": 3,
        "files": 2,
        "lines_before": 67,
        "lines": 35,
        "moved": 10,
        "rewritten": 5,
        "deleted": 32,
    }
    assert parts["benchmarks"] == {
        "files_before": 1,
        "files": 1,
        "lines_before": 20,
        "lines": 22,
        "moved": 0,
        "rewritten": 1,
        "deleted": 0,
    }


def test_the_paths_of_a_rename_are_read():
    """Guards counts that slip to another file, and a picture without lines."""
    numstat = "1\t2\ta.py\0003\t4\t\0b.py\0c.py\0-\t-\td.png\0005\t0\te.py\0"
    assert parse_changes(numstat) == [
        Change("a.py", "a.py", 1, 2),
        Change("b.py", "c.py", 3, 4),
        Change("e.py", "e.py", 5, 0),
    ]


def test_the_simulator_is_no_part_of_the_package():
    """Wherever it has been."""
    assert part_of("mars_ray/simulator/page.py") == "simulator"
    assert part_of("mars_ray/scaling/simulate/core.py") == "simulator"
    assert part_of("mars_ray/autoscale/policy.py") == "mars_ray"
    assert part_of("docs/log.md") is None


def test_what_scripts_write_does_not_count(tmp_path):
    (tmp_path / "README.md").write_text("one\ntwo\n")
    for name, text in {
        "log.md": "a b",
        "inside/faults.md": "c",
        "inside/other.md": "d e <!-- results:a -->\n| 1 |\n<!-- /results:a --> f",
    }.items():
        page = tmp_path / "docs" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    assert pages(tmp_path) == {"docs_words": 3, "readme_lines": 2}
