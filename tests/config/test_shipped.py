"""Job files that come with the package."""

from told import looks_like_a_model

from mars_ray.config.base import found
from mars_ray.config.load import load_job, parse_job
from mars_ray.inputs import check_inputs


def test_a_job_of_the_package_is_found_from_anywhere(tmp_path, monkeypatch):
    """Guards documentation whose lines only work in a checkout."""
    monkeypatch.chdir(tmp_path)
    assert load_job("jobs/demo-tiny.toml").kind == "demo-tiny"


def test_a_file_of_ones_own_comes_first(tmp_path, monkeypatch):
    """Guards a changed job file that is passed over for the one in the package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "demo.toml").touch()
    assert found("jobs/demo.toml").resolve() == tmp_path / "jobs" / "demo.toml"


def test_other_places_are_taken_as_they_are(tmp_path):
    """Guards a typo in a path that silently runs something else."""
    assert found(tmp_path / "jobs" / "demo.toml") == tmp_path / "jobs" / "demo.toml"
    assert found("demo.toml").name == "demo.toml"
    assert not found("jobs/dmeo.toml").exists()


def test_an_adapter_of_the_package_is_found_by_every_command(tmp_path, monkeypatch):
    """Guards `serve MODEL --adapter adapters/smollm2`, which is a line of the documentation."""
    looks_like_a_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for kind in ("serve", "bench"):
        table = {"kind": kind, "checkpoint": "model"}
        check_inputs(
            parse_job(table, source="x", overrides=["engine.draft_adapter=adapters/smollm2"])
        )
