"""`fedapp sbom`: which packages are installed, in CycloneDX."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

APP = "fedapp"


def sbom(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there; otherwise print.")
    ] = None,
) -> None:
    """Write which packages are installed, as a CycloneDX 1.6 document.

    Licences and requirements are those of each package's metadata. A hash is that of the archive a
    package came from, where pip wrote it down; fedapp's is that of `fedapp app hash`.
    """
    text = json.dumps(bill_of_materials(), indent=2)
    if output:
        output.write_text(f"{text}\n", encoding="utf-8")
    else:
        print(text)


def bill_of_materials() -> dict[str, Any]:
    """The document; equal installations differ only in serial number and time."""
    from fedapp.site.bundle import installed_bundle

    # Of two packages with the same name, the first on the path is imported.
    packages = reversed([*distributions()])
    packages_by_name = {canonicalize_name(each.name): each for each in packages if each.name}
    installed: dict[str, Distribution] = dict(sorted(packages_by_name.items()))
    components = {name: _component(name, each) for name, each in installed.items()}
    refs = {name: component["bom-ref"] for name, component in components.items()}
    digest = {"alg": "SHA-256", "content": installed_bundle()}
    app = components.pop(APP) | {"type": "application", "hashes": [digest]}
    del app["purl"]  # it is on no index
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "metadata": {"timestamp": datetime.now(UTC).isoformat(), "component": app},
        "components": [*components.values()],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[other] for other in others)}
            for name, others in _requirements(installed).items()
        ],
    }


def _component(name: str, package: Distribution) -> dict[str, Any]:
    """A package, with what its metadata has."""
    metadata, purl = package.metadata.json, f"pkg:pypi/{name}@{quote(package.version)}"
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "purl": purl, "name": name}
    component["version"] = package.version
    # Some have the licence's whole text there, or nothing, and its name in a classifier.
    term, classes = str(metadata.get("license", "UNKNOWN")), metadata.get("classifier", [])
    names = [each.rpartition(" :: ")[2] for each in classes if each.startswith("License :: OSI A")]
    if "license_expression" in metadata:
        component["licenses"] = [{"expression": metadata["license_expression"]}]
    elif names := names if "\n" in term or term == "UNKNOWN" else [term]:
        component["licenses"] = [{"license": {"name": each}} for each in names]
    origin = json.loads(package.read_text("direct_url.json") or "{}").get("archive_info", {})
    if digest := origin.get("hashes", {}).get("sha256"):
        component["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return component


def _requirements(installed: Mapping[str, Distribution]) -> dict[str, set[str]]:
    """Installed requirements of each package, with requested extras; fedapp with all its extras."""
    required: dict[str, set[str]] = {name: set() for name in installed}
    extras = {name: {""} for name in installed}
    extras[APP].update(installed[APP].metadata.json.get("provides_extra", []))
    waiting = list(installed)
    while waiting:
        name = waiting.pop()
        for wanted in map(Requirement, installed[name].requires or []):
            other, marker = canonicalize_name(wanted.name), wanted.marker
            applies = not marker or any(marker.evaluate({"extra": one}) for one in extras[name])
            if applies and other in installed.keys() - {name}:
                required[name].add(other)
                if wanted.extras - extras[other]:
                    extras[other] |= wanted.extras
                    waiting.append(other)
    return required
