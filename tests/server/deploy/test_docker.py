"""End to end with a real Docker engine: twelve silos in containers, a thirteenth that joins from elsewhere.

Runs where an engine answers, or can be started: as root on Debian, by `docker-engine.sh`, which also takes it
away again. Elsewhere it is skipped and says why. The tests stand in the order of a federation's life, and each builds
on what those before it did.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

import pytest
from archives import untar
from debian13 import copy_checkout, torch_wheel
from safetensors.torch import load_file
from tiny import events_of, history_without_seconds, summary_of

from client.protocol.launch import FLOWER
from server.deploy.credentials import ensure_credentials
from server.results.history import History

ROOT = Path(__file__).resolve().parents[3]
# One place, so that the next start finds what a crash has left
ENGINE = Path("/var/tmp/silofl-docker-test")
NAME = "endtoend"
SILOS = [f"hospital-{number:02d}" for number in range(1, 13)]
THIRTEENTH = "clinic-13"
STUDY = "thirteen"
TEXTS = tuple(
    word
    for text in ("purpose", "contact", "results", "retention")
    for word in (f"--{text}", "a text")
)
NEW_STUDY = (*f"--name {STUDY} --strategy fedala --rounds 2 --set silos=13".split(), *TEXTS)
IMAGES = [f"silofl-{part}:{metadata.version('silofl')}" for part in ("server", "silo")]

pytestmark = [pytest.mark.deployed, pytest.mark.docker, pytest.mark.timeout(1800)]


def run(*command, check=True, timeout=300, **keywords):
    """A command that must succeed, unless `check` is False; its output is in the failure."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **keywords)
    if check and done.returncode:
        pytest.fail(
            f"{words}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)


def environment(**own):
    """This shell's variables, without those that would stand above a compose file's `.env`."""
    return {
        key: value for key, value in os.environ.items() if not key.startswith("SILOFL_")
    } | own


# --- the engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    """The engine that answers, or one of our own for as long as this file's tests take."""
    with contextlib.ExitStack() as stack:
        # The names of containers and networks are fixed: one such test on a machine at a time.
        lock = os.open(ENGINE.parent, os.O_RDONLY)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.skip("this test is running on this machine already")
        if not docker_answers("version"):
            script = ROOT / "tests/server/deploy/docker-engine.sh"
            # Removes gigabytes
            stack.callback(run, "bash", script, "stop", ENGINE, timeout=800)
            started = run("bash", script, "start", ENGINE, check=False, timeout=600)
            if started.returncode:
                pytest.skip(
                    f"no Docker engine answers: {(started.stdout + started.stderr).splitlines()[-1]}"
                )
            variables = stack.enter_context(pytest.MonkeyPatch.context())
            variables.setenv("DOCKER_HOST", f"unix://{ENGINE}/docker.sock")
            variables.setenv("DOCKER_CONFIG", f"{ENGINE}/config")
        elif not (docker_answers("compose", "version") and docker_answers("buildx", "version")):
            pytest.skip("a Docker engine answers, but its Compose or Buildx is not installed")
        yield


def docker_answers(*command):
    return (
        shutil.which("docker") is not None
        and run("docker", *command, check=False).returncode == 0
    )


# --- twelve silos and a server ----------------------------------------------------------------------------


def own_address():
    """The address at which other machines, and other container networks, reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # a documentation address; nothing is sent
        return str(probe.getsockname()[0])


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """The federation under test, operated from the host as a user would."""

    def __init__(self, folder, name, silos):
        self.source = folder / "silofl"
        copy_checkout(self.source)
        self.runs = self.source / "runs" / name
        self.address, self.fleet, self.control = own_address(), free_port(), free_port()
        silos = "".join(f"  - {{name: {name}, data: demo}}\n" for name in silos)
        (self.source / "federation.yaml").write_text(
            f"name: {name}\n"
            f"server: {{address: {self.address}, fleet-port: {self.fleet}, control-port: {self.control}}}\n"
            f"demo: {{dataset: digits, partition: dirichlet, seed: 42}}\nsilos:\n{silos}"
        )
        torch_wheel(folder / "wheels")
        self.environment = environment(
            PYTHONPATH=str(self.source),
            FLWR_HOME=str(folder / "flower"),
            **FLOWER,
            XDG_STATE_HOME=str(folder / "state"),
            BUILDKIT_PROGRESS="plain",
            SILOFL_WHEELS=str(folder / "wheels"),
        )
        self.seconds: dict[str, float] = {}

    def host(self, *command, check=True):
        return run(*command, check=check, timeout=1200, cwd=self.source, env=self.environment)

    def compose(self, *arguments, check=True):
        return self.host("docker", "compose", *arguments, check=check)

    def timed(self, *arguments):
        """A compose command whose seconds are noted."""
        start = time.monotonic()
        self.compose(*arguments)
        self.seconds[arguments[0]] = time.monotonic() - start

    def inside(self, service, *command, check=True):
        return self.compose("exec", "-T", service, *command, check=check)

    def container(self, service):
        number = self.compose("ps", "--all", "--quiet", service).stdout.strip()
        return json.loads(run("docker", "inspect", number).stdout)[0]

    def state_of(self, name):
        """Of a run, as an operator sees it; empty while the server does not answer."""
        listed = self.host("silofl", "runs", "--json", check=False)
        runs = json.loads(listed.stdout) if listed.returncode == 0 else []
        return "".join(run["state"] for run in runs if run["name"] == name)

    def flower_run(self, config):
        """`flwr run`; the directory of the run on the host."""
        before = set(self.runs.iterdir())
        done = self.host("flwr", "run", ".", NAME, "--stream", "--run-config", config)
        made = set(self.runs.iterdir()) - before
        assert len(made) == 1, f"{made}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return made.pop()

    def kill(self, service):
        """SIGKILL to the first process of a container, which Docker takes for a crash; what it was before."""
        state = self.container(service)["State"]
        where = f"--rm --pid host --user 0 --network none --entrypoint sh {IMAGES[1]}"
        run("docker", "run", *where.split(), "-c", f"kill -9 {state['Pid']}")
        return state


def images():
    return set(
        run("docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    )


def wait_for_round(directory, number, seconds):
    """Wait until a run has ended this round."""
    progress = directory / "progress.jsonl"
    wait_until(
        lambda: progress.exists() and f'"round": {number},' in progress.read_text(),
        seconds,
        f"round {number}",
    )


@contextlib.contextmanager
def deployed(name, silos):
    with tempfile.TemporaryDirectory(prefix="silofl-", ignore_cleanup_errors=True) as folder:
        made = Deployment(Path(folder), name, silos)
        had = images()
        made.host("silofl", "compose", "--out", "docker-compose.yml")
        try:
            made.timed("build")
            made.timed("up", "--detach", "--wait", "--wait-timeout", "600")
            made.host("silofl", "credentials")
            yield made
        finally:
            # pytest shows it where setup failed
            print(made.compose("logs", "--tail", "30", check=False).stdout)
            made.compose(
                "--profile", "relay", "down", "--volumes", "--timeout", "5", check=False
            )
            for image in sorted({*IMAGES} & images() - had):
                run("docker", "image", "rm", image, check=False)


@pytest.fixture(scope="module")
def deployment(engine):
    with deployed(NAME, SILOS) as made:
        yield made


@pytest.fixture
def three(engine):
    with deployed("three", SILOS[:3]) as made:
        yield made


# --- the thirteenth ---------------------------------------------------------------------------------------


class Clinic:
    """A hospital elsewhere: a folder with an unpacked bundle, in a compose project and network of its own."""

    def __init__(self, tar, folder):
        untar(tar, folder)
        self.folder = folder / THIRTEENTH
        self.data = folder / "own.npz"

    def set(self, key, value):
        path = self.folder / ".env"
        lines = [
            line for line in path.read_text().splitlines() if not line.startswith(f"{key}=")
        ]
        path.write_text("\n".join([*lines, f"{key}={value}"]) + "\n")

    def compose(self, *arguments, check=True, project=THIRTEENTH, input=None):
        command = ("docker", "compose", "--project-name", project, *arguments)
        return run(*command, check=check, cwd=self.folder, env=environment(), input=input)

    def up(self, *options):
        self.compose("up", "--detach", "--wait", "--wait-timeout", "120", *options)

    def down(self, project=THIRTEENTH):
        self.compose(
            "down",
            "--volumes",
            "--remove-orphans",
            "--timeout",
            "5",
            check=False,
            project=project,
        )

    def inside(self, *command, input=None):
        return self.compose("exec", "-T", "silo", *command, input=input).stdout

    def log(self, project=THIRTEENTH):
        done = self.compose("logs", "--no-color", "silo", check=False, project=project)
        return done.stdout + done.stderr

    def refusal(self):
        """What a start of the silo ends with: exit code 2 and one line."""
        try:
            done = self.compose("run", "--rm", "-T", "silo", check=False, project="refused")
        finally:
            self.down("refused")
        output = done.stdout + done.stderr
        lines = [line for line in output.splitlines() if line.startswith("silofl: ")]
        assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in output, output
        return lines[0]


@pytest.fixture(scope="module")
def clinic(deployment):
    with tempfile.TemporaryDirectory(prefix="silofl-", ignore_cleanup_errors=True) as folder:
        tar = Path(folder, f"{THIRTEENTH}.tar")
        deployment.host("silofl", "add-silo", THIRTEENTH, "--out", tar)
        assert tar.stat().st_mode & 0o777 == 0o600
        made = Clinic(tar, Path(folder))
        deployment.compose("cp", "hospital-07:/data/data.npz", str(made.data))
        made.data.chmod(0o644)  # readable for the silo's user
        made.set("SILOFL_DATA", str(made.data))
        try:
            yield made
        finally:
            made.down()


def silos_of(run_directory, *, round_):
    """The silos that have metrics of their personal model in a round."""
    rows = History(run_directory / "history.csv").rows
    return {row.silo for row in rows if row.round == round_ and row.snapshot == "personal"} - {
        ""
    }


# --- twelve silos -----------------------------------------------------------------------------------------


def test_twelve_silos_are_healthy(deployment, capsys):
    expected = dict.fromkeys(["superlink", *SILOS], "healthy")
    assert {
        name: deployment.container(name)["State"]["Health"]["Status"] for name in expected
    } == expected
    assert deployment.container("setup")["State"]["ExitCode"] == 0
    sizes = {
        name: json.loads(run("docker", "image", "inspect", name).stdout)[0]["Size"]
        for name in IMAGES
    }
    with capsys.disabled():
        print(
            *(
                f"\n{command}: {seconds:.0f} s"
                for command, seconds in deployment.seconds.items()
            ),
            end="",
        )
        print(*(f"\n{name}: {size / 1e9:.2f} GB" for name, size in sizes.items()))
    assert sizes[IMAGES[1]] < 1.3e9


def test_containers_are_locked_down(deployment):
    for service in ("superlink", "hospital-01", "hospital-12"):
        container = deployment.container(service)
        assert container["Config"]["User"] == "10001:10001"
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"] and host["Init"] and not host["Privileged"]
        assert host["CapDrop"] == ["ALL"] and not host["CapAdd"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        looked = deployment.inside(
            service,
            "sh",
            "-c",
            "id -u; touch /opt/x /data/x 2>&1 | wc -l; command -v gcc cc pip uv uvx || echo none",
        )
        assert looked.stdout.split() == ["10001", "2", "none"]


def test_a_silo_has_its_own_data_and_its_own_key_alone(deployment):
    listing = "ls /data /site; stat -c %a /site/node.key /site/ca.crt; sha256sum /data/data.npz /site/node.key"
    seen = [
        deployment.inside(silo, "sh", "-c", listing).stdout.split()
        for silo in ("hospital-01", "hospital-02")
    ]
    for words in seen:
        assert words[:7] == ["/data:", "data.npz", "/site:", "ca.crt", "node.key", "600", "600"]
    assert seen[0][7] != seen[1][7] and seen[0][9] != seen[1][9]
    outside = (
        "cat /setup/credentials/ca.key /server/server.key /volumes/site/hospital-02/node.key"
    )
    tried = deployment.inside("hospital-01", "sh", "-c", outside, check=False)
    assert tried.returncode and not tried.stdout


def test_no_secret_is_in_an_image_or_in_a_log(deployment):
    for service in ("setup", "hospital-01"):
        image = deployment.container(service)["Image"]
        found = run(
            *f"docker run --rm --network none --entrypoint sh {image} -c".split(),
            "ls -A /site /server /data /state /runs | grep -v : ; "
            "grep -rlE '^-----BEGIN .*PRIVATE KEY' /opt/silofl /tmp",
            check=False,
        )
        assert found.stdout.split() == []
    assert "PRIVATE KEY" not in deployment.compose("logs", "--no-color").stdout


KNOCK = """
import socket, sys
for target in sys.argv[1:]:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print("open")
    except OSError:
        print("closed")
"""


def knock(deployment, service, targets):
    return deployment.inside(service, "python", "-c", KNOCK, *targets).stdout.split()


def test_no_silo_opens_the_control_port(deployment):
    networks = deployment.container("superlink")["NetworkSettings"]["Networks"]
    control, fleet = (networks[f"{NAME}_{name}"]["IPAddress"] for name in ("control", "fleet"))
    gateways = [network["Gateway"] for network in networks.values() if network["Gateway"]]
    doors = [
        "superlink:8000",
        f"{fleet}:8000",
        "control:8000",
        f"{control}:8000",
        f"{deployment.address}:{deployment.control}",
    ]
    doors += [f"{gateway}:{deployment.control}" for gateway in gateways]
    for silo in ("hospital-01", "hospital-12"):
        assert knock(deployment, silo, ["superlink:9092", *doors]) == [
            "open",
            *["closed"] * len(doors),
        ]
    # The same knock finds the port where it is: at the server itself, and on this machine's loopback interface only.
    assert knock(deployment, "superlink", [f"{control}:8000", f"{fleet}:8000"]) == [
        "open",
        "closed",
    ]
    socket.create_connection(("127.0.0.1", deployment.control), timeout=3).close()
    with pytest.raises(OSError):
        socket.create_connection((deployment.address, deployment.control), timeout=3)


def test_doctor_finds_server_and_silo_well(deployment):
    server = deployment.host("silofl", "doctor", "federation.yaml")
    assert "ok    online: all 12 silos" in server.stdout
    assert (
        f"ok    control port's reach: {deployment.address}:{deployment.control} is closed"
        in server.stdout
    )
    silo = deployment.inside("hospital-03", "silofl", "doctor")
    assert "ok    key: registered at the server" in silo.stdout and "FAIL" not in silo.stdout


def test_flwr_run_trains_apple_and_leaves_history_and_report_on_the_host(deployment, tmp_path):
    directory = deployment.flower_run('strategy="apple" rounds=2')
    assert silos_of(directory, round_=2) == set(SILOS)
    summary = summary_of(directory)
    assert summary["runs"][0]["strategy"] == "apple" and summary["runs"][0]["silos"] == SILOS
    assert (directory / "report.html").stat().st_size > 10_000
    # The models are where they belong: in the silos' volumes, from where a hospital takes its own.
    assert not list(directory.rglob("hospital-*"))
    states = f"/state/{directory.name}"
    kept = deployment.inside(
        "hospital-03", "find", "/state", "-name", "*.safetensors"
    ).stdout.split()
    assert kept and all(path.startswith(f"{states}/apple-42/hospital-03/") for path in kept)
    chosen = ("--silo", "hospital-03", "--strategy", "apple", "--out", "/state/own.safetensors")
    deployment.inside("hospital-03", "silofl", "export", states, *chosen)
    deployment.compose("cp", "hospital-03:/state/own.safetensors", str(tmp_path))
    assert (
        sum(tensor.numel() for tensor in load_file(tmp_path / "own.safetensors").values()) > 0
    )


def test_another_app_than_the_images_is_refused_by_every_silo(deployment, tmp_path):
    """A server that ships a changed app: the silos' images carry the sum of the checkout that they were built from."""
    assert "1 pinned by SHA-256" in deployment.inside("hospital-01", "silofl", "doctor").stdout
    changed = tmp_path / "changed"
    shutil.copytree(deployment.source, changed, ignore=shutil.ignore_patterns("runs"))
    with (changed / "client/app.py").open("a") as file:
        file.write("\n# a line more\n")
    config = 'strategy="fedavg" rounds=1 round-timeout=60.0'
    command = ("flwr", "run", str(changed), NAME, "--stream", "--run-config", config)
    done = run(*command, check=False, timeout=300, cwd=changed, env=deployment.environment)
    logs = deployment.compose("logs", "--no-color", *SILOS).stdout
    refusal = "refused: its SHA-256 is not among the 1 listed in /opt/silofl/allowed-apps"
    named = {
        silo for silo in SILOS for line in logs.splitlines() if silo in line and refusal in line
    }
    assert named == set(SILOS), done.stdout[-2000:]


# --- a thirteenth that joins from elsewhere ---------------------------------------------------------------


def test_a_wrong_ca_an_unknown_key_and_no_data_are_refused_with_one_line(
    deployment, clinic, tmp_path
):
    foreign = ensure_credentials(tmp_path / "foreign", silos=["x"], hosts=[deployment.address])
    for name, other, reason in (
        (
            "ca.crt",
            foreign.ca_certificate,
            "certificate chain: not issued by this federation's CA",
        ),
        ("node.key", foreign.node_key("x"), "key: the server does not know this silo's key"),
    ):
        own = (clinic.folder / name).read_bytes()
        (clinic.folder / name).write_bytes(other.read_bytes())
        assert reason in clinic.refusal()
        (clinic.folder / name).write_bytes(own)
    clinic.set("SILOFL_DATA", str(tmp_path))
    assert "data: /data/data.npz is a folder, no file" in clinic.refusal()
    clinic.set("SILOFL_DATA", str(clinic.data))


def test_an_app_that_the_site_has_not_pinned_is_refused(deployment, clinic):
    pins = clinic.folder / "allowed-apps"
    own = pins.read_text()
    pins.write_text("0" * 64 + "\n")
    before = {silo: deployment.container(silo)["State"]["StartedAt"] for silo in SILOS}
    clinic.up()
    # Nobody else noticed that a hospital joined.
    assert {silo: deployment.container(silo)["State"]["StartedAt"] for silo in SILOS} == before
    # The others go on without it
    done = deployment.host("silofl", "run", "--strategy", "fedala", "--rounds", "1")
    told = done.stdout + done.stderr
    assert "refused: its SHA-256 is not among the 1 listed" in clinic.log()
    assert (
        "is not among the 1 listed" in told and "12 silos" in told and "Traceback" not in told
    )
    pins.write_text(own)
    clinic.up("--force-recreate")


def test_thirteen_silos_train_fedala(deployment, clinic, tmp_path):
    """The thirteenth goes over a link, to the relay's service, which speaks TLS itself."""
    outer, port = (
        ensure_credentials(tmp_path, silos=(), hosts=(deployment.address,)),
        free_port(),
    )
    relay = deployment.source / "relay"
    relay.mkdir()
    for made, name in ((outer.server_certificate, "chain.pem"), (outer.server_key, "key.pem")):
        (relay / name).write_bytes(made.read_bytes())
    deployment.environment |= {"SILOFL_RELAY": str(port), "SILOFL_RELAY_TLS": str(relay)}
    deployment.compose("--profile", "relay", "up", "--detach", "relay")
    (clinic.folder / "via-ca.crt").write_bytes(outer.ca_certificate.read_bytes())
    clinic.set("SILOFL_VIA", f"https://{deployment.address}:{port}/link")
    clinic.up("--force-recreate")
    silo = json.loads(run("docker", "inspect", f"{THIRTEENTH}-silo-1").stdout)[0]
    # None of the server's
    assert set(silo["NetworkSettings"]["Networks"]) == {f"{THIRTEENTH}_default"}
    doors = [f"{deployment.address}:{port}" for port in (deployment.fleet, deployment.control)]
    assert clinic.inside("python", "-c", KNOCK, *doors).split() == ["open", "closed"]
    checked = clinic.compose("run", "--rm", "-T", "silo", "silofl", "doctor").stdout
    assert "FAIL" not in checked and "1 pinned by SHA-256" in checked
    assert (
        f"{port}/link carries this silo to {deployment.address}:{deployment.fleet}" in checked
    )
    config = 'strategy="fedala" rounds=2 silos=13'
    # A bundle's policy wants a study that its hospital has approved
    directory = deployment.flower_run(config)
    assert silos_of(directory, round_=2) == {*SILOS}
    assert 'its policy has studies = "required", and the run names none' in clinic.log()
    deployment.host("silofl", "study", "new", "study.toml", *NEW_STUDY)
    approve = (
        "silofl",
        "approve",
        "/dev/stdin",
        "--yes",
        "--by",
        "Dr. B",
        "--signed-by",
        "nobody",
    )
    clinic.inside(*approve, input=(deployment.source / "study.toml").read_text())
    directory = deployment.flower_run(f'{config} study="{STUDY}"')
    assert silos_of(directory, round_=2) == {*SILOS, THIRTEENTH}
    assert f"/fedala-42/{THIRTEENTH}/" in clinic.inside(
        "find", "/state", "-name", "*.safetensors"
    )
    clinic.set("SILOFL_VIA", "")
    clinic.up("--force-recreate")


def test_a_bundle_that_is_used_twice_at_once_says_so(clinic):
    try:
        clinic.compose("up", "--detach", project="second")
        wait_until(
            lambda: "trying again" in clinic.log("second"), 60, "the second one is refused"
        )
        assert (
            f"{THIRTEENTH}: its key is in use: a bundle runs in one place at a time"
            in clinic.log("second")
        )
    finally:
        clinic.down("second")


def test_a_removed_silo_is_shut_out_at_once(deployment, clinic):
    deployment.host("silofl", "remove-silo", THIRTEENTH)
    wait_until(
        lambda: "does not know this silo's key" in clinic.log(), 60, "the clinic notices"
    )
    assert (
        "online: all 12 silos" in deployment.host("silofl", "doctor", "federation.yaml").stdout
    )
    clinic.down()


# --- faults -----------------------------------------------------------------------------------------------


STATE = """
import glob, json
from pathlib import Path
from strategies.base.state import State
files = sorted(glob.glob("/state/*/apple-42/*/run-*/round-*.safetensors"), key=lambda path: Path(path).stat().st_mtime)
print(json.dumps(State.load(Path(files[-1])).numbers["dr_rounds"]))
"""


def test_a_silo_killed_in_mid_round_comes_back_with_its_state(deployment):
    """hospital-05 gets SIGKILL once its first round is saved.

    APPLE keeps in the silo's state the rounds whose DR vector it has updated: a silo that had lost its state would
    list none from before the kill.
    """
    # A round takes a second or two, a container's start ten and more
    directory, last = deployment.runs / "killed", 30
    settings = (
        "--set",
        "round-timeout=120",
        "--set",
        f"silos={len(SILOS)}",
        "--out",
        str(directory),
    )
    command = ("silofl", "run", "--strategy", "apple", "--rounds", str(last), *settings)
    with subprocess.Popen(
        command,
        cwd=deployment.source,
        env=deployment.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            wait_for_round(directory, 1, 180)
            before = deployment.kill("hospital-05")
            _, errors = running.communicate(timeout=600)
        finally:
            running.kill()
    assert running.returncode == 0, errors
    after = deployment.container("hospital-05")["State"]
    assert after["Pid"] not in (0, before["Pid"]) and after["StartedAt"] > before["StartedAt"]
    missed = {n: set(SILOS) - silos_of(directory, round_=n) for n in range(1, last + 1)}
    away = [n for n in missed if "hospital-05" in missed[n]]
    assert not {1, last} & {*away}, f"{missed}\n{errors}"  # its message is sent again
    # That the others lose no round by it: tests/server/deploy/test_deployed.py
    print(missed, errors)
    kept = json.loads(deployment.inside("hospital-05", "python", "-c", STATE).stdout)
    assert 1 in kept and last in kept


def test_a_server_that_restarts_knows_its_silos(deployment):
    before = deployment.kill("superlink")

    def online():
        doctor = deployment.host("silofl", "doctor", "federation.yaml", check=False)
        return "ok    online: all 12 silos" in doctor.stdout

    wait_until(online, 180, "all are back")
    assert deployment.container("superlink")["State"]["StartedAt"] > before["StartedAt"]


def test_down_leaves_nothing_running(deployment):
    deployment.compose("--profile", "relay", "down", "--timeout", "10")
    assert deployment.compose("ps", "--all", "--quiet").stdout == ""
    for port in (deployment.fleet, deployment.control):
        with (
            pytest.raises(OSError),
            contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=3)),
        ):
            pass


# --- three silos and a server -----------------------------------------------------------------------------


def test_a_run_goes_on_by_itself_after_its_superlink_was_killed(three):
    """SIGKILL after round 2. Docker starts the SuperLink, which takes the run up: the rows of an undisturbed run."""
    settings = ("--strategy", "apple", "--rounds", "8", "--set", "local-epochs=20")
    undisturbed, killed = three.runs / "undisturbed", three.runs / "killed"
    three.host("silofl", "run", *settings, "--out", undisturbed)
    compiled = three.inside(
        "superlink", "find", "/tmp/flower/apps", "-name", "app.*.pyc"
    ).stdout
    assert "/server/__pycache__/app." in compiled  # the next server app begins sooner
    command = ("silofl", "run", *settings, "--name", "killed", "--out", str(killed))
    with subprocess.Popen(command, cwd=three.source, env=three.environment) as following:
        try:
            wait_for_round(killed, 2, 600)
            before = three.kill("superlink")
            # Its follower gives up where the machine is too busy for the SuperLink to be back in time
            wait_until(lambda: three.state_of("killed") == "completed", 900, "the run's end")
        finally:
            following.kill()
    assert three.container("superlink")["State"]["StartedAt"] > before["StartedAt"]
    assert [event["event"] for event in events_of(killed)].count("start") == 2
    assert history_without_seconds(killed) == history_without_seconds(undisturbed)
