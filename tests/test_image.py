"""What the container image of a checkout is made of."""

from __future__ import annotations

import tomllib

from fedapp.config import app_folder


def test_an_image_is_made_of_the_app_and_of_nothing_that_lies_beside_it() -> None:
    folder = app_folder()
    rules = [
        line
        for line in (folder / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    made = tomllib.loads((folder / "pyproject.toml").read_text())
    packages = made["tool"]["setuptools"]["packages"]["find"]["include"]
    files = ["pyproject.toml", "constraints.txt", ".gitignore", made["project"]["readme"]]
    wanted = {*(name.rstrip("*") for name in packages), *files, *made["project"]["license-files"]}
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == wanted
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__"]
    assert all((folder / name).exists() for name in wanted)
