"""The bill of materials: what is installed, as CycloneDX 1.6 has it."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli, data
from fedapp.site.bundle import installed_bundle

# Of the published schema (bom-1.6.schema.json): fields that a component may have of those written.
COMPONENT = {"type", "bom-ref", "purl", "name", "version", "licenses", "hashes"}


@pytest.fixture(scope="module")
def document():
    ended = CliRunner().invoke(cli, ["sbom"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.output)


def test_the_document_has_the_fields_that_the_schema_asks_for(document):
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    hexes = r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"
    assert re.fullmatch(f"urn:uuid:{hexes}", document["serialNumber"])
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", document["metadata"]["timestamp"]
    )
    components = [document["metadata"]["component"], *document["components"]]
    for component in components:
        assert {"type", "name", "version", "bom-ref"} <= component.keys() <= COMPONENT
        for licence in (licences := component.get("licenses", [])):  # one expression, or names
            assert (licence.keys() == {"expression"} and len(licences) == 1) or (
                licence.keys() == {"license"} and licence["license"].keys() == {"name"}
            )
        for digest in component.get("hashes", []):
            assert digest["alg"] == "SHA-256"
            assert re.fullmatch("[0-9a-f]{64}", digest["content"])
    refs = [component["bom-ref"] for component in components]
    assert len(set(refs)) == len(refs)
    assert sorted(each["ref"] for each in document["dependencies"]) == sorted(refs)
    for each in document["dependencies"]:
        assert set(each["dependsOn"]) <= set(refs)
        assert each["dependsOn"] == sorted(set(each["dependsOn"]))


def test_components_are_the_installed_packages_and_the_app_is_what_they_are_for(document):
    found = {each["name"]: each for each in document["components"]}
    for name in ("numpy", "flwr", "gmpy2", "rbcl", "cryptography", "llvmlite"):
        assert found[name]["version"] == version(name)
        assert found[name]["purl"] == f"pkg:pypi/{name}@{version(name)}"
        assert found[name]["licenses"]
    assert found["typing-extensions"]["purl"].startswith("pkg:pypi/typing-extensions@")
    app = document["metadata"]["component"]
    assert (app["type"], app["name"], app["version"]) == (
        "application",
        "fedapp",
        version("fedapp"),
    )
    assert app["hashes"] == [{"alg": "SHA-256", "content": installed_bundle()}]
    assert "fedapp" not in found


def test_dependencies_are_those_of_the_metadata_and_of_the_extras_that_are_asked_for(document):
    edges = {
        each["ref"].rpartition("@")[0].rpartition("/")[2]: {
            other.rpartition("@")[0].rpartition("/")[2] for other in each["dependsOn"]
        }
        for each in document["dependencies"]
    }
    assert {"flwr", "numpy", "numba", "gmpy2", "rbcl"} <= edges["fedapp"]
    assert "ray" in edges["flwr"]  # of flwr[simulation]
    assert edges["numba"] == {"llvmlite", "numpy"}
    assert "pytest" not in edges["numpy"] | edges["scipy"]  # of an extra that nobody asks for


@pytest.mark.slow
def test_only_serial_number_and_time_differ_between_two_documents(document, tmp_path):
    assert CliRunner().invoke(cli, ["sbom", "--output", str(tmp_path / "bom.json")]).exit_code == 0
    text = (tmp_path / "bom.json").read_text()
    again = json.loads(text)
    assert text.endswith("}\n")
    assert again.pop("serialNumber") != document["serialNumber"]
    again["metadata"].pop("timestamp")
    once = {name: value for name, value in document.items() if name != "serialNumber"}
    assert again == once | {"metadata": {"component": document["metadata"]["component"]}}


class Package:
    """A package as ``importlib.metadata`` has it."""

    version = "1.0+local"

    def __init__(self, metadata: dict[str, Any], origin: str | None = None) -> None:
        self.metadata, self._origin = self, origin
        self.json = metadata

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._origin


MIT = ["License :: OSI Approved :: MIT License", "Topic :: Security"]


@pytest.mark.parametrize(
    ("metadata", "licences"),
    [
        ({"license_expression": "MIT OR Apache-2.0"}, [{"expression": "MIT OR Apache-2.0"}]),
        ({"license": "BSD", "classifier": MIT}, [{"license": {"name": "BSD"}}]),
        (
            {"license": "MIT\n\nPermission", "classifier": MIT},
            [{"license": {"name": "MIT License"}}],
        ),
        ({"license": "UNKNOWN", "classifier": MIT}, [{"license": {"name": "MIT License"}}]),
        ({"classifier": MIT}, [{"license": {"name": "MIT License"}}]),
        ({"license": "Permission\nis"}, None),
        ({}, None),
    ],
)
def test_a_licence_is_what_the_metadata_calls_it(metadata, licences):
    package: Any = Package(metadata)
    found = data._component("a-b", package)
    assert found.get("licenses") == licences
    assert found["purl"] == "pkg:pypi/a-b@1.0%2Blocal"


def test_a_hash_is_that_of_the_archive_where_pip_wrote_it_down():
    digest = "ab" * 32
    origin = {"url": "file:///a.whl", "archive_info": {"hashes": {"sha256": digest}}}
    package: Any = Package({}, json.dumps(origin))
    assert data._component("a", package)["hashes"] == [{"alg": "SHA-256", "content": digest}]
    for other in (None, json.dumps({"url": "file:///a", "dir_info": {"editable": True}})):
        package = Package({}, other)
        assert "hashes" not in data._component("a", package)
