"""`federation.yaml`: what a right one is read as, and one clear line for each wrong one."""

from __future__ import annotations

import json
import tomllib

import pytest
from failing import fails

from partitions.schema import parse_schema
from server.cli.main import main
from server.deploy import submit
from server.deploy.control import Connection
from server.deploy.federation import Demo, Server, SiloEntry, read_federation
from server.deploy.local.record import UpFederation
from strategies.base.transport.data_summary import declared_spec, read_agreed

RIGHT = """
name: trial
server: {address: fl.example.org, fleet-port: 9092}
demo: {dataset: breast-cancer, partition: iid}
silos:
  - {name: hospital-01, data: demo}
  - {name: north, device: "cuda:1", data: data/north.npz, memory: 4g}
"""


def write(folder, text):
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "north.npz").touch()
    path = folder / "federation.yaml"
    path.write_text(text)
    return path


def test_a_right_file(tmp_path):
    """Defaults fill in, a relative path starts at the file's directory."""
    federation = read_federation(write(tmp_path, RIGHT))
    assert federation.name == "trial"
    assert federation.server == Server.model_validate(
        {"address": "fl.example.org", "fleet-port": 9092}
    )
    assert federation.demo == Demo(dataset="breast-cancer", partition="iid")
    assert federation.silos == (
        SiloEntry.model_construct(name="hospital-01", device="cpu", data=None, policy="public"),
        SiloEntry.model_construct(
            name="north",
            device="cuda:1",
            data=tmp_path / "data" / "north.npz",
            memory="4g",
            policy="",
        ),
    )
    assert federation.demo_silos == federation.silos[:1]


SCHEMA = "features: [sex, {name: age, unit: years, range: [0, 120]}]\nlabels: [well, ill]\n"


def test_a_schema(tmp_path):
    """In the file or beside it; runs get it with what is agreed, and the number of classes with it."""
    (tmp_path / "heart.yaml").write_text(SCHEMA)
    inline = "schema:\n" + "".join(f"  {line}\n" for line in SCHEMA.splitlines())
    for section in ("schema: heart.yaml\n", inline):
        federation = read_federation(write(tmp_path, RIGHT + section))
        assert (federation.declared.names, federation.declared.labels) == (
            ("sex", "age"),
            ("well", "ill"),
        )
        said = read_agreed(federation.agreed)
        assert (
            parse_schema(said["schema"]) == federation.declared
            and declared_spec(said)["classes"] == 2
        )


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("schema: none.toml", "none.toml cannot be read"),
        ("schema: heart.txt", "heart.txt does not end in .toml"),
        ("schema: [age]", "must be keys and values; a schema has features, labels, dtype"),
        ("schema: {columns: [age]}", "'columns' is no key of it; a schema has features"),
        (
            "schema: {labels: [no, yes]}",
            "labels.1 = False: must be a valid string; a schema has features",
        ),
        ("schema: {features: [a, a]}", "two columns are called 'a'"),
        (
            "schema: {labels: [a, b]}\nagreed: {classes: 3}",
            "schema names 2 labels, and classes = 3",
        ),
    ],
)
def test_a_schema_that_is_none(tmp_path, section, reason):
    with pytest.raises(ValueError) as caught:
        read_federation(write(tmp_path, f"{RIGHT}{section}\n"))
    assert (
        reason in str(caught.value)
        and "federation.yaml" in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_data_may_be_elsewhere(tmp_path):
    """A compose file is also written where the data are not."""
    path = write(tmp_path, RIGHT.replace("north.npz", "elsewhere.npz"))
    assert (
        read_federation(path, check_data=False).silos[1].data
        == tmp_path / "data" / "elsewhere.npz"
    )


def test_what_is_agreed(tmp_path):
    """In the file's own section, of hospitals elsewhere too, and at the silos; as the setting `agreed` takes it."""
    assert read_federation(write(tmp_path, RIGHT)).agreed == ""
    text = RIGHT.replace("data: demo", "data: demo, samples: 70")
    federation = read_federation(write(tmp_path, text))
    assert federation.silos[0].samples == 70 and json.loads(federation.agreed) == {
        "samples": {"hospital-01": 70}
    }
    section = "agreed: {shape: [13], classes: 2, samples: {clinic-13: 500}}\n"
    said = read_agreed(read_federation(write(tmp_path, text + section)).agreed)
    assert said == {
        "shape": [13],
        "classes": 2,
        "samples": {"clinic-13": 500, "hospital-01": 70},
    }


def test_a_run_takes_what_is_agreed_from_the_file(tmp_path):
    """As it is now, of a federation that is up on this machine; where the file is gone, nothing."""
    path = write(tmp_path, RIGHT)
    up = UpFederation(
        name="trial", file=str(path), demo=None, connection=Connection("trial", "127.0.0.1:2")
    )
    assert submit._of_the_file(up, {}) == {}
    path.write_text(RIGHT + "agreed: {classes: 3}\n")
    assert submit._of_the_file(up, {}) == {"agreed": '{"classes": 3}'}
    path.write_text(RIGHT + "agreed: {classes: 3}\nrun: {min-silos: 2, lost-silo: resend}\n")
    assert submit._of_the_file(up, {}) == {
        "agreed": '{"classes": 3}',
        "min-silos": 2,
        "lost-silo": "resend",
    }
    path.write_text(RIGHT + "agreed: {classes: 0}\n")
    fails(ValueError, "agreed: classes = 0", submit._of_the_file, up, {})
    path.unlink()
    assert submit._of_the_file(up, {}) == {}


def test_a_silo_that_is_held_out_stays_so(tmp_path):
    """Every run of the federation holds it out; one may hold out more, and none may train it."""
    path = write(tmp_path, RIGHT.replace("data: demo", "data: demo, role: held-out"))
    up = UpFederation(
        name="trial", file=str(path), demo=None, connection=Connection("trial", "127.0.0.1:2")
    )
    assert read_federation(path).held_out() == ("hospital-01",)
    assert submit._of_the_file(up, {}) == {"hold-out": "hospital-01"}
    assert submit._of_the_file(up, {"hold-out": "north, hospital-01"}) == {
        "hold-out": "hospital-01"
    }
    assert submit._of_the_file(up, {"strategy": "evaluate"}) == {}  # where all silos are alike
    for asked in ("", "north"):
        with pytest.raises(
            ValueError, match="has hospital-01 with `role: held-out`: name them too"
        ):
            submit._of_the_file(up, {"hold-out": asked})


def test_not_all_silos_are_held_out(tmp_path):
    text = RIGHT.replace("data: demo", "data: demo, role: held-out").replace(
        "name: north", "name: north, role: held-out"
    )
    fails(ValueError, "none would be left to train", read_federation, write(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "data: demo",
            "data: demo, samples: 0",
            "silos.1.samples = 0: must be greater than or equal to 1",
        ),
        (
            "data: demo",
            "data: demo, samples: many",
            "silos.1.samples = 'many': must be a valid integer",
        ),
        (
            "data: demo",
            "data: demo, role: guest",
            "silos.1.role = 'guest': must be 'train' or 'held-out'",
        ),
        ("data: demo", "device: cpu", "the key silos.1.data is missing"),
        ("data: demo", "data: 3", "silos.1.data = 3: must be the path of a file"),
        (
            "name: trial",
            "name: trial\nagreed: {shapes: [3]}",
            "task, shape, classes, samples, schema is needed here",
        ),
        (
            "name: trial",
            "name: trial\nagreed: {shape: [0]}",
            "agreed: shape = [0]: a list of one to four whole",
        ),
        (
            "name: trial",
            "name: trial\nagreed: {classes: 2.5}",
            "agreed: classes = 2.5: a whole number up to",
        ),
        (
            "name: trial",
            "name: trial\nagreed: {samples: {a: -1}}",
            "agreed: samples = {'a': -1}: a whole number from",
        ),
        (
            "name: trial",
            "name: trial\nagreed: {samples: {a: 2026-01-01}}",
            "agreed: samples = {'a': '2026-01-01'}: a",
        ),
        ("name: trial", "name: trial\nagreed: yes", "agreed = True: must be keys and values"),
        ("name: trial", "name: trial\nrun: {hold-out: a}", "unknown setting 'hold-out'"),
        (
            "name: trial",
            "name: trial\nrun: {lost-silos: resend}",
            "'lost-silos' (did you mean 'lost-silo'?)",
        ),
        ("name: trial", "name: trial\nrun: {lost-silo: never}", "lost-silo = "),
        ("name: trial", "name: trial\nrun: {silos: 3}", "unknown setting 'silos'"),
        ("name: trial", "name: trial\nrun: [3]", "run = [3]: must be keys and values"),
        ("name: trial", "nmae: trial", "'nmae' is no key of it (did you mean 'name'?)"),
        (
            "name: trial",
            "name: trial\ndataset: digits",
            "'dataset' is no key of it (did you mean 'data'?)",
        ),
        ("name: trial\n", "", "the key name is missing"),
        ("name: trial", "name: Trial 1", "name = 'Trial 1': use 1 to 63 lower-case letters"),
        (
            "name: trial",
            "name: local",
            "name = local: is an entry of Flower's own configuration",
        ),
        ("name: trial", "name: [trial", "line 3: not valid YAML"),
        ("name: trial", "name: a\nname: b", "the key 'name' stands here a second time"),
        ("name: trial", "name: !!python/object/apply:os.getpid []", "not valid YAML"),
        (
            "fleet-port: 9092",
            "fleet: 9092",
            "'server.fleet' is no key of it (did you mean 'fleet-port'?)",
        ),
        (
            "fleet-port: 9092",
            "fleet-port: 70000",
            "server.fleet-port = 70000: must be less than or equal to 65535",
        ),
        (
            "fleet-port: 9092",
            "fleet-port: yes",
            "server.fleet-port = True: must be a valid integer",
        ),
        (
            "fleet-port: 9092",
            "fleet-port: 9092, control-port: 9092",
            "fleet-port and control-port must differ",
        ),
        (
            "fl.example.org",
            '"fl.example.org:9092"',
            "address = fl.example.org:9092: a host name or an IP address is needed here; fleet-port",
        ),
        (
            "fl.example.org",
            '"https://fl"',
            "server.address = 'https://fl': use a host name or an IP address",
        ),
        (
            "fl.example.org",
            '"[2001:db8::7]"',
            "use a host name or an IP address, without brackets and interface",
        ),
        (
            "fleet-port: 9092",
            "public: 'https://fl.example.org'",
            "server.public = 'https://fl.example.org': use HOST:PORT, as in fl.example.org:443",
        ),
        (
            "fleet-port: 9092",
            "public: 'a.org:70000'",
            "public = a.org:70000: a port is at most",
        ),
        (
            "breast-cancer",
            "breast-cancr",
            "unknown dataset 'breast-cancr' (did you mean 'breast-cancer'?)",
        ),
        (
            "partition: iid",
            "partition: zzz",
            "unknown partition 'zzz'; there are: apple-pathological",
        ),
        (
            "partition: iid",
            "settings: {dirichlet.beta: 0}",
            "dirichlet.beta = 0.0 is out of range",
        ),
        (
            "partition: iid",
            "partition: iid, settings: {dirichlet.beta: 1}",
            "unknown setting 'dirichlet.beta'",
        ),
        ("partition: iid", "seed: -1", "demo.seed = -1: must be greater than or equal to 0"),
        ("demo: {dataset: breast-cancer, partition: iid}\n", "", "there is no `demo` section"),
        ("name: north", "name: hospital-01", "silos: the name hospital-01 is there 2 times"),
        ("name: north", "name: Nord", "silos.2.name = 'Nord': use 1 to 63"),
        ("name: north, ", "", "the key silos.2.name is missing"),
        ('"cuda:1"', "gpu", "silos.2.device = 'gpu': use cpu, cuda:0 and so on"),
        ('"cuda:1"', "1:2", "silos.2.device = 62: must be a valid string"),  # YAML's base 60
        ('"cuda:1"', "MIG-", "silos.2.device = 'MIG-': use cpu"),
        ("memory: 4g", "gpu-share: 0", "silos.2.gpu-share = 0: must be"),
        ("memory: 4g", "gpu-share: 1.5", "silos.2.gpu-share = 1.5: must be"),
        ('"cuda:1"', '"cuda:-1"', "silos.2.device = 'cuda:-1': use cpu"),
        ('"cuda:1"', '["cuda:0", cpu]', "silos.2.device = 'cuda:0,cpu': use cpu"),
        ('"cuda:1"', "1", "silos.2.device = 1: must be a valid string"),
        ("memory: 4g", "memory: lots", "silos.2.memory = 'lots': write for example 2g or 512m"),
        (
            "memory: 4g",
            "memroy: 4g",
            "'silos.2.memroy' is no key of it (did you mean 'memory'?)",
        ),
        ("north.npz", "south.npz", "silos.2.data = 'data/south.npz': there is no file"),
    ],
)
def test_one_clear_line(tmp_path, old, new, line):
    path = write(tmp_path, RIGHT.replace(old, new, 1))
    assert path.read_text() != RIGHT
    with pytest.raises(ValueError) as caught:
        read_federation(path)
    assert line in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "trial", "name: a\nsilos:\n", "name: a\nsilos: {b: c}\n"]
)
def test_not_a_federation_at_all(tmp_path, text):
    with pytest.raises(
        ValueError, match=r"must be keys and values|the key silos is missing|silos = .*a list"
    ):
        read_federation(write(tmp_path, text))


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*federation\.yaml"):
        read_federation(tmp_path / "federation.yaml")


DEEP = "[" * 5000 + "]" * 5000
LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"name: {DEEP}\nsilos: []", "nested too deep"),
        ("name: demo\nsilos: &a [*a]", "silos.1 = .*: must be keys and values"),
        ("&a {name: *a, silos: *a}", "name = .*: must be a valid string"),
        (LAUGHS, "'a0' is no key"),
        (LAUGHS + "\nname: *a11\nsilos: []", "a0"),
        (
            "name: demo\nsilos: [{name: a, data: ["
            + ", ".join(["[1, [2, [3]]]"] * 2000)
            + "]}]",
            r"silos\.1\.data",
        ),
        ("name: !!int ''\nsilos: []", "a value does not fit its tag"),
        ("name: !!bool maybe\nsilos: []", "a value does not fit its tag"),
        ("name: !!timestamp now\nsilos: []", "a value does not fit its tag"),
        ("name: 2001-99-99\nsilos: []", "a value does not fit its tag"),
        (f"name: {'9' * 5000}\nsilos: []", "a value does not fit its tag"),
        ("name: demo\ndemo: {dataset: [a]}\nsilos: []", "dataset"),
        (
            "name: demo\nsilos: [{name: a, data: ~nobody-of-that-name/x.npz}]",
            "no home directory",
        ),
        ("1: 2\nname: demo\nsilos: []", "'1' is no key"),
        ("name: demo\nsilos: []\n# " + "x" * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_means_harm_is_one_short_line(tmp_path, text, reason):
    """Depth, aliases that come to billions of values, values that deny their own tag: no other exception, no page."""
    file = tmp_path / "federation.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason) as caught:
        read_federation(file)
    assert (
        str(file) in str(caught.value)
        and len(str(caught.value)) < 1000
        and "\n" not in str(caught.value)
    )


def test_a_study_lists_what_the_federations_runs_have(tmp_path, monkeypatch):
    """Else a hospital would refuse every run of `silofl run`, which takes them from the file."""
    write(
        tmp_path,
        RIGHT.replace("partition: iid", "partition: dirichlet, settings: {validation: 0.5}"),
    )
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "federation.yaml").open("a") as file:
        file.write("run: {local-epochs: 5, model: mlp}\nschema: {labels: [well, ill]}\n")
    given = f"--name sepsis --strategy fedavg --sum {'0' * 64} --set local-epochs=3"
    assert main(f"study new study.toml {given}".split()) == 0
    made = tomllib.loads((tmp_path / "study.toml").read_text())
    own = {key: made["settings"][key] for key in ("local-epochs", "model", "validation")}
    assert own == {"local-epochs": 3, "model": "mlp", "validation": 0.5}
    assert made["schema"] == parse_schema({"labels": ["well", "ill"]}).digest
