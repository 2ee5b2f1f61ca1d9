"""`dp = true`: what leaves is made of noised gradients alone, noise repeats and differs where it must, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, OPTIONS, typical
from failing import fails
from flwr.app import Message, RecordDict
from hospitals import NETWORKS, hospital_files
from near import near
from representatives import sampled
from tiny import federate, random_silos, settings_of, write_silo
from torch import Tensor
from two_layers import DEEP, replies_of, sent_by

from client.app import app as client_app
from client.privacy.private_round import kept_key, private_round
from models.flat import FlatModel
from models.initialisation import flat_model
from models.networks.mlp import MlpSettings
from models.privacy.accountant import epsilon
from models.privacy.clipping import Clipping
from models.privacy.noise import seed
from models.samples import Samples
from models.training import generator
from partitions.common.errors import DataError, UserError
from server.simulation.engine import flower_identity
from strategies import strategies
from strategies.base.client import Silo, SiloClient
from strategies.base.privacy import Privacy, PrivateTraining, Sampling, Units, plan_of
from strategies.base.settings import Common, NoSettings
from strategies.base.state import GLOBAL, State
from strategies.base.transport.payload import Model, array_record, decode, tensor_of

SIZES = {"a": 9, "b": 11, "c": 8}
PRIVATE = [
    name
    for name, method in strategies().items()
    if method.info.training.dp in ("gradient", "sums")
]
VARIANTS = [
    name
    for name in CASES
    if CASES[name][0]["strategy"] in PRIVATE and "hf" not in CASES[name][0].values()
]


def options(name, **changes):
    return {
        **CASES[name][0],
        **DEEP,
        **OPTIONS,
        "rounds": 3 if name in ("fedlama", "lg-fedavg") else 2,
        **changes,
    }


def private(name, **changes):
    case = options(name, dp=True, **changes)
    return {key: value for key, value in case.items() if key != "per-fedavg.variant"}


def messages(run):
    found: dict[tuple[int, str, str], Any] = {}
    for server_round, silo, payload, _ in replies_of(run):
        found |= {(server_round, silo, name): m.vector for name, m in payload.models.items()}
        found |= {(server_round, silo, name): value for name, value in payload.numbers.items()}
    return found


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.fixture
def unseen(monkeypatch):
    """Numbers that know no data in the place of the noised gradients and sums."""

    def gradient(training, x, y, loss, network):
        training.batches[y].uses -= 1
        training.gradients += 1
        rng = generator(training.gradients, "in place of a gradient")
        training.model.gradient.copy_(torch.randn(training.model.layout.size, generator=rng))
        return torch.zeros(())

    monkeypatch.setattr(PrivateTraining, "gradient", gradient)
    monkeypatch.setattr(PrivateTraining, "noised", lambda training, total, most: total * 0 + 5)


@typical(VARIANTS)
def test_what_leaves_is_a_function_of_noised_gradients_only(
    tmp_path, unseen, name, tiny_bn, **changes
):
    """Other data send the same messages."""
    runs = []
    for data_seed in (0, 1):
        folder = tmp_path / str(data_seed)
        folder.mkdir()
        files = random_silos(folder, SIZES, seed=data_seed)
        own = private(name, **changes)
        runs.append(messages(federate(files, state_dir=folder / "state", **own)))
    one, other = runs
    assert one and one.keys() == other.keys()
    assert [key for key in one if not equal(one[key], other[key])] == []


def test_a_rate_of_its_own_for_a_block_leaves_it_so(tmp_path, unseen, tiny_bn):
    test_what_leaves_is_a_function_of_noised_gradients_only(
        tmp_path, unseen, "fedavg", tiny_bn, block_rates="fc1=0.1"
    )


UNSCALED = {"dp": True, "normalization": "none"}
# Texts, signals, several inputs, outlines, volumes, and parts of a network
OF_DATA = {
    **{
        kind: NETWORKS[kind]
        for kind in ("multilabel", "ordinal", "regression", "segmentation", "balls")
    },
    **{kind: NETWORKS[kind] for kind in ("notes", "pulses", "stays")},
    "notes, the last layer": {**NETWORKS["notes"], "trainable": "head"},
    "notes, LoRA": {**NETWORKS["notes"], "lora_rank": 2},
    "pulses, LoRA and the GRU": {
        **NETWORKS["pulses"],
        "lora_rank": 2,
        "trainable": "gru.*,head",
    },
}


@sampled("name", OF_DATA, 2)
def test_it_is_with_every_input_task_and_part(tmp_path, unseen, name):
    """Whole runs of Ditto, whose own model sees the records as they are; then with inputs in another order, and masks,
    findings and measurements that are all those of the first record.
    """
    settings = {**OF_DATA[name], **UNSCALED, "strategy": "ditto", "rounds": 2}
    kind, _, _ = name.partition(",")
    files = hospital_files(tmp_path, kind)
    one = messages(federate(files, state_dir=tmp_path / "one", **settings))
    for file in files.values():
        arrays = dict(np.load(file))
        arrays |= {
            key: np.flip(value, 0) for key, value in arrays.items() if key.startswith("x")
        }
        if arrays["y"].ndim > 1:  # of one class alone there is no file
            arrays["y"] = np.repeat(arrays["y"][:1], len(arrays["y"]), 0)
        np.savez(file, **arrays)
    other = messages(federate(files, state_dir=tmp_path / "other", **settings))
    assert len(one) == 6 and one.keys() == other.keys()
    assert [key for key in one if not equal(one[key], other[key])] == []


@sampled("name", OF_DATA, 3)
def test_a_record_s_gradient_is_its_own_in_all_of_them(tmp_path, name):
    """A round with noise, in which the records of each network go together."""
    settings = {**OF_DATA[name], **UNSCALED, "strategy": "fedavg", "rounds": 1}
    seen = []
    real = Clipping._trial

    def trial(*given):
        seen.append(real(*given))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clipping, "_trial", trial)
        run = federate(
            hospital_files(tmp_path, name.partition(",")[0]),
            state_dir=tmp_path / "state",
            **settings,
        )
    assert len(messages(run)) == 3 and seen == [True] * 3
    assert all(bool(torch.isfinite(value).all()) for value in messages(run).values())


def test_survival_is_refused(tmp_path):
    settings = {**NETWORKS["survival"], **UNSCALED, "strategy": "fedavg"}
    with pytest.raises(
        Exception, match="dp = true: not for survival: Cox's loss is no sum over records"
    ):
        federate(hospital_files(tmp_path, "survival"), state_dir=tmp_path / "state", **settings)


@pytest.fixture
def three(tmp_path):
    return random_silos(tmp_path, SIZES)


@pytest.mark.parametrize("name", [n for n, m in strategies().items() if not m.info.training.dp])
def test_a_method_that_is_not_private_says_why(three, name):
    reason = strategies()[name].info.training.dp
    assert "declare" not in reason
    fails(
        UserError, f"^dp = true: not with {name}: ", settings_of, three, strategy=name, dp=True
    )


@pytest.mark.parametrize("name", ["local", "fedavg"])
def test_no_metric_leaves_a_hospital(three, tmp_path, name):
    run = federate(three, state_dir=tmp_path / "state", **options(name, dp=True))
    assert run.values("round_seconds") and not run.values("accuracy", "a", "personal")
    for _, _, _, reply in replies_of(run):
        found = {key.partition(".")[0] for key in reply.content["metrics"]}
        # The first three are not of the records
        assert found - {"epsilon", "delta", "dp_steps"} == {"seconds"}


def test_batch_normalisation_is_refused_once_before_round_1(three, tmp_path, tiny_bn):
    """Not by each silo in the round; where nothing leaves, it may stay."""
    asked = []

    def prepare(grid):
        grid.before = lambda silo, message, context: asked.append(message.metadata.message_type)

    given = {"model": "tiny-bn", "dp": True, "rounds": 1}
    with pytest.raises(
        UserError, match=r"^dp = true: not with this network: its BatchNorm1d \("
    ):
        federate(three, "fedavg", state_dir=tmp_path / "one", prepare=prepare, **given)
    assert set(asked) == {"query"}
    # Nor where each record goes through the network alone, in evaluation mode
    for name in ("local", "gh-ofl"):
        federate(three, name, state_dir=tmp_path / name, **given)


def test_a_step_by_hand(tmp_path, monkeypatch):
    """Two silos, one step of all records (B = n), noise seen: w - η (Σ_i clipped g_i + z) / n, then the mean.

    A linear layer at zero: g_i = (p - e_y) (x, 1), p = 1/2 each, so |g_i|² = (|x|² + 1) / 2.
    """
    import strategies.base.privacy as module

    rows = {"a": ([[1.0], [3.0]], [0, 1]), "b": ([[-2.0], [1.0]], [1, 0])}
    files = {name: write_silo(tmp_path / f"{name}.npz", x, y) for name, (x, y) in rows.items()}
    noise = torch.tensor([0.5, -0.25, 0.125, 0.0])
    monkeypatch.setattr(
        module, "add_noise", lambda total, deviation, key: total.double() + deviation * noise
    )
    settings = {"dp__clip_norm": 0.8, "dp__noise_multiplier": 2.0, "learning_rate": 0.1}
    run = federate(
        files, "fedavg", state_dir=tmp_path / "s", rounds=1, local_epochs=1, dp=True, **settings
    )
    start = run.received("a", 1).double().numpy()
    sent = {silo: payload.models["model"].vector for _, silo, payload, _ in replies_of(run)}
    for name, (x, y) in rows.items():
        total = np.zeros(4)
        for (value,), label in zip(x, y, strict=True):
            scores = start[:2] * value + start[2:]
            p = np.exp(scores) / np.exp(scores).sum()
            p[label] -= 1
            g = np.concatenate([p * value, p])
            total += g * min(1, 0.8 / (np.linalg.norm(g) + 1e-6))
        expected = start - 0.1 * (total + 1.6 * noise.double().numpy()) / 2
        near(sent[name], expected)


def test_a_record_moves_a_step_by_its_sensitivity_at_most(tmp_path, monkeypatch):
    """One record more, with the same noise: w moves by at most η C / B, whatever the record is."""
    import strategies.base.privacy as module

    monkeypatch.setattr(module, "add_noise", lambda total, deviation, key: total.double())
    # Every unit is drawn, and what is divided by stays that of ten records.
    monkeypatch.setattr(Sampling, "rate", property(lambda _: 1.0))
    monkeypatch.setattr(Sampling, "divisor", property(lambda _: 10.0))
    monkeypatch.setattr(Sampling, "steps", lambda _, epochs: epochs)
    x, y = np.random.default_rng(0).normal(size=(10, 3)), np.arange(10) % 3
    sent = []
    for more, label in ((0, 0), (1, 0), (1, 1)):  # of the last two one is classified wrongly
        folder = tmp_path / f"{more}{label}"
        folder.mkdir()
        rows, labels = np.vstack([x, 1e4 * np.ones((more, 3))]), [*y, *[label] * more]
        files = {
            name: write_silo(folder / f"{name}.npz", rows, labels, 3) for name in ("a", "b")
        }
        run = federate(
            files,
            "fedavg",
            state_dir=folder / "s",
            rounds=1,
            local_epochs=1,
            dp=True,
            dp__clip_norm=0.5,
        )
        sent.append(sent_by(run, "a", 0))
    moved = [float((sent[0] - other).norm()) for other in sent[1:]]
    assert max(moved) <= 1.0001 * 0.5 / 10 and max(moved) > 0.9 * 0.5 / 10


def test_a_repeated_round_sends_the_same_bits_and_another_run_others(three, tmp_path):
    settings = options("fedavg", dp=True, strategy="fedavg")
    whole = messages(
        federate(three, state_dir=tmp_path / "state", directory=tmp_path / "run", **settings)
    )
    other = messages(
        federate(three, state_dir=tmp_path / "state", directory=tmp_path / "other", **settings)
    )
    assert not any(equal(whole[key], other[key]) for key in whole)


def replayed(three, tmp_path, change, name="fedavg"):
    """What silo a sends in round 1, and when the same message comes again, changed by ``change(content)``."""
    run = federate(three, state_dir=tmp_path / "state", **options(name, dp=True, rounds=1))
    grid = run.grid
    context = grid.context_of("a")
    for message, reply in grid.traffic:
        kind, silo = message.metadata.message_type, grid.name_of(message.metadata.dst_node_id)
        if (kind, silo) == ("train", "a"):
            content = RecordDict(dict(message.content))
            change(content)
            with flower_identity():
                copy = Message(
                    content, dst_node_id=message.metadata.dst_node_id, message_type=kind
                )
                again = client_app(copy, context)
            sent = [decode(r.content)[0].models.values() for r in (reply, again)]
            return [next(iter(models)).vector for models in sent]
    raise AssertionError("silo a was not trained")


@pytest.mark.parametrize("name", ["fedavg", "gh-ofl"])
def test_the_same_message_again_sends_the_same_bits(three, tmp_path, name):
    one, other = replayed(three, tmp_path, lambda content: None, name)
    assert torch.equal(one, other)


def test_another_setting_of_the_network_gets_other_samples(three, tmp_path, monkeypatch):
    """The digest of a round has it, whether or not the number of parameters changes with it."""
    seen = []

    def noted(*given):
        seen.append(given[-1])
        private_round(*given)

    monkeypatch.setattr("client.session.private_round", noted)
    federate(three, state_dir=tmp_path / "state", **options("fedavg", dp=True, rounds=1))
    assert len(seen) >= 3 and all(
        found == ("mlp", MlpSettings(DEEP["mlp__hidden"])) for found in seen
    )


def test_another_model_in_the_same_round_gets_other_noise(three, tmp_path):
    """Else a server that repeats a round could subtract the noise."""

    def change(content):
        for name, record in content.array_records.items():
            content[name] = array_record(
                {key: tensor_of(value) + 1e-6 for key, value in record.items()}
            )

    one, other = replayed(three, tmp_path, change)
    # With the same noise and samples a millionth would move them by about as little.
    assert float((one - other).norm()) > 0.05


def test_steps_and_rates_are_those_of_the_plan():
    """round(E n / B) steps, in every division into epochs; rate B / n, 1 where B is more than n."""
    for n, size, epochs in ((100, 64, 3), (5, 64, 2), (1000, 64, 1), (7, 2, 5)):
        sampling = Sampling(n, n, size)
        assert sampling.steps(epochs) == max(round(epochs * n / min(size, n)), 1)
        assert sum(map(sampling.steps_of_epoch, range(epochs))) == sampling.steps(epochs)
        assert sampling.rate == min(size / n, 1) and sampling.divisor == pytest.approx(
            min(size, n)
        )
    patients = Sampling(records=100, units=20, batch_size=10)
    assert patients.rate == 0.1 and patients.divisor == 2 and patients.steps(1) == 10


def test_several_gradients_of_a_batch_have_more_noise_each(monkeypatch):
    """K of them, of deviation σ C √K each, tell together as much as one of deviation σ C."""
    deviations = []

    def noised(total, deviation, key):
        deviations.append(deviation)
        return total

    monkeypatch.setattr("strategies.base.privacy.add_noise", noised)
    model, sampling = flat_model("linear", (3,), 2, None, "cpu"), Sampling(4, 4, 4)
    plan = plan_of(
        Privacy(clip_norm=0.5, noise_multiplier=2.0), Common(batch_size=4), sampling, [1], ""
    )
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for uses in (1, 3):
        training = PrivateTraining(plan, sampling, Units(4), b"key", model, uses)
        training.note(y, None)
        for _ in range(uses):
            training.gradient(x, y, F.cross_entropy, None)
    assert deviations == pytest.approx([1.0, *[3**0.5] * 3])
    fails(AssertionError, "not drawn for it", training.gradient, x, y, F.cross_entropy, None)


def test_a_target_epsilon_is_that_of_all_rounds_together():
    sampling = Sampling(1000, 1000, 100)
    plan = plan_of(Privacy(target_epsilon=2.0), Common(rounds=30), sampling, [1, 2], "")
    assert plan.steps == 30 and plan.delta == 1e-5
    assert 1.99 < epsilon(plan.noise_multiplier, 0.1, 30 * plan.steps, plan.delta) <= 2.0


def test_training_beyond_the_plan_fails(three, tmp_path, monkeypatch):
    monkeypatch.setattr(SiloClient, "noised_passes", lambda self: (1,))  # of two epochs
    with pytest.raises(Exception, match="no silo sent a usable update"):
        federate(three, state_dir=tmp_path / "state", **options("fedavg", dp=True))


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"dp__unit": "patient"}, "dp.unit = patient: a's training samples name no patients"),
        ({"normalization": "agreed"}, "dp = true: not with normalization = agreed"),
        ({"normalization": "silo"}, "dp = true: not with normalization = silo"),
        ({"dp__delta": 0.5}, r"dp.delta = 0.5 is more than 1 / 9"),
    ],
)
def test_what_is_not_private_is_refused_by_the_silo(three, tmp_path, changes, line):
    with pytest.raises(Exception, match=line):
        federate(three, state_dir=tmp_path / "state", **options("fedavg", dp=True, **changes))


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"ala": True}, "^dp = true: not with ala = true"),
        (
            {"tf32": "on"},
            "^dp = true: not with tf32 = on: a clipped sum is exact in float32 alone",
        ),
        ({"precision": "bf16"}, "^dp = true: not with precision = bf16"),
        # Beyond what float32 tells
        ({"dp__clip_norm": 1e-44}, r"dp\.clip-norm"),
        ({"dp__clip_norm": 1e30}, r"dp\.clip-norm"),
    ],
)
def test_what_does_not_go_with_it_is_refused(three, changes, line):
    fails(UserError, line, settings_of, three, strategy="fedavg", dp=True, **changes)


def test_patients_are_drawn_whole(tmp_path):
    """Records of one patient share one clipped gradient; batches hold all of a patient's records or none."""
    files = {}
    for name in ("a", "b"):
        x = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)
        y = np.arange(12) % 3
        ids = np.repeat(np.arange(4), 3)
        files[name] = tmp_path / f"{name}.npz"
        arrays: dict[str, Any] = {
            f"{k}_{part}": v for part in ("train", "test") for k, v in (("x", x), ("y", y))
        }
        np.savez(files[name], classes=3, patient_train=ids, patient_test=ids + 10, **arrays)
    run = federate(
        files,
        state_dir=tmp_path / "s",
        **options("fedavg", dp=True, dp__unit="patient", dp__noise_multiplier=0.5),
    )
    assert len(messages(run)) == 4


def test_whether_a_model_without_noise_diverges_is_not_told(three, tmp_path):
    """Ditto's own model does here, in every round: the message is that of a run where it does not."""
    settings = options("ditto", strategy="ditto", rounds=2)
    with pytest.raises(Exception, match="no silo sent a usable update"):
        federate(three, state_dir=tmp_path / "plain", **{**settings, "ditto__lambda": 1e30})
    whole = {}
    for mu in (0.1, 1e30):
        run = federate(
            three, state_dir=tmp_path / f"{mu}", **{**settings, "dp": True, "ditto__lambda": mu}
        )
        whole[mu] = messages(run)
        kept = [
            State.load(file).arrays["personal"]
            for file in sorted((tmp_path / f"{mu}").rglob("*-000002.safetensors"))
        ]
        assert len(kept) == 3 and all(bool(torch.isfinite(model).all()) for model in kept)
    assert len(whole[1e30]) == len(whole[0.1]) == 6


START = torch.ones(8)
ROUND: dict[str, Any] = {
    "round": 1,
    "models": {GLOBAL: Model(START)},
    "numbers": {},
    "evaluate": False,
}


def silo_at_one(rows, model=None, **more):
    """A silo of these records of three columns and one class; every initial model is ones."""
    train = Samples(rows, np.zeros(len(rows), np.int64))
    model = model or flat_model("linear", (3,), 2, None, "cpu")
    return Silo("a", train, train, train, model, lambda purpose: START, **more)


def test_a_study_s_step_is_counted_from_the_received_model():
    """With noise: the silo's own one, which may have none, decides nothing, be it near or far."""
    silo = silo_at_one(np.zeros((4, 3), np.float32), max_step=0.5)
    common, info = Common(dp=True, batch_size=2, rounds=2), strategies()["fedavg"].info

    def sent(size, own, this=2, *, dp=True):
        vector = size * START
        config = {**ROUND, "round": this, "models": {GLOBAL: Model(vector)}}
        client = SiloClient(silo, common, NoSettings(), own, info)
        if dp:
            private_round(client, Privacy(), Units(4), b"key", config)
        client.fit([vector], config)
        return client.state

    for own in (1.0, 5.0, 9.0):
        state = sent(1.4, State({"personal": own * START, "received": START}))
        assert torch.equal(state.arrays["received"], 1.4 * START)
        far = State({"personal": own * START, "received": START})
        fails(UserError, "of round 2 is further from", sent, 5.0, far)
    near_by = State({"personal": START})
    fails(UserError, "of round 2 is further from", sent, 5.0, near_by, dp=False)
    # Before its first training
    for this, reason in ((1, "the first model is not the one"), (2, "is further from")):
        fails(UserError, reason, sent, 5.0, State(), this)


class Failing(torch.nn.Module):
    """Fails when it is evaluated, or for a value, as networks of a hospital's own may."""

    block_names = ("out",)

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(3, 2)

    def forward(self, x):
        if not self.training or bool((x > 50).any()):
            raise ValueError("a value of a record")
        return self.out(x)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "apfl", "gh-ofl"])
def test_no_error_depends_on_the_records(name):
    """Neither of the training with noise, nor of one without, nor of an evaluation."""
    model, method = FlatModel(Failing()), strategies()[name]
    rows = np.zeros((4, 3), np.float32)
    rows[2] = 51
    silo = silo_at_one(rows, model)
    common = Common(dp=True, batch_size=4, rounds=2, strategy=name)
    config = {**ROUND, "evaluate": True}
    client = method.client(silo, common, method.Settings(), State(), method.info)
    private_round(client, Privacy(), Units(4), b"key", config)
    vectors, _, metrics = client.fit([START], config)
    assert bool(torch.isfinite(vectors[0]).all()) and not any("test" in key for key in metrics)
    assert model.module.training


@pytest.mark.parametrize(
    "change",
    [
        # Its own model may start from another one, so that two replies would be of one sample
        {"late": 2},
        # What changes the rounding of a sum: else a server gets new noise on one sample as often as it likes, each
        # charged as if of another sample
        {"threads": 2},
        {"device": "cuda"},
        {"network": ("mlp", "dropout = 0.5")},
    ],
)
def test_what_changes_the_numbers_of_a_round_draws_other_samples(change):
    silo, config = silo_at_one(np.zeros((64, 3), np.float32)), {**ROUND, "round": 2}
    drawn = []
    for more in ({}, change, {"out": "another"}):
        own: dict[str, Any] = {k: v for k, v in more.items() if k not in ("late", "network")}
        common = Common(dp=True, batch_size=32, rounds=2, **own)
        client = SiloClient(silo, common, NoSettings(), State(), strategies()["fedavg"].info)
        told = {**config, **{k: v for k, v in more.items() if k == "late"}}
        private_round(client, Privacy(), Units(64), b"key", told, more.get("network"))
        assert client.privacy is not None
        batches = client.privacy.draw_batches(1, 0, torch.device("cpu"))
        drawn.append([index.tolist() for index, _ in batches])
    assert drawn[0] == drawn[2] != drawn[1]


def test_the_key_of_the_noise_is_made_once_and_belongs_to_its_owner(tmp_path):
    key = kept_key(tmp_path)
    assert len(key) == 32 and key == kept_key(tmp_path) != kept_key(tmp_path / "other")
    assert (tmp_path / "noise-key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "noise-key").write_bytes(key[:-1])
    fails(DataError, "is damaged: 31 bytes, not 32", kept_key, tmp_path)
    assert 0 <= seed(key) < 2**63


def test_a_hospital_without_a_place_for_its_key_refuses(three):
    with pytest.raises(Exception, match="has no state-dir to keep the key of its noise in"):
        federate(three, **options("fedavg", dp=True))
