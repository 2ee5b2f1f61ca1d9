"""`silofl compose` and the images: the committed file, the command lines in it, what each container gets to see."""

import ast
import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from failing import fails
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from packaging.requirements import Requirement

from client.protocol.node import Site, supernode_command
from client.site.runtime.supernode import argument_parser
from requirements.lock import requirements
from server.cli.main import main
from server.deploy.compose import compose_file
from server.deploy.federation import read_federation

ROOT = Path(__file__).resolve().parents[3]
SILOS = [f"hospital-{number:02d}" for number in range(1, 13)]


def federation_of(folder, text):
    path = folder / "federation.yaml"
    path.write_text(text)
    return read_federation(path, check_data=False)


def made(federation):
    """The compose file as compose reads it; its `<<` merges are YAML's own."""
    return yaml.safe_load(compose_file(federation, ROOT, ROOT))


@pytest.fixture(scope="module")
def committed():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_the_committed_file_is_what_silofl_compose_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["compose"]) == 0
    assert capsys.readouterr().out == (ROOT / "docker-compose.yml").read_text()


def test_health_checks_bear_a_busy_machine():
    """Twelve silos on two cores take minutes to start; `up --wait` ends at the first that is unhealthy."""
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    spec = importlib.util.spec_from_file_location("health", ROOT / "docker/health.py")
    assert spec is not None and spec.loader is not None
    health = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(health)
    checks = [
        {key: int(value) for key, value in re.findall(r"--([a-z-]+)=(\d+)", line)}
        for line in re.findall("^HEALTHCHECK (.*) CMD", dockerfile, re.MULTILINE)
    ]
    assert len(checks) == 2
    for check in checks:
        assert check["start-period"] >= 900 and check["interval"] * check["retries"] >= 60
        assert check["timeout"] > 2 * health.SECONDS >= 20


def test_silos_run_the_app_of_the_images_checkout_and_no_other_by_default(committed):
    """A server that ships another is refused (test_answering.py, test_docker.py); one variable allows it."""
    wanted = "${SILOFL_ALLOWED_APPS-/opt/silofl/allowed-apps}"
    told = {
        silo: committed["services"][silo]["environment"]["SILOFL_ALLOWED_APPS"]
        for silo in SILOS
    }
    assert told == dict.fromkeys(SILOS, wanted)
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert (
        "client.flower.apps /src > /allowed-apps" in dockerfile
        and "mv /allowed-apps /opt/silofl/" in dockerfile
    )


def test_twelve_silos_a_server_and_a_setup(committed):
    assert list(committed["services"]) == ["setup", "superlink", "relay", *SILOS]
    assert [n for n, one in committed["services"].items() if "profiles" in one] == ["relay"]


@pytest.mark.parametrize("silo", SILOS)
def test_silos_command_is_understood_by_our_parser(committed, silo):
    program, *arguments = committed["services"][silo]["command"]
    assert program == "flower-supernode"
    parsed = argument_parser().parse_args(arguments)
    assert (parsed.superlink, parsed.port) == ("superlink:9092", None)
    assert (parsed.root_certificates, parsed.auth_supernode_private_key) == (
        Path("/site/ca.crt"),
        Path("/site/node.key"),
    )
    assert parse_config_args([parsed.node_config]) == {
        "name": silo,
        "data": "/data/data.npz",
        "device": "cpu",
        "state-dir": "/state",
    }


def test_servers_command_is_understood_by_flowers_own_parser(committed):
    program, *arguments = committed["services"]["superlink"]["command"]
    assert program == "flower-superlink"
    parsed = _parse_args_run_superlink().parse_args(arguments)
    assert not parsed.insecure and parsed.enable_supernode_auth
    assert parsed.ssl_ca_certfile and parsed.ssl_certfile and parsed.ssl_keyfile
    assert parsed.fleet_api_address == "0.0.0.0:9092"
    assert (parsed.host, parsed.port) == ("control", 8000)
    assert not parsed.runtime_dependency_install


@pytest.mark.parametrize("silo", SILOS)
def test_environment_and_command_of_a_silo_say_the_same(committed, silo):
    """`silofl doctor` in the container goes by the environment, the SuperNode by its command line."""
    service = committed["services"][silo]
    assert (
        supernode_command(Site.from_environment(service["environment"])) == service["command"]
    )


@pytest.mark.parametrize("service", ["setup", "superlink", "relay", *SILOS])
def test_every_container_is_locked_down(committed, service):
    found = committed["services"][service]
    assert found["init"] is True and found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in found and "network_mode" not in found
    assert found.get("cap_add", []) == (
        ["CHOWN", "SETGID", "SETUID"] if service == "setup" else []
    )
    assert found.get("user", "") == ("0:0" if service == "setup" else "")


def test_a_silo_sees_its_own_volumes_and_the_fleet_network_alone(committed):
    for silo in SILOS:
        service = committed["services"][silo]
        assert service["networks"] == ["fleet"]
        assert "ports" not in service
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        assert sources == [f"{silo}-site", f"{silo}-state", f"{silo}-head", f"{silo}-data"]
        readonly = [volume for volume in service["volumes"] if volume.endswith(":ro")]
        assert readonly == [f"{silo}-site:/site:ro", f"{silo}-data:/data:ro"]
    assert committed["networks"]["fleet"] == {"internal": True}


def test_control_port_is_published_on_loopback_and_its_name_lives_on_the_control_network(
    committed,
):
    server = committed["services"]["superlink"]
    assert server["ports"] == ["127.0.0.1:9092:9092", "127.0.0.1:8000:8000"]
    assert server["networks"] == {"fleet": {}, "control": {"aliases": ["control"]}}
    assert committed["services"]["setup"]["networks"] == ["control"]


def test_ca_key_is_in_no_volume_of_server_or_silos(committed):
    """`setup` alone mounts the volume in which the CA's key lies."""
    users = [
        name
        for name, service in committed["services"].items()
        if any(str(volume).startswith("setup:") for volume in service["volumes"])
    ]
    assert users == ["setup"]


def test_server_with_an_address_listens_for_other_machines(tmp_path):
    federation = federation_of(
        tmp_path,
        "name: net\nserver: {address: fed.example.org, fleet-port: 443, control-port: 8123, "
        "public: 'fl.example.org:8443'}\n"
        "demo: {dataset: digits}\nsilos: [{name: a, data: demo}]\n",
    )
    services = made(federation)["services"]
    assert services["superlink"]["ports"] == ["443:9092", "127.0.0.1:8123:8000"]
    assert {"fed.example.org", "fl.example.org"} <= set(
        services["setup"]["environment"]["SILOFL_HOSTS"].split()
    )
    assert (
        services["superlink"]["environment"]["SILOFL_HOSTS"]
        == services["setup"]["environment"]["SILOFL_HOSTS"]
    )


MIG = "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"


def test_gpu_silos_get_their_gpu_and_know_it_as_cuda_0(tmp_path):
    federation = federation_of(
        tmp_path,
        "name: net\ndemo: {dataset: digits}\nsilos:\n"
        "  - {name: a, device: 'cuda:1', data: demo, memory: 8g}\n  - {name: b, data: demo}\n"
        "  - {name: c, device: 'cuda:0', data: demo}\n"
        f"  - {{name: d, device: '{MIG}', data: demo, gpu-share: 0.5}}\n"
        "  - {name: e, device: '0:1', data: demo}\n"
        "  - {name: f, device: ['cuda:2', 'cuda:3'], data: demo}\n"
        "  - {name: g, device: [cpu, cpu], data: demo}\n",
    )
    services = made(federation)["services"]
    for name, device in (("d", MIG), ("e", "0:1")):
        (reserved,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["device_ids"] == [device]
        assert services[name]["environment"]["SILOFL_DEVICE"] == "cuda:0"
    assert str(services["d"]["environment"]["SILOFL_GPU_SHARE"]) == "0.5"
    assert "SILOFL_GPU_SHARE" not in services["e"]["environment"]
    devices = services["a"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["1"], "capabilities": ["gpu"]}]
    assert services["a"]["image"].endswith("-gpu") and services["a"]["mem_limit"] == "8g"
    assert services["a"]["build"]["args"] == ["SILOFL_BASE", "TORCH_INDEX="]
    assert services["a"]["environment"]["SILOFL_DEVICE"] == "cuda:0"
    assert "device='cuda:0'" in services["a"]["command"][-1]
    several = services["f"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert several["device_ids"] == ["2", "3"]
    assert services["f"]["environment"]["SILOFL_DEVICE"] == "cuda:0,cuda:1"
    assert services["f"]["image"] == services["a"]["image"]
    assert "deploy" not in services["g"] and services["g"]["image"] == services["b"]["image"]
    assert services["g"]["environment"]["SILOFL_DEVICE"] == "cpu,cpu"
    assert "deploy" not in services["b"] and services["b"]["build"]["args"] == ["SILOFL_BASE"]
    assert services["c"]["image"] == services["a"]["image"] and "build" not in services["c"]


def test_a_silos_own_file_is_mounted_read_only_and_never_made_up(tmp_path):
    (tmp_path / "own $1.npz").touch()
    federation = federation_of(tmp_path, "name: net\nsilos: [{name: a, data: 'own $1.npz'}]\n")
    services = made(federation)["services"]
    mount = services["a"]["volumes"][-1]
    # Compose would create a missing folder, and the silo would train on an empty mount.
    assert mount == {
        "type": "bind",
        "source": str(tmp_path / "own $$1.npz"),
        "target": "/data/data.npz",
        "read_only": True,
        "bind": {"create_host_path": False},
    }
    assert not any("-data:" in str(volume) for volume in services["setup"]["volumes"])


def test_a_silos_policy_is_mounted_and_only_demo_data_are_public(tmp_path):
    (tmp_path / "own.npz").touch()
    (tmp_path / "strict.toml").write_text("peers = false\n")
    federation = federation_of(
        tmp_path,
        "name: net\ndemo: {dataset: digits, partition: iid}\nsilos:\n"
        "  - {name: a, data: demo}\n  - {name: b, data: own.npz}\n"
        "  - {name: c, data: own.npz, policy: strict.toml}\n  - {name: d, data: demo, policy: strict.toml}\n"
        "  - {name: e, data: own.npz, policy: public}\n",
    )
    services = made(federation)["services"]
    told = {name: services[name]["environment"]["SILOFL_POLICY"] for name in "abcde"}
    assert told == {
        "a": "public",
        "b": "",
        "c": "/policy.toml",
        "d": "/policy.toml",
        "e": "public",
    }
    for name in "cd":
        mount = services[name]["volumes"][-1]
        assert (mount["source"], mount["target"]) == (
            str(tmp_path / "strict.toml"),
            "/policy.toml",
        )
        assert mount["read_only"] and not mount["bind"]["create_host_path"]
    (tmp_path / "strict.toml").write_text("peer = false\n")
    with pytest.raises(
        ValueError, match=r"strict.toml: 'peer' is no key of it \(did you mean 'peers'"
    ):
        read_federation(tmp_path / "federation.yaml")


def test_setup_reads_back_the_federation_that_it_is_told(tmp_path):
    """The federation file in `setup`'s environment, dollars doubled for compose, is the same federation."""
    (tmp_path / "own $1.npz").touch()
    federation = federation_of(
        tmp_path,
        "name: net\ndemo: {dataset: digits, partition: iid, seed: 7}\n"
        "silos: [{name: a, data: demo}, {name: b, data: 'own $1.npz'}]\n",
    )
    text = made(federation)["services"]["setup"]["environment"]["SILOFL_FEDERATION"].replace(
        "$$", "$"
    )
    copy = tmp_path / "copy.yaml"
    copy.write_text(text)
    again = read_federation(copy, check_data=False)
    assert (again.name, again.demo) == (federation.name, federation.demo)
    assert [(silo.name, silo.data) for silo in again.silos] == [
        (silo.name, silo.data) for silo in federation.silos
    ]


@pytest.mark.parametrize("name", ["setup", "superlink"])
def test_names_of_our_own_services_are_refused(tmp_path, name):
    federation = federation_of(
        tmp_path,
        f"name: net\ndemo: {{dataset: digits}}\nsilos: [{{name: {name}, data: demo}}]\n",
    )
    fails(ValueError, f"silo {name}: .* another name", compose_file, federation, ROOT, ROOT)


def test_missing_data_are_one_line_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "federation.yaml"
    path.write_text("name: net\nsilos: [{name: a, data: nowhere.npz}]\n")
    assert main(["compose", str(path), "--out", str(tmp_path / "out.yml")]) == 2
    assert re.fullmatch(
        r"silofl compose: .*silos\.1\.data = .*: there is no file .*\n", capsys.readouterr().err
    )
    assert not (tmp_path / "out.yml").exists()


# --- the images -------------------------------------------------------------------------------------------


def imports_of(package):
    """Top-level names that the modules of a package import when they are imported."""
    names = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module).partition(".")[0])
    return names


@pytest.mark.exhaustive
def test_a_silos_image_has_what_a_silo_imports():
    """Every third-party module that models, strategies, partitions and client import is a requirement of the
    silo's image, or comes with one that is (requirements of requirements, by the installed metadata)."""
    listed = requirements("silo", (ROOT / "pyproject.toml").read_text())
    wanted = [Requirement(requirement) for requirement in listed]
    installed = set()
    while wanted:
        requirement = wanted.pop()
        name = requirement.name.lower().replace("_", "-")
        if name not in installed and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            installed.add(name)
            wanted += map(Requirement, importlib.metadata.requires(name) or [])
    providers = importlib.metadata.packages_distributions()
    ours = {"models", "strategies", "partitions", "client", "server"}
    used = set().union(*(imports_of(package) for package in ours - {"server"}))
    third_party = used - ours - set(sys.stdlib_module_names)
    assert {"torch", "numpy", "flwr", "safetensors"} <= third_party
    lacking = {
        name
        for name in third_party
        if not {p.lower().replace("_", "-") for p in providers.get(name, [name])} & installed
    }
    assert lacking == set()


def test_requirements_of_the_images_come_from_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    silo, server = requirements("silo", text), requirements("server", text)
    assert set(silo) < set(server)
    assert "flwr==1.42.*" in silo
    assert not any(
        requirement.startswith(("scikit-learn", "matplotlib", "torchvision"))
        for requirement in silo
    )
    # The built-in data sets
    assert any(requirement.startswith("scikit-learn") for requirement in server)


def test_dockerfile_asks_no_registry_for_its_syntax_and_runs_as_a_plain_user():
    text = (ROOT / "docker/Dockerfile").read_text()
    assert "# syntax" not in text
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    image = next(stage for stage in stages if stage.split("\n")[0].endswith("AS image"))
    assert re.search(r"^USER 10001:10001$", image, flags=re.MULTILINE)
    assert not any("USER root" in stage for stage in stages)
    entry = shlex.split(
        re.search(r"^ENTRYPOINT \[(.*)\]", image, flags=re.MULTILINE)[1].replace(",", " ")  # type: ignore[index]
    )
    assert entry == ["python", "/opt/silofl/entry.py"]
    # No key, no data and no wheel of this checkout gets into a layer: everything not named is left out.
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert ignore[0] == "*" and "docker/wheels" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == {
        *("pyproject.toml", "README.md", "LICENSE", "docker", "requirements"),
        *("models", "strategies", "partitions", "client", "server"),
    }
