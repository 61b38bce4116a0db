"""What counts as free memory."""

from pathlib import Path

from mars_ray.provenance import free_on_node

MIB = 2**20


def test_cached_files_do_not_count_as_used_in_a_container(tmp_path: Path):
    """Guards stages that are refused because a checkpoint has just been written."""
    (tmp_path / "memory.max").write_text(f"{32 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{28 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {8 * MIB}\ninactive_file {20 * MIB}\n")
    assert free_on_node(tmp_path) == 24 * MIB


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path: Path):
    """Also where there are no containers."""
    assert free_on_node(tmp_path) > 32 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_on_node(tmp_path) > 32 * MIB
