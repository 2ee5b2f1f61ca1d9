"""`federation.yaml`: what a right one is read as, and one clear line for each wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partitions.schema import parse_schema
from server.deploy import submit
from server.deploy.control import Connection
from server.deploy.federation import Demo, Server, SiloEntry, read_federation
from server.deploy.local import record
from strategies.base.schema.data_summary import declared_spec, read_agreed

RIGHT = """
name: trial
server: {address: fl.example.org, fleet-port: 9092}
demo: {dataset: breast-cancer, partition: iid}
silos:
  - {name: hospital-01, data: demo}
  - {name: north, device: "cuda:1", data: data/north.npz, memory: 4g}
"""


def write(folder: Path, text: str) -> Path:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "north.npz").touch()
    path = folder / "federation.yaml"
    path.write_text(text)
    return path


def test_a_right_file(tmp_path: Path) -> None:
    """Defaults fill in, a relative path starts at the file's directory."""
    federation = read_federation(write(tmp_path, RIGHT))
    assert federation.name == "trial"
    assert federation.server == Server("fl.example.org", 9092, 0)
    assert federation.demo == Demo("breast-cancer", "iid", 42)
    assert federation.silos == (
        SiloEntry("hospital-01", "cpu", None, "", "public"),
        SiloEntry("north", "cuda:1", tmp_path / "data" / "north.npz", "4g"),
    )
    assert federation.demo_silos == federation.silos[:1]


SCHEMA = "features: [sex, {name: age, unit: years, range: [0, 120]}]\nlabels: [well, ill]\n"


def test_a_schema(tmp_path: Path) -> None:
    """In the file or beside it; runs get it with what is agreed, and the number of classes with it."""
    (tmp_path / "heart.yaml").write_text(SCHEMA)
    inline = "schema:\n" + "".join(f"  {line}\n" for line in SCHEMA.splitlines())
    for section in ("schema: heart.yaml\n", inline):
        federation = read_federation(write(tmp_path, RIGHT + section))
        assert (federation.schema.names, federation.schema.labels) == (("sex", "age"), ("well", "ill"))
        said = read_agreed(federation.agreed)
        assert parse_schema(said["schema"]) == federation.schema and declared_spec(said)["classes"] == 2


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("schema: none.toml", "none.toml cannot be read"),
        ("schema: heart.txt", "heart.txt does not end in .toml"),
        ("schema: [age]", "schema: a schema has the keys features, labels, dtype"),
        ("schema: {columns: [age]}", "schema: a schema has the keys features, labels, dtype"),
        ("schema: {labels: [no, yes]}", "schema: the label False is no text: write it in quotation marks"),
        ("schema: {features: [a, a]}", "schema: two columns are called 'a'"),
        ("schema: {labels: [a, b]}\nagreed: {classes: 3}", "schema names 2 labels, and classes = 3"),
    ],
)
def test_a_schema_that_is_none(tmp_path: Path, section: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_federation(write(tmp_path, f"{RIGHT}{section}\n"))
    assert reason in str(caught.value) and "federation.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_data_may_be_elsewhere(tmp_path: Path) -> None:
    """A compose file is also written where the data are not."""
    path = write(tmp_path, RIGHT.replace("north.npz", "elsewhere.npz"))
    assert read_federation(path, check_data=False).silos[1].data == tmp_path / "data" / "elsewhere.npz"


def test_what_is_agreed(tmp_path: Path) -> None:
    """In the file's own section, of hospitals elsewhere too, and at the silos; as the setting `agreed` takes it."""
    assert read_federation(write(tmp_path, RIGHT)).agreed == ""
    text = RIGHT.replace("data: demo", "data: demo, samples: 70")
    federation = read_federation(write(tmp_path, text))
    assert federation.silos[0].samples == 70 and json.loads(federation.agreed) == {"samples": {"hospital-01": 70}}
    section = "agreed: {shape: [13], classes: 2, samples: {clinic-13: 500}}\n"
    said = read_agreed(read_federation(write(tmp_path, text + section)).agreed)
    assert said == {"shape": [13], "classes": 2, "samples": {"clinic-13": 500, "hospital-01": 70}}


def test_a_run_takes_what_is_agreed_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is now, of a federation that is up on this machine; where the file is gone, nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = write(tmp_path, RIGHT)
    up = record.LocalFederation("trial", str(path), "127.0.0.1", 1, 2, None, (), Connection("trial", "127.0.0.1:2"))
    record.state_directory("trial")
    record.write_record(up)
    assert submit._of_the_file("trial", {}) == {}
    path.write_text(RIGHT + "agreed: {classes: 3}\n")
    assert submit._of_the_file("trial", {}) == {"agreed": '{"classes": 3}'}
    path.write_text(RIGHT + "agreed: {classes: 3}\nrun: {min-silos: 2, lost-silo: resend}\n")
    assert submit._of_the_file("trial", {}) == {"agreed": '{"classes": 3}', "min-silos": 2, "lost-silo": "resend"}
    path.write_text(RIGHT + "agreed: {classes: 0}\n")
    with pytest.raises(ValueError, match="agreed: classes = 0"):
        submit._of_the_file("trial", {})
    path.unlink()
    assert submit._of_the_file("trial", {}) == {}


def test_a_silo_that_is_held_out_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the federation holds it out; one may hold out more, and none may train it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = write(tmp_path, RIGHT.replace("data: demo", "data: demo, role: held-out"))
    up = record.LocalFederation("trial", str(path), "127.0.0.1", 1, 2, None, (), Connection("trial", "127.0.0.1:2"))
    record.state_directory("trial")
    record.write_record(up)
    assert read_federation(path).held_out == ("hospital-01",)
    assert submit._of_the_file("trial", {}) == {"hold-out": "hospital-01"}
    assert submit._of_the_file("trial", {"hold-out": "north, hospital-01"}) == {"hold-out": "hospital-01"}
    assert submit._of_the_file("trial", {"strategy": "evaluate"}) == {}  # where all silos are alike
    for asked in ("", "north"):
        with pytest.raises(ValueError, match="has hospital-01 with `role: held-out`: name them too"):
            submit._of_the_file("trial", {"hold-out": asked})


def test_not_all_silos_are_held_out(tmp_path: Path) -> None:
    text = RIGHT.replace("data: demo", "data: demo, role: held-out").replace(
        "name: north", "name: north, role: held-out"
    )
    with pytest.raises(ValueError, match="none would be left to train"):
        read_federation(write(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("data: demo", "data: demo, samples: 0", "silo hospital-01: samples: 0 is no number of training samples"),
        (
            "data: demo",
            "data: demo, role: guest",
            "silo hospital-01: role: 'guest' is none; use `train`, or `held-out`",
        ),
        ("name: trial", "name: trial\nrun: {hold-out: a}", "run: unknown key 'hold-out'"),
        ("data: demo", "data: demo, samples: many", "samples: 'many' is no number of training samples"),
        ("name: trial", "name: trial\nagreed: {shapes: [3]}", "agreed: unknown key 'shapes' (did you mean 'shape'?)"),
        (
            "name: trial",
            "name: trial\nrun: {lost-silos: resend}",
            "run: unknown key 'lost-silos' (did you mean 'lost-silo'",
        ),
        ("name: trial", "name: trial\nrun: {lost-silo: never}", "run: lost-silo = "),
        ("name: trial", "name: trial\nrun: {silos: 3}", "run: unknown key 'silos'"),
        ("name: trial", "name: trial\nrun: [3]", "run: needs keys and values"),
        ("name: trial", "name: trial\nagreed: {shape: [0]}", "agreed: shape = [0]: a list of one to four whole"),
        ("name: trial", "name: trial\nagreed: {classes: 2.5}", "agreed: classes = 2.5: a whole number up to"),
        ("name: trial", "name: trial\nagreed: {samples: {a: -1}}", "agreed: samples = {'a': -1}: a whole number from"),
        ("name: trial", "name: trial\nagreed: {samples: {a: 2026-01-01}}", "not JSON serializable"),
        (
            "name: trial",
            "name: trial\nagreed: yes",
            "agreed: needs keys and values (task, shape, classes, samples), got True",
        ),
        ("name: trial", "nmae: trial", "unknown key 'nmae' (did you mean 'name'?)"),
        ("name: trial\n", "", "the key 'name' is missing"),
        ("name: trial", "name: Trial 1", "name: 'Trial 1' is no name"),
        ("name: trial", "name: local", "'local' is an entry of Flower's own configuration"),
        ("fleet-port: 9092", "fleet: 9092", "server: unknown key 'fleet' (did you mean 'fleet-port'?)"),
        ("fleet-port: 9092", "fleet-port: 70000", "server.fleet-port: 70000 is not a port"),
        ("fleet-port: 9092", "fleet-port: yes", "server.fleet-port: True is not a port"),
        ("fleet-port: 9092", "fleet-port: 9092, control-port: 9092", "are both 9092; they must differ"),
        ("fl.example.org", '"https://fl"', "'https://fl' is neither a host name nor an IP address"),
        (
            "breast-cancer",
            "breast-cancr",
            "demo.dataset: unknown dataset 'breast-cancr' (did you mean 'breast-cancer'?)",
        ),
        ("partition: iid", "partition: zzz", "demo.partition: unknown partition 'zzz'; there are: apple-pathological"),
        (
            "partition: iid",
            "partition: dirichlet, settings: {dirichlet.beta: 0}",
            "demo.settings: dirichlet.beta = 0.0 is out of range",
        ),
        (
            "partition: iid",
            "partition: iid, settings: {dirichlet.beta: 1}",
            "demo.settings: unknown key 'dirichlet.beta'",
        ),
        ("partition: iid", "seed: -1", "demo.seed: -1 is not a whole number of at least 0"),
        ("demo: {dataset: breast-cancer, partition: iid}\n", "", "there is no `demo` section"),
        ("name: north", "name: hospital-01", "silos: the name 'hospital-01' is there 2 times"),
        ("name: north", "name: Nord", "silo 2: name: 'Nord' is no name"),
        ("name: north, ", "", "silo 2: the key 'name' is missing"),
        ('"cuda:1"', "gpu", "silo north: device: 'gpu' is no device; use `cpu`, or `cuda:0`"),
        ('"cuda:1"', '"cuda:-1"', "silo north: device: 'cuda:-1' is no device"),
        ('"cuda:1"', "1", "silo north: device: 1 is no device"),
        ("memory: 4g", "memory: lots", "silo north: memory: 'lots' is no amount of memory"),
        ("memory: 4g", "memroy: 4g", "silo 2: unknown key 'memroy' (did you mean 'memory'?)"),
        ("north.npz", "south.npz", "silo north: data: there is no file"),
        ("data: demo", "device: cpu", "silo 1: the key 'data' is missing"),
        ("data: demo", "data: 3", "silo hospital-01: data: 3 is neither `demo` nor the path"),
        ("name: trial", "name: [trial", "line 3: not valid YAML"),
        ("name: trial", "name: !!python/object/apply:os.getpid []", "not valid YAML"),
    ],
)
def test_one_clear_line(tmp_path: Path, old: str, new: str, line: str) -> None:
    path = write(tmp_path, RIGHT.replace(old, new, 1))
    assert path.read_text() != RIGHT
    with pytest.raises(ValueError) as caught:
        read_federation(path)
    assert line in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "trial", "name: a\nsilos: []\n", "name: a\nsilos: {b: c}\n"])
def test_not_a_federation_at_all(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"needs (keys and values|a list of at least one silo)"):
        read_federation(write(tmp_path, text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*federation\.yaml"):
        read_federation(tmp_path / "federation.yaml")


DEEP = "[" * 5000 + "]" * 5000
LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"name: {DEEP}\nsilos: []", "nested too deep"),
        ("name: demo\nsilos: &a [*a]", "silo 1: needs keys and values"),
        ("&a {name: *a, silos: *a}", "name: .* is no name"),
        (LAUGHS, "unknown key 'a0'|no key 'a0'|a0"),
        (LAUGHS + "\nname: *a11\nsilos: []", "a0"),
        ("name: demo\nsilos: [{name: a, data: [" + ", ".join(["[1, [2, [3]]]"] * 2000) + "]}]", "silo a: data"),
        ("name: !!int ''\nsilos: []", "a value does not fit its tag"),
        ("name: !!bool maybe\nsilos: []", "a value does not fit its tag"),
        ("name: !!timestamp now\nsilos: []", "a value does not fit its tag"),
        ("name: 2001-99-99\nsilos: []", "a value does not fit its tag"),
        (f"name: {'9' * 5000}\nsilos: []", "a value does not fit its tag"),
        ("name: demo\ndemo: {dataset: [a]}\nsilos: []", "dataset"),
        ("name: demo\nsilos: [{name: a, data: ~nobody-of-that-name/x.npz}]", "no home directory"),
        ("1: 2\nname: demo\nsilos: []", "'1'"),
        ("name: demo\nsilos: []\n# " + "x" * (1 << 20), "at most 1048576"),
    ],
)
def test_a_file_that_means_harm_is_one_short_line(tmp_path: Path, text: str, reason: str) -> None:
    """Depth, aliases that come to billions of values, values that deny their own tag: no other exception, no page."""
    file = tmp_path / "federation.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason) as caught:
        read_federation(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 1000 and "\n" not in str(caught.value)
