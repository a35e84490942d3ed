"""Size and licence of every package that each extra installs, from environments on this machine: `benchmarks/packages.json`.

    python tools/packages.py .venv-full .venv-modelopt

Of an extra the first environment counts that has all of its packages; one that none has is listed without figures. A size is
that of the installed files, without bytecode; a licence is what the package's own metadata states. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "packages.json"
_OSI = "License :: OSI Approved :: "


def declared() -> dict[str, list[str]]:
    """The requirements of each extra of pyproject.toml, and of `core`: what is installed always."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"core": project["dependencies"], **project["optional-dependencies"]}


def required(
    requirements: Iterable[str], extra: str, installed: Mapping[str, Distribution], found: set[tuple[str, str]]
) -> set[str]:
    """Names of packages that the requirements bring, with those of their own; KeyError: one that is not installed."""
    names: set[str] = set()
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *sorted(requirement.extras)):
            if (name, wanted) in found:
                continue
            found.add((name, wanted))
            if name == "trt-engine":
                names |= required(declared()[wanted] if wanted else (), "", installed, found)
            else:
                names |= {name, *required(installed[name].requires or (), wanted, installed, found)}
    return names


def licence(package: Distribution) -> str:
    """SPDX expression, else the field `License` or the classifiers, else the title of its licence file."""
    metadata = package.metadata
    classifiers = ", ".join(
        text.removeprefix(_OSI) for text in metadata.get_all("Classifier") or () if text.startswith("License")
    )
    field = (metadata.get("License") or "").strip().split("\n")[0]
    texts = [file.read_text().strip() for file in package.files or () if file.parent.name == "licenses"]
    titles = [title.strip() for title in (text.split("\n")[0] for text in texts) if "license" in title.lower()]
    stated = [metadata.get("License-Expression"), field if len(field) < 40 else "", classifiers, *titles]
    return next(filter(None, stated), "not stated")


def described(package: Distribution) -> dict[str, Any]:
    """Version, licence and MiB on disk."""
    files = [Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc"]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return {"version": package.version, "licence": licence(package), "mib": round(size / 2**20, 1)}


def record(environments: Iterable[Path]) -> dict[str, Any]:
    """Packages of each extra and the description of each package."""
    extras: dict[str, list[str] | None] = dict.fromkeys(declared())
    packages: dict[str, Any] = {}
    for environment in environments:
        paths = [str(path) for path in environment.glob("lib/python*/site-packages")]
        installed = {canonicalize_name(one.metadata["Name"]): one for one in distributions(path=paths)}
        for extra, requirements in declared().items():
            if extras[extra] is None:
                try:
                    extras[extra] = sorted(required(requirements, "", installed, set()))
                except KeyError as missing:
                    sys.stderr.write(f"{extra}: {environment.name} lacks {missing}\n")
                    continue
                packages |= {name: described(installed[name]) for name in extras[extra] or () if name not in packages}
    return {"extras": extras, "packages": dict(sorted(packages.items()))}


def page() -> str:
    """The page of the site: a row for each extra, then one for each package."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    packages, core = kept["packages"], set(kept["extras"]["core"])

    def mib(names: Iterable[str]) -> str:
        return f"{sum(packages[name]['mib'] for name in names):,.0f}"

    lines = [
        "# Extras, sizes and licences",
        "",
        "What `pip install 'trt-engine[EXTRA]'` adds to the core on x86-64 Linux with Python 3.11: its packages, with those"
        " that they require, and their size on disk in MiB. `core` is always installed. A dash: not measured. A package of"
        " several extras is in the sum of each. PyTorch is its build for the CPU; the one for CUDA, with NVIDIA's libraries,"
        " is larger.",
        "",
        "| extra | packages | MiB | asks for |",
        "|---|---:|---:|---|",
    ]
    for extra, requirements in declared().items():
        names = kept["extras"][extra]
        asked = ", ".join(dict.fromkeys(re.split(r"[<>=;~! ]", text)[0] for text in requirements))
        added = None if names is None else set(names) - (set() if extra == "core" else core)
        figures = "– | –" if added is None else f"{len(added)} | {mib(added)}"
        lines.append(f"| {extra} | {figures} | {asked} |")
    lines += [
        "",
        "Licences as each package states them, in its metadata or its licence file; trt-engine itself is under Apache-2.0.",
        "",
        "| package | version | MiB | licence |",
        "|---|---|---:|---|",
    ]
    lines += [f"| {name} | {one['version']} | {one['mib']:,} | {one['licence']} |" for name, one in packages.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(map(Path, sys.argv[1:])), indent=1) + "\n", encoding="utf-8")
