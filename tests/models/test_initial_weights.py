"""``init-weights``: names and shapes one by one, the same file in every silo, and where it is said that it is not."""

from __future__ import annotations

import hashlib
import logging
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from failing import fails
from tiny import federate
from torch import Tensor

from client.export import export_model
from models.flat import FlatModel
from models.initialisation import flat_model, initial_model
from models.networks.mlp import MlpSettings
from models.networks.registry import MODELS, build
from models.trainable import Part
from models.weights import _tell, _tell_left_out, our_name, start_from, weights_of
from partitions.common.errors import UserError

Tensors = dict[str, Tensor]
TABLE = MlpSettings("4")  # 3 columns, 3 classes: fc1 16, fc2 15 scalars


def trained(seed=99):
    """Weights that somebody has trained elsewhere."""
    torch.manual_seed(seed)
    return build("mlp", (3,), 3, TABLE).state_dict()


def saved(file, tensors):
    safetensors.torch.save_file(tensors, file)
    return file


def vector(tensors):
    return torch.cat([tensors[name].flatten() for name in trained() if name in tensors])


def initial(file, purpose="", seed=7):
    return initial_model("mlp", (3,), 3, TABLE, seed, None, Part(weights=weights_of(file)))(
        purpose
    )


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_every_start_is_the_files(tmp_path):
    file = saved(tmp_path / "w.safetensors", trained())
    assert torch.equal(initial(file), vector(trained())) and torch.equal(
        initial(file, "b", 8), vector(trained())
    )


def test_half_precision_is_widened(tmp_path):
    half = {name: tensor.half() for name, tensor in trained().items()}
    file = saved(tmp_path / "w.safetensors", half)
    assert (
        torch.equal(initial(file), vector(half).float())
        and initial(file).dtype == torch.float32
    )


def test_a_file_without_the_last_layer(tmp_path, caplog):
    """The body is the file's, the last layer what the seed makes of it without any file; the log says so once."""
    body = {name: tensor for name, tensor in trained().items() if name.startswith("fc1")}
    file = saved(tmp_path / "w.safetensors", body)
    _tell.cache_clear()
    flwr = logging.getLogger("flwr")
    level, propagates = flwr.level, flwr.propagate
    flwr.setLevel(logging.INFO)
    flwr.propagate = True
    try:
        for purpose in ("", "b"):
            seeded = initial_model("mlp", (3,), 3, TABLE, 7)(purpose)
            assert torch.equal(initial(file, purpose), torch.cat([vector(body), seeded[16:]]))
    finally:
        flwr.setLevel(level)
        flwr.propagate = propagates
    assert [
        r.getMessage() for r in caplog.records if "starts from the seed" in r.getMessage()
    ] == [f"{file} has no fc2.weight, fc2.bias: the last layer starts from the seed"]


def without(*names):
    return {name: tensor for name, tensor in trained().items() if name not in names}


@pytest.mark.parametrize(
    "tensors, message",
    [
        (without("fc1.bias"), r"of 4 tensors: fc1.bias is missing$"),
        # Half of the last layer is no last layer left out
        (without("fc2.bias"), r"fc2.bias is missing$"),
        ({**trained(), "fc3.weight": torch.zeros(2)}, r"fc3.weight is not known$"),
        (
            {**trained(), "fc1.weight": torch.zeros(5, 3)},
            r"fc1.weight is of shape \(5, 3\), not \(4, 3\)$",
        ),
        (
            {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)},
            r"a is not known; b is not known; c is not known and 4 more$",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tensors, message, tmp_path):
    file = saved(tmp_path / "w.safetensors", tensors)
    said = fails(ValueError, message, initial, file)
    assert "\n" not in said and said.startswith(f"init-weights = {file} does not fit")


def test_what_is_no_such_file_is_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"^init-weights = .*w.safetensors: No such file or directory$"
    ):
        weights_of(tmp_path / "w.safetensors")
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"no safetensors at all")
    with pytest.raises(
        ValueError, match=r"^init-weights = .*w.safetensors is no file of tensors alone, "
    ):
        initial(file)


@pytest.mark.parametrize("member", ["w/data.pkl", "w/version", "w/data/0"])
def test_a_small_file_that_unpacks_to_much(member, tmp_path):
    """200 kB hold 200 MB of zeros, in whichever part of the file: they are refused before they are unpacked."""
    torch.save(trained(), tmp_path / "w.pth")
    with (
        zipfile.ZipFile(tmp_path / "w.pth") as good,
        zipfile.ZipFile(tmp_path / "x.pth", "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for info in good.infolist():
            if info.filename != member:
                made.writestr(info.filename, good.read(info))
        with made.open(member, "w", force_zip64=True) as out:
            for _ in range(200):
                out.write(bytes(1_000_000))
    assert (tmp_path / "x.pth").stat().st_size < 300_000
    tracemalloc.start()
    fails(
        ValueError,
        r"init-weights = .*x.pth: it would unpack to 200 MB, \d+ times its size$",
        initial,
        tmp_path / "x.pth",
    )
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()


def test_a_zip_with_two_directories_is_read_as_it_was_measured(tmp_path):
    """Python's zipfile finds the directory before the end record, others by its offset. Here both are good files."""
    torch.save(trained(), tmp_path / "first.pth")
    torch.save(trained(100), tmp_path / "second.pth")
    both = (tmp_path / "first.pth").read_bytes() + (tmp_path / "second.pth").read_bytes()
    (tmp_path / "w.pth").write_bytes(both)
    assert torch.equal(initial(tmp_path / "w.pth"), vector(trained(100)))


def test_a_file_that_changes_is_another_file(tmp_path):
    file = saved(tmp_path / "w.safetensors", trained())
    part = Part(weights=weights_of(file))
    assert (
        part.weights is not None
        and part.weights.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    )
    saved(file, trained(100))
    with pytest.raises(
        ValueError,
        match=r"is another file than the run began with: its SHA-256 is not [0-9a-f]{16}\.\.\.",
    ):
        initial_model("mlp", (3,), 3, TABLE, 7, None, part)("")


def test_statistics_of_normalisation_come_with_it(tmp_path):
    """By torchvision's names of a resnet18, and without what counts batches."""
    torch.manual_seed(1)
    network = build("resnet18", (3, 8, 8), 2)
    for name, buffer in network.named_buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
            assert name.endswith(("running_mean", "running_var"))
    named = {
        n.removeprefix("stem."): t
        for n, t in network.state_dict().items()
        if not n.endswith("tracked")
    }
    file = saved(tmp_path / "w.safetensors", named)
    flat = flat_model(
        "resnet18", (3, 8, 8), 2, None, "cpu", None, Part(weights=weights_of(file))
    )
    own = FlatModel(network)
    assert torch.equal(flat.vector, own.vector) and torch.equal(flat.buffers, own.buffers)
    flat.buffers.zero_()
    flat.reset_buffers()
    assert torch.equal(flat.buffers, own.buffers)


def test_two_names_of_one_tensor_are_refused(tmp_path):
    network = build("resnet8", (3, 8, 8), 2)
    twice = {**network.state_dict(), "conv1.weight": torch.zeros(64, 3, 7, 7)}
    file = saved(tmp_path / "w.safetensors", twice)
    with pytest.raises(ValueError, match=r"(stem.)?conv1.weight is there twice"):
        start_from(network, weights_of(file), MODELS["resnet8"].published)


# ---- Files as libraries save them ----


def changed(names: str, tensors: Tensors) -> Tensors:
    return {f"{names}{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "content",
    [
        trained(),
        {"state_dict": changed("module.", trained()), "epoch": 7, "arch": "mlp"},
        {"model": changed("module.backbone.", trained()), "optimizer": {"state": {}}},
        {"model_state_dict": trained()},
        {"net_g": trained(), "hyper_parameters": {"lr": 0.1}, "optimizer": {"state": {}}},
        {"state_dict": {**changed("model.net.", trained()), "criterion.weight": torch.ones(3)}},
    ],
)
def test_a_file_of_torch_save(content, tmp_path):
    """As training loops save them: in parallel and compiled, under another key, beside a loss's weights."""
    torch.save(content, tmp_path / "w.pth")
    assert torch.equal(initial(tmp_path / "w.pth"), vector(trained()))


def test_what_lies_beside_the_network_is_told(tmp_path, caplog):
    file = saved(
        tmp_path / "w.safetensors", {**changed("net.", trained()), "loss.weight": torch.ones(3)}
    )
    _tell_left_out.cache_clear()
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.INFO, "flwr"):
        initial(file)
    assert caplog.messages == ["init-weights: loss are beside the network, and left out"]


def test_a_last_layer_for_other_classes(tmp_path, caplog):
    head = {"fc2.weight": torch.zeros(1000, 4), "fc2.bias": torch.zeros(1000)}
    file = saved(tmp_path / "w.safetensors", {**trained(), **head})
    _tell.cache_clear()
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.INFO, "flwr"):
        found = initial(file)
    assert torch.equal(found[:16], vector(trained())[:16])
    assert torch.equal(found[16:], initial_model("mlp", (3,), 3, TABLE, 7)("")[16:])
    assert caplog.messages == [
        f"{file} has other shapes of fc2.weight, fc2.bias: the last layer starts from the seed"
    ]


class Code:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"state_dict": trained(), "args": Code()},
            r"torch.save write it: Weights only load failed",
        ),
        ([torch.zeros(1)], r"write it: 'list' object has no attribute 'items'$"),
        (
            {**trained(), "epoch": 3},
            r"write it: epoch is no tensor: save the state_dict alone$",
        ),
        (
            {"model": {**trained(), "lr": 0.1}},
            r"write it: under model lr is no tensor: save the state_dict alone$",
        ),
        (
            {"net": trained(), "ema": trained()},
            r"write it: it holds tensors under ema, net: save the network's alone$",
        ),
        ({**trained(), "criterion.weight": torch.ones(3)}, r"criterion.weight is not known"),
        (changed("a.", trained()) | changed("b.", trained()), r"a.fc1.bias is not known"),
    ],
)
def test_a_file_of_torch_save_that_does_not_fit(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "w.pth")
    fails(ValueError, message, initial, tmp_path / "w.pth")
    assert not Path("ran").exists()


@pytest.mark.exhaustive  # MONAI's import takes seconds
@pytest.mark.filterwarnings("ignore")
def test_monais_names(tmp_path):
    """Of a DenseNet that MONAI made, each tensor finds its place; its last layer is for other classes."""
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(3)
    theirs = nets.DenseNet121(2, 3, 7).state_dict()
    torch.save({"model": changed("module.", theirs)}, tmp_path / "w.pt")
    network = build("densenet121", (3, 32, 32), 5)
    start_from(network, weights_of(tmp_path / "w.pt"), MODELS["densenet121"].published)
    own = network.state_dict()
    for name in ("stage4.norm.weight", "stage2.denselayer3.conv1.weight"):
        (key,) = (k for k in theirs if our_name(k, MODELS["densenet121"].published) == name)
        assert torch.equal(own[name], theirs[key])


# ---- Runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    (tmp_path / "server").mkdir()
    return saved(tmp_path / "server/w.safetensors", trained())


@pytest.fixture
def sites(tmp_path, file, three):
    """Each silo's own folder of weights, with the file."""
    folders = {name: tmp_path / f"weights-{name}" for name in three}
    for folder in folders.values():
        folder.mkdir()
        (folder / file.name).write_bytes(file.read_bytes())
    return folders


def at(sites):
    def prepare(grid):
        for context in grid.contexts.values():
            context.node_config["weights"] = str(sites.get(context.node_config["name"], ""))

    return prepare


RUN = {"mlp__hidden": "4", "learning_rate": 0.1}


@pytest.mark.parametrize("trainable", ["all", "head"])
@pytest.mark.parametrize("method", ["local", "fedavg", "apple"])
def test_a_run_starts_from_the_file(three, sites, file, method, trainable):
    """What silos get in round 1 is the file's, all of it or the last layer: in APPLE every silo's."""
    settings = {
        "strategy": method,
        "trainable": trainable,
        "init_weights": str(file),
        "rounds": 1,
    }
    run = federate(three, **{**RUN, "learning_rate": 1e-9}, **settings, prepare=at(sites))
    expected = vector(trained())[0 if trainable == "all" else 16 :]
    for silo in three:
        assert method == "apple" or torch.allclose(run.personal(silo), expected, atol=1e-6)
        assert all(
            torch.equal(model.vector, expected) for model in run.sent_to(silo, 1).values()
        )


def test_a_silo_without_the_file_is_left_out_and_named(three, sites, file):
    """No folder, a folder without the file; who has it goes on."""
    settings = {"init_weights": str(file), "rounds": 1, "min_silos": 1, **RUN}
    (sites["b"] / file.name).unlink()
    run = federate(three, **settings, prepare=at({name: sites[name] for name in ("a", "b")}))
    assert sorted(run.strategy.silos) == ["a"]
    reasons = sorted(
        {str(reply.error.reason) for _, reply in run.grid.traffic if reply.has_error()}
    )
    assert reasons == [
        f"b lacks the weights that the run starts from: no {file.name}, not in SILOFL_WEIGHTS={sites['b']}",
        f"c lacks the weights that the run starts from: no {file.name}, and no SILOFL_WEIGHTS, "
        "the folder to put it into",
    ]


def test_the_sites_environment_names_the_folder(three, sites, file, monkeypatch):
    monkeypatch.setenv("SILOFL_WEIGHTS", str(sites["a"]))
    run = federate(three, init_weights=str(file), rounds=1, **RUN)
    assert sorted(run.strategy.silos) == ["a", "b", "c"]
    assert all(
        torch.equal(model.vector, vector(trained())) for model in run.sent_to("b", 1).values()
    )


def test_a_silo_with_another_file_refuses(three, sites, file):
    saved(sites["b"] / file.name, trained(100))
    run = federate(three, init_weights=str(file), rounds=1, **RUN, prepare=at(sites))
    (reason,) = {str(reply.error.reason) for _, reply in run.grid.traffic if reply.has_error()}
    assert reason.startswith(
        f"b has other weights than the server in {sites['b'] / file.name}: SHA-256 "
    )
    assert "personal" in run.kept("a") and "personal" in run.kept("c")


def test_a_server_names_no_path_at_a_silo(three, sites, file, tmp_path):
    """Only the last part of what it says counts, in the site's own folder."""
    secret = saved(tmp_path / "secret.safetensors", trained())
    with pytest.raises(
        (UserError, RuntimeError, ValueError),
        match=r"no secret.safetensors, not in SILOFL_WEIGHTS=",
    ):
        federate(three, init_weights=str(secret), rounds=1, **RUN, prepare=at(sites))


def test_a_run_that_goes_on_needs_the_same_file(three, sites, file, tmp_path):
    settings = {
        **RUN,
        "trainable": "head",
        "init_weights": str(file),
        "directory": tmp_path / "run",
    }
    federate(three, **settings, rounds=1, prepare=at(sites))
    for folder in (file.parent, *sites.values()):
        saved(folder / file.name, trained(100))
    before = (tmp_path / "run/config.toml").read_bytes()
    with pytest.raises(
        UserError, match=r"w.safetensors is another file than the run began with: restore it"
    ):
        federate(three, **settings, rounds=2, resume=True, prepare=at(sites))
    # What was refused has changed no setting
    assert (tmp_path / "run/config.toml").read_bytes() == before and b"rounds = 1\n" in before
    assert not [*(tmp_path / "run").glob("config-*")]


def test_an_export_has_the_files_frozen_layers(three, sites, file, tmp_path):
    settings = {
        **RUN,
        "trainable": "head",
        "init_weights": str(file),
        "directory": tmp_path / "run",
        "rounds": 2,
    }
    run = federate(three, **settings, prepare=at(sites))
    card = export_model(tmp_path / "run", "a", "last", tmp_path / "a.safetensors")
    assert card.model.part
    assert card.model.part["weights"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert torch.equal(vector(tensors)[:16], vector(trained())[:16])
    assert torch.equal(vector(tensors)[16:], run.personal("a"))
    (sites["a"] / file.name).unlink()
    flat_model.cache_clear()
    with pytest.raises(
        ValueError,
        match=r"^init-weights = .*weights-a/w.safetensors: No such file or directory$",
    ):
        export_model(tmp_path / "run", "a", "last", tmp_path / "a.safetensors")
