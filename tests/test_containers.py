"""Containers: Dockerfiles by hadolint, manifests by Kubernetes' schemas, and files, images and options that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from patience import HANG_S
from trt_engine.verbs.serve import command as serve

ROOT = Path(__file__).parents[1]
HERE = ROOT / "environments"
COMPOSE = yaml.safe_load((HERE / "compose" / "compose.yaml").read_text())
DOCKERFILES = sorted(HERE.glob("Dockerfile.*"))
MANIFESTS = sorted((HERE / "kubernetes").glob("*.yaml"))
TOOLS = "hadolint and kubernetes-validate are installed by `make test-full` (tools/test-tools.sh)"


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip(TOOLS)
    done = subprocess.run(
        [program, "--config", HERE / ".hadolint.yaml", path], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_all_that_building_the_package_reads(path: Path) -> None:
    text = path.read_text()
    if "COPY" not in text:
        return
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    needed = {hatch["metadata"]["hooks"]["custom"]["path"], *hatch["build"]["targets"]["wheel"]["only-include"]}
    needed |= {"pyproject.toml", "README.md", "LICENSE", "NOTICE"}
    copied = {source for line in re.findall(r"^COPY (.+)$", text, re.M) for source in line.split()[:-1]}
    for name in needed:
        assert any(name == source or name.startswith(f"{source}/") for source in copied), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in MANIFESTS if path.name != "kustomization.yaml"], ids=lambda p: p.name
)
def test_a_manifest_fits_the_schema_of_kubernetes(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason=TOOLS)
    manifest = yaml.safe_load(path.read_text())
    validator.validate(manifest, "1.30", strict=True)
    manifest["spec"]["no-such-field"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(manifest, "1.30", strict=True)


def documents() -> dict[str, Any]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in MANIFESTS}


def test_the_base_lists_its_files_and_names_fit_together() -> None:
    found = documents()
    assert {path.name for path in MANIFESTS} == {*found["kustomization"]["resources"], "kustomization.yaml"}
    spec = found["deployment"]["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    ports = {item["name"]: item["containerPort"] for item in server["ports"]}
    assert {item["targetPort"]: item["port"] for item in found["service"]["spec"]["ports"]} == ports
    assert {item["name"] for item in spec["volumes"]} == {item["name"] for item in server["volumeMounts"]}
    claims = {item["persistentVolumeClaim"]["claimName"] for item in spec["volumes"] if "persistentVolumeClaim" in item}
    assert claims == {found["models"]["metadata"]["name"]}
    labels = found["deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= found["deployment"]["spec"]["selector"]["matchLabels"].items()
    assert labels.items() >= found["service"]["spec"]["selector"].items()
    assert {item["name"] for item in found["kustomization"]["images"]} == {server["image"]}


def test_the_server_s_pod_has_no_rights_and_is_probed_where_the_server_answers() -> None:
    spec = documents()["deployment"]["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    user = re.search(r"^USER (\d+):(\d+)$", (HERE / "Dockerfile.serve").read_text(), re.M)
    assert user and spec["securityContext"]["runAsNonRoot"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == tuple(
        map(int, user.groups())
    )
    assert server["securityContext"]["readOnlyRootFilesystem"] and server["securityContext"]["capabilities"][
        "drop"
    ] == ["ALL"]
    source = (ROOT / "src/trt_engine/verbs/serve/http_app.py").read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = server[probe]["httpGet"]["path"]
        assert path in ("/v2/health/live", "/v2/health/ready")
        assert path in source or {"health", path.rpartition("/")[2]} <= set(re.findall(r"\w+", source))
    assert server["readinessProbe"]["httpGet"]["path"].endswith("ready")
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "1"


def options() -> set[str]:
    return {name for item in serve.command.params for name in item.opts}


def test_the_arguments_of_the_server_are_options_of_serve() -> None:
    (server,) = documents()["deployment"]["spec"]["template"]["spec"]["containers"]
    command = json.loads(re.search(r"^CMD (\[.+)$", (HERE / "Dockerfile.serve").read_text(), re.M)[1])  # type: ignore[index]
    for words in (server["args"], command):
        assert words[0] == "serve"
        assert {word for word in words if word.startswith("--")} <= options()


def test_compose_pins_its_images_and_mounts_what_is_there() -> None:
    folder = HERE / "compose"
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", service["image"]), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (folder / source).resolve().is_file(), source
            else:
                assert source in COMPOSE["volumes"] or source.startswith("$"), source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "reached from this machine alone"
    build = COMPOSE["services"]["server"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == HERE / "Dockerfile.serve"


def test_prometheus_reads_the_server_and_grafana_reads_prometheus() -> None:
    folder = HERE / "compose"
    (job,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    exposed = re.search(r"^EXPOSE (.+)$", (HERE / "Dockerfile.serve").read_text(), re.M)
    assert (
        target.partition(":")[0] in COMPOSE["services"] and exposed and target.partition(":")[2] in exposed[1].split()
    )
    (source,) = yaml.safe_load((folder / "grafana/datasources.yaml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert host in COMPOSE["services"] and COMPOSE["services"][host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (provider,) = yaml.safe_load((folder / "grafana/dashboards.yaml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert any(mount.startswith(provider["options"]["path"] + "/") for mount in mounts)
