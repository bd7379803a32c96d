"""Write the software bill of materials of an environment: CycloneDX 1.6, as JSON, on standard output.

    python requirements/sbom.py SITE-PACKAGES LOCK > sbom.cdx.json

What is installed in that folder and pinned in that lock file, and `anabranch` itself; the same environment gives the
same bytes. Needs nothing but Python.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

_LONGEST_NAME = 60  # longer, the field holds the licence's text


def main() -> None:
    site, lock = map(Path, sys.argv[1:])
    found = {_normal(one.metadata["Name"]): one for one in distributions(path=[str(site)])}
    pinned = {
        _normal(name) for name in re.findall(r"^([\w.-]+)==", lock.read_text(encoding="utf-8"), re.MULTILINE)
    }
    own = found["anabranch"]
    components = [found[name] for name in sorted(pinned & found.keys())]
    json.dump(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": {"type": "application", **_component(own)}},
            "components": [{"type": "library", **_component(one)} for one in components],
            "dependencies": [
                {
                    "ref": _purl(one),
                    "dependsOn": sorted(
                        _purl(found[name]) for name in set(_needs(one)) & pinned & found.keys()
                    ),
                }
                for one in [own, *components]
            ],
        },
        sys.stdout,
        indent=1,
    )
    sys.stdout.write("\n")


def _component(one: Distribution) -> dict[str, Any]:
    return {
        "bom-ref": _purl(one),
        "name": _normal(one.metadata["Name"]),
        "version": one.version,
        "purl": _purl(one),
        "licenses": [_licence(one)],
    }


def _licence(one: Distribution) -> dict[str, Any]:
    metadata, name = one.metadata, _normal(one.metadata["Name"])
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    classifiers = [
        entry.rpartition(" :: ")[2]
        for entry in metadata.get_all("Classifier") or []
        if entry.startswith("License ::")
    ]
    if (text := metadata.get("License")) and len(text) <= _LONGEST_NAME:
        return {"license": {"name": text}}
    if classifiers:
        return {"license": {"name": ", ".join(classifiers)}}
    if text:
        return {"license": {"name": text.splitlines()[0]}}
    recorded = tomllib.loads(Path(__file__).with_name("licences.toml").read_text(encoding="utf-8"))
    if name not in recorded:
        sys.exit(f"{name} names no licence; look it up, and record it in requirements/licences.toml")
    return {"license": {"name": recorded[name]["licence"]}}


def _needs(one: Distribution) -> Iterator[str]:
    """Names alone: what a marker leaves out is not installed."""
    for requirement in one.requires or []:
        if "extra ==" not in requirement:
            yield _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _purl(one: Distribution) -> str:
    return f"pkg:pypi/{_normal(one.metadata['Name'])}@{one.version}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
