"""Settings of local training, each against PyTorch's own: a plain loop over the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CASES, ONE_OF_EACH, OPTIONS, typical
from failing import fails
from near import near
from representatives import sampled
from tiny import federate, random_silos
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.testing import assert_close
from torch.utils.data import WeightedRandomSampler
from two_layers import DEEP
from typical_inputs import TYPICAL

from models.flat import FlatModel, Passes
from models.networks.registry import build
from models.optimizers import block_shares
from models.precision.autocast import DTYPES
from models.samples import Samples
from models.shapes import example
from models.tasks import MULTICLASS, task_of
from models.training import generator, loss_gradient, predict, use_threads
from partitions.common.errors import DataError, UserError
from strategies import strategies
from strategies.base.client import SiloClient
from strategies.base.run_settings import parse_settings
from strategies.base.silo import Silo, class_weights, draw_weights
from strategies.base.state import State

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(45, 6)).astype(np.float32), RNG.choice(3, 45, p=(0.6, 0.3, 0.1))


def network(norm=False):
    torch.manual_seed(3)
    between = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3))


def client(norm=False, **changes):
    """A silo half of FedAvg with these settings, in round 2 of 5."""
    common = {"learning-rate": 0.1, "batch-size": 16, "local-epochs": 2, "rounds": 5}
    settings = parse_settings(common | {k.replace("_", "-"): v for k, v in changes.items()})
    model = FlatModel(network(norm))
    split = Samples(X, Y)
    silo = Silo("a", split, split, split, model, lambda purpose: model.vector.clone())
    made = SiloClient(silo, settings.common, None, State(), settings.strategy.info)
    made.round = 2
    return made


Loss = Callable[[Tensor, Tensor], Tensor]


def plain(made, make, loss=F.cross_entropy, *, clip=0.0, parts=1, rates=None, dtype=None):
    """The parameters (Σ,) after a loop as PyTorch's tutorials have it, on the batches of ``made``."""
    net = network()
    optimizer = make(net.parameters())
    scheduler = rates(optimizer) if rates else None
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for x, y in made.batches():
        optimizer.zero_grad()
        for index in torch.tensor_split(torch.arange(len(y)), parts):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                outputs = net(x[index])
            scaler.scale(loss(outputs.float(), y[index]) * len(index) / len(y)).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        if scheduler:
            scheduler.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def assert_trains_as(made, expected):
    default = client()
    for one in (made, default):
        one.train()
    assert_close(made.model.vector, expected, rtol=2e-6, atol=2e-7)
    # The setting does something
    assert (made.model.vector - default.model.vector).abs().max() > 1e-4


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_is_torchs(amsgrad):
    made = client(optimizer="adamw", weight_decay=0.5, amsgrad=amsgrad)
    assert_trains_as(
        made,
        plain(made, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, amsgrad=amsgrad)),
    )


def test_clip_gradient_is_clip_grad_norm():
    made = client(clip_gradient=0.05)
    assert_trains_as(made, plain(made, sgd, clip=0.05))


def test_label_smoothing_is_torchs():
    made = client(label_smoothing=0.3)
    assert_trains_as(
        made,
        plain(made, sgd, lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=0.3)),
    )


def test_class_weights_are_torchs():
    made = client(class_weights="balanced", label_smoothing=0.1)
    counts = np.bincount(Y)
    weights = torch.tensor(45 / (3 * counts), dtype=torch.float32)
    loss = nn.CrossEntropyLoss(weights, label_smoothing=0.1)
    assert_trains_as(made, plain(made, sgd, loss))


def test_the_balanced_sampler_is_torchs():
    """A class is drawn as often as another, and a full gradient is of all samples nevertheless."""
    made, counts = client(sampler="balanced"), np.bincount(Y)
    rng = generator(42, "a", 2, "train")
    theirs = WeightedRandomSampler((1 / counts[Y]).tolist(), 45, generator=rng)
    expected = torch.tensor([list(theirs) for _ in range(2)]).flatten()
    assert torch.equal(torch.cat([y for _, y in made.batches()]), torch.tensor(Y)[expected])
    (every,) = {
        tuple(sorted(torch.cat([y for _, y in made.batches(1, as_they_are=True)]).tolist()))
    }
    assert every == tuple(sorted(Y))


def test_one_rare_patient_is_not_most_of_a_batch():
    """A class of 1 sample counts as min-batch-size of them: its weight is an eighth of what it would be."""
    y = np.array([0] * 90 + [1] * 9 + [2])
    made = client()
    split = Samples(np.zeros((100, 6), np.float32), y)
    silo = replace(made.silo, train=split, min_batch_size=8)
    assert class_weights(silo).tolist() == pytest.approx([100 / 270, 100 / 27, 100 / 24])
    drawn = draw_weights(silo, parse_settings({"sampler": "balanced"}).common)
    assert drawn is not None and float(drawn[-1] / drawn.sum()) == pytest.approx(1 / 17)


def test_an_absent_class_counts_among_the_classes():
    """C is of the run: 6 samples of class 0 and 2 of class 2 of three classes weigh 8/18 and 8/6, not 8/12 and 8/4."""
    made = client()
    split = Samples(np.zeros((8, 6), np.float32), np.array([0] * 6 + [2] * 2))
    weights = class_weights(replace(made.silo, train=split))
    assert weights[[0, 2]].tolist() == pytest.approx([8 / 18, 8 / 6])


@pytest.mark.parametrize(
    "tf32, found", [("auto", (False, True)), ("on", (True, True)), ("off", (False, False))]
)
def test_tf32_and_determinism_are_torchs_switches(tf32, found):
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    try:
        use_threads(1, tf32, deterministic=True)
        assert (matmul.allow_tf32, cudnn.allow_tf32) == found
        assert cudnn.deterministic and torch.are_deterministic_algorithms_enabled()
    finally:
        use_threads(1)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, True)
    assert not cudnn.deterministic and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("precision, dtype", DTYPES.items())
def test_a_lower_precision_is_autocast_and_grad_scaler(precision, dtype):
    made, default = client(precision=precision), client()
    expected = plain(made, sgd, dtype=dtype)
    for one in (made, default):
        one.train()
    assert torch.equal(made.model.vector, expected)
    assert made.model.vector.dtype == torch.float32
    assert not torch.equal(made.model.vector, default.model.vector)


def test_evaluation_is_in_the_runs_precision_and_another_run_undoes_it():
    """The silos and runs of a process share a network."""
    made, x = client(precision="bf16"), torch.from_numpy(X)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network()(x).float()
    assert torch.equal(predict(made.model, made.silo.test), expected)
    SiloClient(made.silo, parse_settings({}).common, None, State(), made.info)
    assert torch.equal(predict(made.model, made.silo.test), network()(x))


def test_a_gradient_that_overflows_is_computed_again_with_half_the_scale():
    """GradScaler skips the batch; here none is lost, and batch normalisation sees it once."""
    made, seen = client(norm=True, precision="fp16"), []
    made.model.scale.factor = 2.0**40
    made.model.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    made.train()
    assert 1 < made.model.scale.factor < 2.0**40 and len(seen) > 6
    counted = made.model.module.get_buffer("1.num_batches_tracked")
    assert int(counted) == 6 and bool(made.model.vector.isfinite().all())
    reference = client(norm=True, precision="fp16")
    reference.model.scale.factor = made.model.scale.factor
    reference.train()
    assert torch.equal(made.model.vector, reference.model.vector)


@sampled("name", TYPICAL, 3)
def test_every_network_computes_in_bf16(name):
    torch.manual_seed(0)
    shape = TYPICAL[name]
    model = FlatModel(build(name, shape, 3))
    x, y = example(shape, 4), torch.zeros(4, dtype=torch.long)
    model.compute(Passes(precision="bf16"))
    found = model.module(x)
    assert found.dtype == torch.float32
    loss_gradient(model, x, y, lambda outputs, y: outputs.square().mean())
    assert bool(model.gradient.isfinite().all()) and bool(model.gradient.any())
    model.compute(Passes())
    assert not torch.equal(found, model.module(x))


def test_accumulated_parts_are_the_batch():
    """Without normalisation over a batch, its gradient is the sum of its parts'; each part is computed alone."""
    made, seen = client(accumulate=3), []
    made.model.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    made.train()
    assert seen[:6] == [6, 5, 5, 6, 5, 5] and max(seen) == 6
    near(made.model.vector, plain(made, sgd, parts=3), 1e-5)
    near(made.model.vector, plain(made, sgd), 1e-5)


def two_rounds(method, folder):
    """Files of three silos, and the settings of two rounds."""
    own = CASES[ONE_OF_EACH[method]][0].items()
    changes = {key.replace("-", "_").replace(".", "__"): value for key, value in own}
    files = random_silos(folder, [13, 9, 11])
    return files, {**DEEP, **OPTIONS, **changes, "rounds": 2, "evaluate_every": 0}


def models(files, options):
    run = federate(files, **options)
    return torch.cat([run.personal(silo) for silo in "abc"])


def test_accumulated_parts_are_the_batch_with_weights_of_classes():
    """A batch's loss is divided by the sum of its weights, which parts have unequal shares of."""
    given = {"class_weights": "balanced", "label_smoothing": 0.1}
    made = client(accumulate=3, **given)
    made.train()
    loss = nn.CrossEntropyLoss(class_weights(made.silo), label_smoothing=0.1)
    near(made.model.vector, plain(made, sgd, loss), 1e-5)


@typical(ONE_OF_EACH, "method")
def test_every_method_adds_up_the_parts_of_a_batch_or_refuses(method, tmp_path, tiny_bn):
    """The models are those of whole batches, up to the order of sums; batch normalisation sees parts."""
    files, options = two_rounds(method, tmp_path)
    if not strategies()[method].info.training.plain_loss:
        with pytest.raises(UserError, match=rf"accumulate = 2: not for {method}"):
            federate(files, **options, accumulate=2)
        return
    whole, parts = (models(files, options | {"accumulate": k}) for k in (1, 2))
    if options.get("model") != "tiny-bn":
        assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_no_part_is_too_small_for_batch_norm():
    made, seen = client(norm=True, accumulate=16), []
    made.model.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    made.train()
    assert min(seen) == 2


def test_warmup_batches_are_linear_lr():
    """Step s of the first W has s / (W + 1) of the rate; the training has 6 steps."""
    made = client(warmup_batches=4)
    assert_trains_as(
        made, plain(made, sgd, rates=lambda o: lr_scheduler.LinearLR(o, 1 / 5, 1.0, 4))
    )


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.5),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_block_rates_are_torchs_param_groups(optimizer):
    """Each group has its rate, and warms up to it; the gradient is clipped over all groups."""
    momentum = 0.9 if optimizer == "sgd" else 0.0
    own = {"optimizer": optimizer, "momentum": momentum, "weight_decay": 0.5}
    made = client(**own, block_rates="0=0.01, 2=0.3", warmup_batches=3, clip_gradient=0.5)

    def groups(parameters):
        a, b, c, d = parameters
        rates = {0.001: [a, b], 0.03: [c, d]}
        return OPTIMIZERS[optimizer]([{"params": p, "lr": lr} for lr, p in rates.items()])

    assert_trains_as(
        made,
        plain(made, groups, clip=0.5, rates=lambda o: lr_scheduler.LinearLR(o, 1 / 4, 1.0, 3)),
    )


@typical(ONE_OF_EACH, "method")
def test_half_of_twice_the_rate_is_the_rate_or_a_method_refuses(method, tmp_path, tiny_bn):
    """Bit for bit: so no equation of a method that takes block rates has the learning rate but its steps."""
    files, options = two_rounds(method, tmp_path)
    own = strategies()[method].Settings()
    rates = {"learning_rate": options.pop("learning_rate")}
    for field in (
        "head_learning_rate",
        "align_learning_rate",
    ):  # rates of its own, by blocks, too
        if rate := getattr(own, field, 0.0):
            rates[f"{method}__{field}"] = rate
    twice = {key: 2 * rate for key, rate in rates.items()} | {"block_rates": "*=0.5"}
    if not strategies()[method].info.training.block_rates:
        fails(
            UserError, rf"block-rates = .*not with {method}", federate, files, **options | twice
        )
        return
    assert torch.equal(models(files, options | rates), models(files, options | twice))


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
def test_a_schedule_over_rounds_is_torchs(schedule, warm):
    settings = {"learning-rate": 0.5, "rounds": 12, "schedule": schedule, "warmup-rounds": warm}
    common = parse_settings(settings | {"schedule-every": 2, "schedule-factor": 0.5}).common
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    after = {
        "constant": lr_scheduler.ConstantLR(optimizer, 1.0),
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, 12 - warm),
        "step": lr_scheduler.StepLR(optimizer, 2, 0.5),
    }
    first = lr_scheduler.LinearLR(optimizer, 1 / (warm + 1), 1.0, max(warm, 1))
    both = lr_scheduler.SequentialLR(optimizer, [first, after[schedule]], [warm])
    for server_round in range(1, 13):
        ours = common.decay(0.5, server_round)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6), server_round
        optimizer.step()
        both.step()
    assert common.decay(0.5, 13) == common.decay(0.5, 12)  # where newcomers train


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"warmup-rounds": 5}, "warmup-rounds = 5: fewer than rounds = 5"),
        ({"dp": True, "clip-gradient": 1.0}, "dp = true: not with clip-gradient = 1"),
        ({"dp": True, "accumulate": 2}, "dp = true: not with accumulate = 2"),
        ({"dp": True, "sampler": "balanced"}, "dp = true: not with sampler = balanced"),
        ({"dp": True, "class-weights": "balanced"}, "not with class-weights = balanced"),
        ({"loss": "focal", "class-weights": "balanced"}, "class-weights = balanced: loss ="),
        ({"dp": True, "precision": "bf16"}, "dp = true: not with precision = bf16"),
        ({"strategy": "fedproto", "accumulate": 2}, "accumulate = 2: not for fedproto"),
        ({"strategy": "fednova", "block-rates": "a=1"}, "block-rates = a=1: not with fednova"),
        *(
            (
                {"block-rates": text},
                "NAME=SHARE with commas .* each name once, shares above 0 and",
            )
            for text in ("a=0.5,a=1", "a=2", "a=0", "a=nan", "0.5")
        ),
        ({"strategy": "fedphp", "precision": "fp16"}, "precision = fp16, .* not for fedphp"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    fails(UserError, said, parse_settings, {"rounds": 5, **changes})


def test_block_rates_name_blocks_of_the_network():
    for text in ("first=0.1", "*=0.1, 2=1"):
        with pytest.raises(UserError, match=r"layer blocks, and a block in .*are: 0, 2"):
            block_shares(text, FlatModel(network()).layout.blocks)


def settings(**changes):
    return parse_settings({k.replace("_", "-"): v for k, v in changes.items()})


def test_what_does_not_fit_the_task_is_refused():
    with pytest.raises(
        DataError, match=r"label-smoothing and class-weights are .* not for multilabel"
    ):
        settings(label_smoothing=0.1).check_task(task_of("multilabel"), 3)
    with pytest.raises(DataError, match=r"label-smoothing = 0.1: loss = cross-entropy has it"):
        settings(label_smoothing=0.1, loss="focal").check_task(MULTICLASS, 3)
    for changes in ({"sampler": "balanced"}, {"class_weights": "balanced"}):
        with pytest.raises(
            UserError, match="for samples of one class each, not for regression"
        ):
            settings(**changes).check_task(task_of("regression"), 1)
    with pytest.raises(UserError, match="accumulate = 2: not for survival"):
        settings(accumulate=2).check_task(task_of("survival"), 1)
