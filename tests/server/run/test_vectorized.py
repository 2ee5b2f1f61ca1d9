"""``vectorize = true``: silos that train together get the numbers of silos that take turns, in fewer computations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, OPTIONS, WITH_ALA, every
from flwr.app import Context, Message, RecordDict
from tiny import Files, Run, comparable, federate, forget_models, random_silos, round_of, same
from torch import Tensor, nn
from two_layers import DEEP, quadratic_loss

import server.app
import server.simulation.joint_networks
import server.simulation.vectorized
from client.app import app as client_app
from models.flat import FlatModel
from models.metrics import loss_function
from models.networks.mlp import MlpSettings
from models.networks.registry import MODELS, ModelSpec, build
from models.training import own_gradient
from server.simulation.engine import InProcessGrid, flower_identity
from server.simulation.joint_networks import Networks, Request, ignores_padding
from server.simulation.vectorized import VectorizedEngine, incompatibility
from strategies.base.client import SiloClient
from strategies.base.run_settings import parse_settings
from strategies.base.transport.payload import model_of

SIZES = {"a": 6, "b": 11, "c": 8, "d": 2}  # with batches of 4: last ones of 2, 3, 4 and 2
SMALL: dict[str, Any] = {**DEEP, **OPTIONS, "rounds": 3}


@pytest.fixture
def silos(tmp_path: Path) -> Files:
    return random_silos(tmp_path, SIZES)


@pytest.fixture(autouse=True)
def from_two_silos_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.simulation.vectorized, "FEWEST_SILOS", 2)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all batches whose gradient is computed by itself."""
    lengths: list[int] = []

    def counted(model: FlatModel, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
        lengths.append(len(y))
        return own_gradient(model, x, y, *rest)

    monkeypatch.setattr("models.training.own_gradient", counted)
    return lengths


def engine_of(run: Run) -> VectorizedEngine:
    assert run.grid.vectorized is not None
    return run.grid.vectorized


def assert_close(one: Run, other: Run, silos: Files) -> None:
    """Personal models, the server's state and the losses of both runs agree within float32's precision."""
    for silo in silos:
        torch.testing.assert_close(one.personal(silo), other.personal(silo), rtol=1e-4, atol=1e-5)
    assert one.strategy.state.arrays.keys() == other.strategy.state.arrays.keys()
    for name, array in one.strategy.state.arrays.items():
        torch.testing.assert_close(array, other.strategy.state.arrays[name], rtol=1e-4, atol=1e-5)
    losses = [
        {(r.round, r.silo, r.snapshot, r.split): r.value for r in run.rows if r.metric == "loss"}
        for run in (one, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
    assert len(losses[0]) > 20


ALONE = ("fedphp", "gpfl")  # their losses look into two networks, and at parameters


@every([n for n, (s, _, _) in (CASES | WITH_ALA).items() if "model" not in s])
def test_every_method_gets_the_same_numbers_in_fewer_computations(
    silos: Files, gradients: list[int], name: str
) -> None:
    """As many gradients as in turns, most of them with other silos'."""
    settings = (CASES | WITH_ALA)[name][0]
    in_turns = federate(silos, **settings, **SMALL)
    count = len(gradients)
    together = federate(silos, **settings, **SMALL, vectorize=True)
    assert_close(in_turns, together, silos)
    engine = engine_of(together)
    if settings["strategy"] == "fedcp":  # its head draws noise, as dropout does
        assert engine.takes_turns and len(gradients) == 2 * count
        return
    assert len(gradients) == count  # of those that do not ask for it together
    assert engine.joint + engine.single == count
    if settings["strategy"] in ALONE:
        assert engine.single == count > 0
    else:
        assert engine.computations + engine.single < 0.6 * count
    assert engine.takes_turns == ""


@pytest.mark.parametrize("loss", ["cross-entropy", "focal"])
def test_short_batches_are_padded(silos: Files, loss: str) -> None:
    """Steps of the four silos in batches of 4, two epochs: 4, 6, 4, 2. One computation for every step of the longest,
    but the last two, which b has for itself."""
    settings: dict[str, Any] = {"strategy": "fedavg", **SMALL, "rounds": 1, "loss": loss}
    together = federate(silos, **settings, vectorize=True)
    assert_losses_and_models(federate(silos, **settings), together, silos)
    engine = engine_of(together)
    assert (engine.computations, engine.joint, engine.single) == (4, 14, 2)


def test_without_a_label_to_ignore_only_equal_batches_are_joined(silos: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths per epoch: a 4 2, b 4 4 3, c 4 4, d 1. Steps 1 to 6: 444 and 1; 44, 2 and 1; 44 and 3; 44; 4; 3."""
    settings: dict[str, Any] = {"strategy": "fedavg", "batch_size": 4, "local_epochs": 2, "learning_rate": 0.3}
    quadratic_loss(monkeypatch)
    together = federate(silos, **settings, rounds=1, vectorize=True)
    assert_losses_and_models(federate(silos, **settings, rounds=1), together, silos)
    engine = engine_of(together)
    assert (engine.joint + engine.single, engine.joint) == (16, 11)


def assert_losses_and_models(one: Run, other: Run, silos: Files) -> None:
    for silo in silos:
        torch.testing.assert_close(one.personal(silo), other.personal(silo), rtol=1e-5, atol=1e-6)
        ours, theirs = (run.values("loss", silo, "personal", "train") for run in (one, other))
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert len(ours) == 1


@pytest.mark.parametrize(
    ("loss", "ignores"),
    [
        (loss_function("cross-entropy"), True),
        (loss_function("focal", 2.0), True),
        (lambda logits, y: 3 * loss_function("focal", 1.0)(logits, y), True),
        (lambda logits, y: F.cross_entropy(logits, y.clamp(min=0)), False),
        (lambda logits, y: F.cross_entropy(logits, y, reduction="sum") / len(y), False),
        (lambda logits, y: logits[torch.arange(len(y)), F.one_hot(y)[:, 0]].mean(), False),  # refuses the label
    ],
)
def test_which_losses_ignore_padding(loss: Callable[[Tensor, Tensor], Tensor], ignores: bool) -> None:
    assert ignores_padding(loss) is ignores


def networks(count: int) -> tuple[Networks, Callable[[int, int], Request]]:
    """Networks with different vectors, and a request by row and length of the batch."""
    net = Networks(FlatModel(build("mlp", (3,), 3, MlpSettings("4"))), count)
    rng = torch.Generator().manual_seed(1)
    for model in net.models:
        model.vector.copy_(torch.randn(len(model.vector), generator=rng))

    def request(row: int, length: int) -> Request:
        x, y = torch.randn(length, 3, generator=rng), torch.randint(3, (length,), generator=rng)
        return Request(row, row, net, x, y, loss_function("cross-entropy"), None, None)

    return net, request


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 2], [0, 2, 3]])
@pytest.mark.parametrize("frozen", [(), (slice(0, 16),), (slice(16, 31),)])
def test_rows_are_computed_in_place_or_gathered(rows: list[int], frozen: tuple[slice, ...]) -> None:
    """The gradients of the rows asked for are each network's own; the others' stay as they are."""
    net, make = networks(4)
    for model in net.models:
        model.freeze(*frozen)
        model.gradient.fill_(7.0)
    requests = [make(row, 3 + row) for row in rows]
    losses = net.gradient(requests)
    found = net.gradients.clone()
    for row, model in enumerate(net.models):
        if row not in rows:
            assert torch.equal(model.gradient, torch.full((31,), 7.0))
    for request, loss in zip(requests, losses, strict=True):
        expected = request.by_itself()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(found[request.row], net.models[request.row].gradient)
        for part in frozen:
            assert not found[request.row][part].any()


def test_silos_that_train_different_parts_are_computed_together() -> None:
    """Each gets the gradient of its own part, and zeros where it trains nothing."""
    net, make = networks(3)
    frozen = {0: slice(0, 16), 1: slice(16, 31), 2: slice(0, 0)}
    for row, model in enumerate(net.models):
        model.freeze(frozen[row])
        model.gradient.fill_(7.0)
    requests = [make(row, 4) for row in range(3)]
    assert len({net.kind(r.row, r.x, r.y, r.loss, r.network) for r in requests}) == 1
    losses = net.gradient(requests)
    found = net.gradients.clone()
    for request, loss in zip(requests, losses, strict=True):
        torch.testing.assert_close(loss, request.by_itself())
        torch.testing.assert_close(found[request.row], net.models[request.row].gradient)
        assert not found[request.row][frozen[request.row]].any()
        assert found[request.row].any()


def test_samples_of_several_inputs_are_computed_by_themselves() -> None:
    net, make = networks(2)
    request = make(0, 4)
    assert net.incompatibility(0, request.x, request.y, None) == ""
    assert "several inputs" in net.incompatibility(0, (request.x, request.x), request.y, None)


ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.05}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # Steps of the four silos in batches of 4, two epochs: 4, 6, 4, 2; as many in each of three rounds. The last two
        # of b are its own.
        ({"strategy": "fedavg", **ADAM, "optimizer_state": "reset"}, 3 * 14),
        ({"strategy": "fedavg", **ADAM, "optimizer_state": "reset", "amsgrad": True, "weight_decay": 0.01}, 3 * 14),
        # Of those that are kept, later rounds' have the same number of steps behind them in a and c only.
        ({"strategy": "fedavg", **ADAM, "optimizer_state": "keep"}, 14 + 2 * 8),
        ({"strategy": "fedrep", **ADAM}, None),  # on parts of the rows
        ({"strategy": "ditto", **ADAM, "optimizer_state": "keep"}, None),
        ({"strategy": "apple", **ADAM}, 0),  # on vectors of the silos' own
        ({"strategy": "fedavg", "momentum": 0.5, "optimizer_state": "keep"}, 0),  # sgd's take longer to join
    ],
)
def test_steps_that_are_taken_together_are_each_silos_own(
    silos: Files, settings: dict[str, Any], steps: int | None
) -> None:
    settings = {**SMALL, **settings}
    in_turns, together = (federate(silos, **settings, vectorize=v) for v in (False, True))
    assert_close(in_turns, together, silos)
    found = engine_of(together).steps
    assert found > 20 if steps is None else found == steps, found
    for silo in silos:
        ours, theirs = (run.grid.state(silo).arrays for run in (in_turns, together))
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_as_many_rows_step_together_as_the_cache_holds(silos: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of 31 parameters: of four silos three at first, then all that are left."""
    monkeypatch.setattr(server.simulation.joint_networks, "LARGEST_STEP", 3 * 31)
    settings: dict[str, Any] = {"strategy": "fedavg", **SMALL, **ADAM, "rounds": 1}
    together = federate(silos, **settings, vectorize=True)
    assert_losses_and_models(federate(silos, **settings), together, silos)
    assert engine_of(together).steps == 3 + 3 + 3 + 3  # a, b, c twice (d by itself), then twice again


def test_metrics_are_computed_together(silos: Files) -> None:
    """Two models on two splits of four silos in three rounds, one at the end; the metrics are those of turns."""
    settings: dict[str, Any] = {"strategy": "fedavg", **SMALL}
    in_turns, together = (federate(silos, **settings, vectorize=v) for v in (False, True))
    assert engine_of(together).evaluations == 2 * 2 * 4 * 3 + 2 * 4
    for one, other in zip(in_turns.rows, together.rows, strict=True):
        if one.metric != "round_seconds":
            assert (one.round, one.silo, one.split, one.snapshot, one.metric) == (
                other.round,
                other.silo,
                other.split,
                other.snapshot,
                other.metric,
            )
            assert one.value == pytest.approx(other.value, rel=1e-3, abs=1e-5, nan_ok=True)


def test_a_run_that_is_resumed_is_the_run_that_was_not(tmp_path: Path) -> None:
    """Bit for bit, with moments that are kept from round to round."""
    silos = random_silos(tmp_path, dict.fromkeys("abcd", 9))
    settings: dict[str, Any] = {"strategy": "fedavg", **SMALL, **ADAM, "optimizer_state": "keep", "vectorize": True}
    whole = federate(silos, **settings, directory=tmp_path / "whole")
    federate(silos, **{**settings, "rounds": 2}, directory=tmp_path / "parts")
    resumed = federate(silos, **settings, directory=tmp_path / "parts", resume=True)
    assert engine_of(resumed).steps > 0
    last = [[row for row in comparable(run.rows) if row[1] == "3"] for run in (whole, resumed)]
    assert len(last[0]) > 20 and last[0] == last[1]
    for silo in silos:
        ours, theirs = (run.grid.state(silo).arrays for run in (whole, resumed))
        assert ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)


def test_the_networks_are_rows_and_not_the_shared_one() -> None:
    shared = FlatModel(build("mlp", (3,), 3, MlpSettings("4")))
    before = shared.vector.clone()
    net = Networks(shared, 2)
    net.models[1].vector.add_(1.0)
    assert torch.equal(net.vectors, torch.stack([before, before + 1.0]))
    assert torch.equal(shared.vector, before)
    weight = net.models[1].module.get_submodule("fc1").weight
    assert weight.data_ptr() == net.vectors[1].data_ptr()  # type: ignore[operator]
    x, y = torch.ones(2, 3), torch.tensor([0, 1])
    own_gradient(net.models[1], x, y, F.cross_entropy)
    assert net.gradients[1].any()
    assert not net.gradients[0].any()


def test_in_later_rounds_those_who_train_longest_come_first(silos: Files) -> None:
    """So that silos that are left at the end of a round are neighbours in the matrix, and nothing is gathered."""
    begun: dict[int, list[str]] = {}

    def before(silo: str, message: Message, context: Context) -> None:
        if message.metadata.message_type == "train":
            begun.setdefault(round_of(message), []).append(silo)

    federate(silos, strategy="fedavg", **SMALL, vectorize=True, prepare=lambda grid: setattr(grid, "before", before))
    assert begun == {1: ["a", "b", "c", "d"], 2: ["b", "a", "c", "d"], 3: ["b", "a", "c", "d"]}


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_silo_that_fails_in_training_fails_alone(silos: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its second step of round 2, once in its own code and once inside the joint computation."""
    ordinary = SiloClient.gradient

    def faulty(self: SiloClient, x: Tensor, y: Tensor) -> Tensor:
        if self.round == 2 and self.silo.name in ("a", "c"):
            self.steps = getattr(self, "steps", 0) + 1  # type: ignore[attr-defined]
            if self.steps == 2 and self.silo.name == "a":  # type: ignore[attr-defined]
                raise RuntimeError("the disk is full")
            if self.steps == 2:  # type: ignore[attr-defined]
                y = y + 100
        return ordinary(self, x, y)

    monkeypatch.setattr(SiloClient, "gradient", faulty)
    in_turns = federate(silos, strategy="fedavg", **SMALL)
    together = federate(silos, strategy="fedavg", **SMALL, vectorize=True)
    assert_close(in_turns, together, silos)
    for run in (in_turns, together):
        rejected = [(r.round, r.silo) for r in run.rows if r.metric == "rejected"]
        assert rejected == [(2, "a"), (2, "c")]
        reasons = [str(reply.error.reason) for message, reply in run.grid.traffic if reply.has_error()]
        assert len(reasons) == 2
        assert any(reason.startswith("RuntimeError") for reason in reasons)  # the silo's own code
        assert any(reason.startswith("IndexError") for reason in reasons)  # the loss
    assert engine_of(together).takes_turns == ""


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_error_of_pytorchs_in_a_silos_own_code_is_an_error(
    silos: Files, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Also where the silo has waited for others: PyTorch looks at the C stack then, which coroutines share."""
    ordinary = SiloClient.gradient

    def faulty(self: SiloClient, x: Tensor, y: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1  # type: ignore[attr-defined]
        if self.silo.name == "b" and self.steps == step:  # type: ignore[attr-defined]
            x = x + torch.zeros(5)
        return ordinary(self, x, y)

    monkeypatch.setattr(SiloClient, "gradient", faulty)
    run = federate(silos, strategy="fedavg", **{**SMALL, "rounds": 1}, vectorize=True)
    assert [(r.round, r.silo) for r in run.rows if r.metric == "rejected"] == [(1, "b")]
    (reason,) = [str(reply.error.reason) for message, reply in run.grid.traffic if reply.has_error()]
    assert reason.startswith("RuntimeError in strategies/base/client.py")


def test_a_silo_that_diverges_does_not_reach_its_neighbours(silos: Files) -> None:
    def prepare(grid: Any) -> None:
        def before(silo: str, message: Any, context: Any) -> None:
            context.run_config["learning-rate"] = 1e30 if silo == "b" else 0.3

        grid.before = before

    runs = [federate(silos, strategy="local", **SMALL, prepare=prepare, vectorize=v) for v in (False, True)]
    for run in runs:
        assert {r.silo for r in run.rows if r.metric == "rejected"} == {"b"}
    for silo in "acd":
        torch.testing.assert_close(runs[0].personal(silo), runs[1].personal(silo))


def test_an_exception_that_ends_the_run_ends_all_silos(silos: Files) -> None:
    """Ctrl-C in one silo: no other goes on, and each unwinds as it would by itself."""
    unwound: list[str] = []

    def prepare(grid: Any) -> None:
        call = grid.call

        def wrapped(message: Any, context: Any) -> Any:
            try:
                return call(message, context)
            finally:
                if message.metadata.message_type == "train":
                    unwound.append(str(context.node_config["name"]))

        def before(silo: str, message: Any, context: Any) -> None:
            if silo == "c" and message.metadata.message_type == "train":
                raise KeyboardInterrupt

        grid.app, grid.before = wrapped, before

    with pytest.raises(KeyboardInterrupt):
        federate(silos, strategy="fedavg", **SMALL, prepare=prepare, vectorize=True)
    assert sorted(unwound) == ["a", "b", "c"]


@pytest.mark.parametrize("changes", [{"model": "tiny-bn"}, {"mlp.dropout": 0.3}])
def test_networks_that_keep_or_draw_something_take_turns(
    silos: Files, tiny_bn: None, lines: Callable[[], list[str]], changes: dict[str, Any]
) -> None:
    """Bit for bit what they get without ``vectorize``, and one line says so."""
    settings: dict[str, Any] = {"strategy": "ditto", **SMALL, **changes}
    in_turns, together = (federate(silos, **settings, vectorize=v) for v in (False, True))
    assert comparable(in_turns.rows) == comparable(together.rows)
    assert all(same(in_turns.personal(silo), together.personal(silo)) for silo in silos)
    assert (engine_of(together).joint, engine_of(together).computations) == (0, 0)
    (line,) = lines()
    assert "take turns" in line


def test_large_batches_are_computed_one_by_one(
    silos: Files, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    """31 parameters times 3 samples are allowed: an epoch's batches of 4 are not, those of 2, 3 and 2 are joined."""
    monkeypatch.setattr(server.simulation.joint_networks, "LARGEST_BATCH", 3 * 31)
    settings: dict[str, Any] = {"strategy": "fedavg", **SMALL, "rounds": 1}
    together = federate(silos, **settings, vectorize=True)
    assert_losses_and_models(federate(silos, **settings), together, silos)
    engine = engine_of(together)
    assert (engine.computations, engine.joint, engine.single) == (2, 6, 10)
    (line,) = lines()
    assert "batches of over 3 samples" in line


def test_who_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(name: str, shape: tuple[int, ...], **own: Any) -> str:
        return incompatibility(FlatModel(build(name, shape, 3, MlpSettings(**own) if own else None)))

    assert reason("mlp", (30,), hidden="64") == ""
    assert "dropout" in reason("mlp", (30,), hidden="64", dropout=0.1)
    assert "parameters" in reason("mlp", (784,), hidden="64")
    assert "convolutions" in reason("small-cnn", (1, 8, 8))
    assert "normalisation" in reason("resnet8", (3, 32, 32))


class Choosy(nn.Module):
    """Looks at numbers to decide what to do, which cannot be done for several silos at once."""

    block_names = ("fc",)

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y if float(y.detach().sum()) < 1e9 else 2 * y


def test_a_network_that_cannot_be_joined_takes_turns(
    silos: Files, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    spec = ModelSpec(
        "choosy", "tests", "tables of 3 columns", lambda shape, classes, own: Choosy(classes), kinds=("table",)
    )
    monkeypatch.setitem(MODELS, "choosy", spec)
    settings: dict[str, Any] = {"strategy": "apple", **SMALL, "model": "choosy"}
    in_turns, together = (federate(silos, **settings, vectorize=v) for v in (False, True))
    assert comparable(in_turns.rows) == comparable(together.rows)
    assert (engine_of(together).joint, engine_of(together).computations) == (0, 0)
    (line,) = lines()
    assert "cannot be computed jointly" in line
    forget_models()


@pytest.mark.parametrize("strategy", ["apple", "fedavg"])
def test_what_is_sent_down_and_kept_is_never_a_row(silos: Files, strategy: str) -> None:
    """A tensor of a reply or a state that were a row would change with the next round's training."""
    kept_moments: dict[str, Any] = {**SMALL, **ADAM, "optimizer_state": "keep"}
    run = federate(silos, strategy=strategy, **kept_moments, vectorize=True)
    (net,) = engine_of(run)._networks.values()
    rows = {t.untyped_storage().data_ptr() for t in (net.vectors, net.gradients)}
    kept = [t for silo in silos for t in run.grid.state(silo).arrays.values()]
    kept += run.strategy.state.arrays.values()
    assert len(kept) > 10
    assert not any(t.untyped_storage().data_ptr() in rows for t in kept)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert max(storages.values()) <= 4 * net.vectors.shape[1]  # nor one of a matrix of moments


def test_absent_silos_and_resumed_runs(silos: Files, tmp_path: Path) -> None:
    """Three of four silos a round; a continuation may switch ``vectorize``."""
    settings: dict[str, Any] = {"strategy": "fedamp", **SMALL, "participation": 0.75}
    whole = federate(silos, **settings, directory=tmp_path / "whole")
    federate(silos, **{**settings, "rounds": 2}, directory=tmp_path / "parts")
    resumed = federate(silos, **settings, directory=tmp_path / "parts", resume=True, vectorize=True)
    assert engine_of(resumed).joint > 0
    arrays = whole.strategy.state.arrays
    assert set(arrays) == set(resumed.strategy.state.arrays) == {model_of(n) for n in silos}
    for name, array in arrays.items():
        torch.testing.assert_close(array, resumed.strategy.state.arrays[name], rtol=1e-4, atol=1e-5)


def test_a_run_of_separate_processes_says_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    """`silofl run` and `flwr run` come through the ServerApp; each of their silos is alone in its process."""

    class Over(Exception):
        pass

    def over(*_: object) -> None:
        raise Over

    monkeypatch.setattr(server.app.RoundLoop, "run", over)
    run_config = parse_settings({"vectorize": True, "out": str(tmp_path / "run")}).flat()
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
    with pytest.raises(Over), flower_identity():
        server.app.main(InProcessGrid(client_app, 1, {}), context)
    (line,) = lines()
    assert "each trains by itself" in line
