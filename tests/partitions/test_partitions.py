"""Partitions: the papers' procedures on small synthetic labels, and their counts on real data."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from failing import fails
from near import near
from numpy.testing import assert_allclose, assert_array_equal
from public_data import DATA, needs
from taken import splits_of

from partitions.datasets.registry import load_dataset
from partitions.schemes import apple, diversifed, fedala
from partitions.schemes.pool import hold_out
from partitions.schemes.registry import PARTITIONS, partition, partition_settings, silo_data
from partitions.silo_file import check_silo_file, read_silo_file
from partitions.splits import Dataset, Split
from server.report.sections.silo_data import plot_partition
from server.results import manifest

needs_mnist = needs("mnist")
needs_heart = needs("heart_disease")


def make(classes=10, train=100, test=20, name="made", groups=False):
    """``train`` and ``test`` samples per class, classes interleaved; a sample's input is its own pooled
    index.
    """
    y_train, y_test = np.tile(np.arange(classes), train), np.tile(np.arange(classes), test)
    index = np.arange(len(y_train) + len(y_test), dtype=np.float32)[:, np.newaxis]
    own = {"north": np.arange(30), "south": np.arange(30, len(index))} if groups else None
    return Dataset(
        name,
        Split(index[: len(y_train)], y_train),
        Split(index[len(y_train) :], y_test),
        classes,
        own,
    )


def own(name, **values):
    """A partition's settings."""
    return PARTITIONS[name].settings(**values)


def label_counts(dataset, indices):
    return np.bincount(dataset.labels[indices], minlength=dataset.classes)


def train_counts(dataset, silos):
    """Samples per silo and class, validation samples included."""
    return np.stack([label_counts(dataset, np.concatenate([s.train, s.val])) for s in silos])


def test_counts_of(dataset, silos):
    return np.stack([label_counts(dataset, s.test) for s in silos])


test_counts_of.__test__ = False  # type: ignore[attr-defined] # a helper


def pooled(silos):
    return np.concatenate([np.concatenate(splits_of(s)) for s in silos])


def assert_disjoint(silos):
    everything = pooled(silos)
    assert len(np.unique(everything)) == len(everything)


# Common to all

GENERAL = sorted(set(PARTITIONS) - {"natural"})


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_same_seed_same_silos(name):
    """The seed alone decides: the same silos again, others for another seed, no global generator touched."""
    silos = 2 if name == "natural" else 5
    data = make(groups=True)
    np.random.seed(0)
    state = np.random.get_state(legacy=False)["state"]["key"].copy()
    first, again, other = (partition(data, name, silos=silos, seed=seed) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        assert a.name == b.name
        for kind in ("train", "val", "test"):
            assert_array_equal(getattr(a, kind), getattr(b, kind))
    assert any(
        len(a.train) != len(b.train) or (a.train != b.train).any()
        for a, b in zip(first, other, strict=True)
    )
    assert (np.random.get_state(legacy=False)["state"]["key"] == state).all()


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_within_a_silo_splits_do_not_overlap(name):
    for silo in partition(make(groups=True), name, silos=2 if name == "natural" else 5, seed=1):
        train, val, test = set(silo.train), set(silo.val), set(silo.test)
        assert train and val and test
        assert not train & val and not train & test and not val & test


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_validation_share_can_be_asked_for(name):
    silos = 2 if name == "natural" else 5
    data = make(groups=True, train=200)
    none, half = (
        partition(data, name, silos=silos, seed=1, validation=share) for share in (0, 0.5)
    )
    for a, b in zip(none, half, strict=True):
        assert len(a.val) == 0
        # Copies of a sample stay together
        assert abs(len(np.unique(b.val)) - len(np.unique(a.train)) / 2) <= 0.5
        assert_array_equal(np.sort(np.concatenate([b.train, b.val])), np.sort(a.train))
        assert_array_equal(a.test, b.test)


def test_default_validation_share_is_15_percent_rounded_up():
    """100 training samples each: 15 for validation. 37: 0.15 * 37 = 5.55, so 6."""
    assert [len(s.val) for s in partition(make(10, 40, 4), "iid", silos=4, seed=0)] == [15] * 4
    assert [len(s.val) for s in partition(make(1, 37, 4), "iid", silos=1, seed=0)] == [6]


def test_hold_out_keeps_copies_together():
    indices = np.array([7, 7, 7, 8, 9, 9, 10, 11])
    kept, held = hold_out(indices, 0.5, np.random.default_rng(0))
    assert len(kept) + len(held) == 8
    assert not set(kept) & set(held)
    assert len(set(held)) == 3  # half of the 5 distinct samples, rounded up


def test_hold_out_never_takes_the_last_sample():
    kept, held = hold_out(np.array([4]), 0.9, np.random.default_rng(0))
    assert kept.tolist() == [4] and held.tolist() == []


def test_names_count_from_one():
    assert [s.name for s in partition(make(), "iid", silos=11, seed=0)][::5] == [
        "hospital-01",
        "hospital-06",
        "hospital-11",
    ]


def test_silo_data_copies_from_both_files():
    """The input of a sample is its index, so inputs show what was taken."""
    data = make()
    silo = partition(data, "dirichlet", silos=4, seed=0)[2]
    assert (silo.train >= 1000).any() and (silo.train < 1000).any()  # from train and test file
    copied = silo_data(data, silo)
    assert copied.input_shape == (1,) and copied.classes == 10
    for kind in ("train", "val", "test"):
        split, indices = getattr(copied, kind), getattr(silo, kind)
        assert_array_equal(split.x[:, 0], indices)
        assert_array_equal(split.y, data.labels[indices])
    copied.train.x[0] = -1
    assert data.train.x.min() == 0


@pytest.mark.parametrize(
    "call, words",
    [({"name": "dirichle"}, "unknown partition 'dirichle' (did you mean 'dirichlet'?)")],
)
def test_bad_requests_are_one_clear_line(call, words):
    arguments = {"name": "dirichlet", "silos": 4, "seed": 0, **call}
    said = fails(ValueError, None, partition, make(), **arguments)
    assert words in said


def test_every_setting_is_documented():
    for name, cls in partition_settings().items():
        for setting in dataclasses.fields(cls):
            assert setting.metadata["help"], (name, setting.name)
            assert isinstance(setting.default, bool | int | float | str)


def test_a_starved_silo_is_named():
    """5 test samples cannot serve 6 silos."""
    with pytest.raises(
        ValueError, match=r"hospital-06 is left without test samples .* take fewer silos"
    ):
        partition(make(5, 10, 1), "iid", silos=6, seed=0)


def test_iid_deals_evenly():
    data = make(train=33, test=7)
    silos = partition(data, "iid", silos=4, seed=0, validation=0)
    assert [len(s.train) for s in silos] == [83, 83, 82, 82]
    assert [len(s.test) for s in silos] == [18, 18, 17, 17]
    assert sorted(pooled(silos)) == list(range(400))
    assert all((s.train < 330).all() and (s.test >= 330).all() for s in silos)


# APPLE


@pytest.mark.parametrize("silos", range(1, 41))
def test_practical_shares_sum_to_one(silos):
    shares = apple.practical_shares(silos)
    assert len(shares) == silos
    near(shares.sum(), 1, 1e-12)


def test_practical_shares_are_the_papers_at_twelve():
    assert_allclose(apple.practical_shares(12), [0.01] * 10 + [0.1, 0.8], rtol=1e-12)


@pytest.mark.parametrize(
    "silos, train, test",
    [
        (12, [10] * 10 + [100, 800], [1] * 10 + [10, 80]),
        (4, [50, 50, 100, 800], [5, 5, 10, 80]),
        (2, [111, 888], [11, 88]),  # 1/9 and 8/9, rounded down
    ],
)
def test_apple_practical_counts(silos, train, test):
    """1000 training and 100 test samples per class, by hand: floor(share * n), the same order in both."""
    data = make(10, 1000, 100)
    result = partition(data, "apple-practical", silos=silos, seed=5)
    given, tested = train_counts(data, result), test_counts_of(data, result)
    for label in range(10):
        assert sorted(given[:, label]) == train
        assert sorted(tested[:, label]) == test
        assert_array_equal(np.argsort(given[:, label])[-2:], np.argsort(tested[:, label])[-2:])
    assert len({tuple(column) for column in given.T}) > 1  # each class has its own order
    assert_disjoint(result)
    assert all((s.train < 10_000).all() and (s.test >= 10_000).all() for s in result)


@pytest.mark.parametrize("seed", range(5))
def test_apple_pathological(seed):
    """24 entries over 10 classes: every class has 2 or 3 owners, who share nearly all of it (floors lose < 1
    each).
    """
    data = make(10, 1000, 1000)
    result = partition(data, "apple-pathological", silos=12, seed=seed)
    given, tested = train_counts(data, result), test_counts_of(data, result)
    assert ((given > 0).sum(axis=1) <= 2).all()
    owners = (given > 0).sum(axis=0)
    assert set(owners) <= {2, 3} and owners.sum() == 24
    lost = 1000 - given.sum(axis=0)
    assert (lost >= 0).all() and (lost < owners).all()
    assert_array_equal(given, tested)  # the same fractions of equally large files
    assert_disjoint(result)


def test_apple_pathological_may_give_a_silo_one_class():
    """With 9 classes the first permutation ends in the middle of a pair: some seed repeats a class in that
    pair.
    """
    data = make(9, 100, 100)
    classes = []
    for seed in range(40):
        given = train_counts(data, partition(data, "apple-pathological", silos=12, seed=seed))
        classes.append(sorted((given > 0).sum(axis=1))[0])
    assert set(classes) == {1, 2}


def test_apple_resplit_pools_both_files():
    """100 + 20 samples per class, 80 / 20: 96 and 24 of each; one silo has all of it."""
    data = make(10, 100, 20)
    silo = partition(
        data,
        "apple-practical",
        silos=1,
        seed=0,
        settings=own("apple-practical", resplit=True),
        validation=0,
    )[0]
    assert label_counts(data, silo.train).tolist() == [96] * 10
    assert label_counts(data, silo.test).tolist() == [24] * 10
    assert (silo.train >= 1000).any()


@needs_mnist
def test_apple_practical_on_mnist(monkeypatch):
    """Counts follow from MNIST's published class sizes alone: floor(n * 1 %), floor(n * 10 %), floor(n * 80
    %).
    """
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    data = load_dataset("mnist")
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    result = partition(data, "apple-practical", silos=12, seed=42)
    for sizes, counts in (
        (train, train_counts(data, result)),
        (test, test_counts_of(data, result)),
    ):
        for label, size in enumerate(sizes):
            assert sorted(counts[:, label]) == [size // 100] * 10 + [size // 10, size * 8 // 10]
    assert_disjoint(result)


# FedALA


def test_dirichlet_covers_everything_once():
    data = make(10, 300, 50)
    result = partition(
        data, "dirichlet", silos=20, seed=0, settings=own("dirichlet", beta=0.1), validation=0
    )
    assert sorted(pooled(result)) == list(range(3500))
    sizes = [len(s.train) + len(s.test) for s in result]
    assert min(sizes) >= 40  # min(10 / 0.25, 3500 / 20 / 2 = 87.5)
    assert [len(s.test) for s in result] == [-(-size // 4) for size in sizes]


def test_dirichlet_smallest_silo_of_small_data():
    """n / N / 2 = 1200 / 20 / 2 = 30 is below 40."""
    assert fedala.paper_minimum(1200, 20) == 30
    assert fedala.paper_minimum(70_000, 20) == 40


def test_dirichlet_minimum_of_test_samples():
    """25 test samples need ceil(n / 4) >= 25, so n >= 97."""
    data = make(10, 300, 50)
    result = partition(
        data, "dirichlet", silos=12, seed=2, settings=own("dirichlet", beta=0.1, min_test=25)
    )
    assert min(len(s.test) for s in result) >= 25
    plain = partition(data, "dirichlet", silos=12, seed=2, settings=own("dirichlet", beta=0.1))
    assert min(len(s.test) for s in plain) < 25


class FixedProportions:
    """Stands in for a generator: deals these proportions, class by class."""

    def __init__(self, *rows):
        self.rows = iter(rows)

    def dirichlet(self, alpha):
        return np.array(next(self.rows))


def test_dirichlet_gives_nothing_more_to_a_full_silo():
    """Two silos, classes of 10: a silo is full with 20 / 2 = 10 samples.

    Class 0 goes 10 : 0, so silo 0 is full and class 1 goes 0 : 10 although its proportions are 0.9 : 0.1.
    """
    cuts = fedala.draw_cuts([10, 10], 2, 0.5, FixedProportions((1.0, 0.0), (0.9, 0.1)))  # type: ignore[arg-type]
    assert cuts is not None
    assert np.diff(cuts, axis=1).tolist() == [[10, 0], [0, 10]]


def test_dirichlet_scales_up_what_is_left():
    """Three silos, classes of 9, full with 27 / 3 = 9: after class 0 silo 0 is full.

    Class 1's 0.5 : 0.25 : 0.25 becomes 0 : 0.5 : 0.5, cut at 0, 4.5 -> 4 and 9. Class 2's 0.6 : 0.3 : 0.1
    becomes 0 : 0.75 : 0.25, cut at 0, 6.75 -> 6 and 9.
    """
    rows = FixedProportions((1, 0, 0), (0.5, 0.25, 0.25), (0.6, 0.3, 0.1))
    cuts = fedala.draw_cuts([9, 9, 9], 3, 0.5, rows)  # type: ignore[arg-type]
    assert cuts is not None
    assert np.diff(cuts, axis=1).tolist() == [[9, 0, 0], [0, 4, 5], [0, 6, 3]]


def test_dirichlet_says_when_it_cannot_be_done(monkeypatch):
    monkeypatch.setattr(fedala, "DRAWS", 100)
    with pytest.raises(
        ValueError, match=r"no draw in 100 gives each of 12 silos 100 samples of made; .*beta"
    ):
        partition(
            make(),
            "dirichlet",
            silos=12,
            seed=0,
            settings=own("dirichlet", least=100, beta=0.05),
        )


def test_pathological_groups():
    """20 silos, 10 classes, 2 each: silos 4g .. 4g+3 share classes 2g and 2g+1."""
    data = make(10, 300, 50)
    result = partition(data, "pathological", silos=20, seed=0)
    counts = train_counts(data, result) + test_counts_of(data, result)
    for silo in range(20):
        assert np.flatnonzero(counts[silo]).tolist() == [silo // 4 * 2, silo // 4 * 2 + 1]
    assert sorted(pooled(result)) == list(range(3500))
    # Sizes of all but the last owner: from max(350 / 4 / 10, 40 / 10) = 8 up to 350 / 4 = 87.5.
    first_three = counts[[s for s in range(20) if s % 4 != 3]]
    sizes = first_three[first_three > 0]
    assert sizes.min() >= 8 and sizes.max() < 87 and len(set(sizes)) > 10


def test_pathological_balanced():
    """350 samples over 4 silos: 87, 87, 87 and the rest."""
    data = make(10, 300, 50)
    result = partition(
        data, "pathological", silos=20, seed=0, settings=own("pathological", balanced=True)
    )
    counts = train_counts(data, result) + test_counts_of(data, result)
    assert counts[:4, :2].tolist() == [[87, 87], [87, 87], [87, 87], [89, 89]]


@pytest.mark.parametrize("silos", [5, 7, 12, 33])
def test_pathological_uses_every_class(silos):
    """Also where N * 2 / 10 is no whole number: all classes, at most two per silo."""
    data = make(10, 600, 60)
    result = partition(data, "pathological", silos=silos, seed=1)
    counts = train_counts(data, result) + test_counts_of(data, result)
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert_array_equal(counts.sum(axis=0), [660] * 10)
    assert_disjoint(result)


@pytest.mark.parametrize(
    "silos, settings, words",
    [
        (
            3,
            {},
            r"3 silos with 2 classes each cannot hold the 10 .* take 5 silos .*classes-per-silo=4",
        ),
        (3, {"classes_per_silo": 11}, "has only 10 classes"),
    ],
)
def test_pathological_refuses(silos, settings, words):
    with pytest.raises(ValueError, match=words):
        partition(
            make(),
            "pathological",
            silos=silos,
            seed=0,
            settings=own("pathological", **settings),
        )


# DiversiFed


@pytest.mark.parametrize(
    "proportions, size, counts",
    [
        ([1 / 3, 1 / 3, 1 / 3], 5, [2, 2, 1]),  # 1.67 + 0.5 -> 2, 2, and what is left
        ([0.25, 0.25, 0.25, 0.25], 2, [1, 1, 0, 0]),  # 0.5 + 0.5 -> 1, 1, nothing left
        ([0.5, 0.5, 0.0], 7, [4, 3, 0]),
        ([0.0, 1.0], 3, [0, 3]),
    ],
)
def test_class_counts(proportions, size, counts):
    assert diversifed.class_counts(np.array(proportions), size) == counts


@pytest.mark.parametrize(
    "name", ["diversifed-pathological", "diversifed-dirichlet", "diversifed-practical"]
)
@pytest.mark.parametrize("dataset, train", [("made", 500), ("fashion-mnist", 300)])
def test_diversifed_sizes(name, dataset, train):
    """500 training samples (Fashion-MNIST 300) and 100 test samples, none twice; silos do share samples."""
    data = make(10, 1000, 300, name=dataset)
    result = partition(data, name, silos=40, seed=0, validation=0)
    for silo in result:
        assert len(silo.train) == len(set(silo.train)) == train
        assert len(silo.test) == len(set(silo.test)) == 100
        assert silo.train.max() < 10_000 <= silo.test.min()
    everything = pooled(result)
    assert len(np.unique(everything)) < len(everything)


def test_diversifed_pathological_halves():
    data = make(10, 1000, 300)
    result = partition(data, "diversifed-pathological", silos=20, seed=0, validation=0)
    for train, test in zip(
        train_counts(data, result), test_counts_of(data, result), strict=True
    ):
        assert sorted(train) == [0] * 8 + [250, 250]
        assert_array_equal(test, train // 5)


def test_diversifed_draws_again_only_from_small_classes():
    """250 of each class are wanted but 100 exist: all copies lie on one side of the validation split."""
    data = make(10, 100, 100)
    for silo in partition(data, "diversifed-pathological", silos=5, seed=0):
        assert len(silo.train) + len(silo.val) == 500
        assert len(set(silo.train)) < len(silo.train)
        assert not set(silo.train) & set(silo.val)
        assert len(set(silo.test)) == 100


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0])
def test_diversifed_dirichlet_concentration(alpha):
    """For q ~ Dir(alpha, ..., alpha) over C classes E[sum q^2] = (alpha + 1) / (C alpha + 1).

    C = 10: 0.55, 0.25 and 0.143. (Were alpha shared out over the classes it would be 0.92, 0.70 and 0.40.)
    """
    data = make(10, 1000, 1000)
    result = partition(
        data,
        "diversifed-dirichlet",
        silos=400,
        seed=0,
        settings=own("diversifed-dirichlet", alpha=alpha),
        validation=0,
    )
    q = train_counts(data, result) / 500
    near((q**2).sum(axis=1).mean(), (alpha + 1) / (10 * alpha + 1), 0.03)
    # The same q, rounded to 1 / 100
    assert np.abs(test_counts_of(data, result) / 100 - q).max() <= 0.06


def test_diversifed_practical_groups():
    """20 silos, 9 classes: 6, 6 and 8 silos hold 80 % of {0,1,2}, {3,4,5}, {6,7,8}."""
    data = make(9, 1000, 300)
    result = partition(data, "diversifed-practical", silos=20, seed=0, validation=0)
    for counts, size in (
        (train_counts(data, result), 500),
        (test_counts_of(data, result), 100),
    ):
        groups = counts.reshape(20, 3, 3).sum(axis=2)
        expected = [0] * 6 + [1] * 6 + [2] * 8
        assert groups.argmax(axis=1).tolist() == expected
        assert (groups.max(axis=1) == 0.8 * size).all()


@pytest.mark.parametrize(
    "silos, sizes", [(3, [1, 1, 1]), (4, [1, 1, 2]), (10, [3, 3, 4]), (12, [4, 3, 5])]
)
def test_diversifed_practical_other_numbers(silos, sizes):
    """Groups of 30 %, 30 % and 40 % of the silos, ends rounded."""
    data = make(10, 1000, 300)
    result = partition(data, "diversifed-practical", silos=silos, seed=0)
    # Classes in 4 + 3 + 3
    groups = np.add.reduceat(train_counts(data, result), [0, 4, 7], axis=1)
    assert np.bincount(groups.argmax(axis=1), minlength=3).tolist() == sizes


def test_diversifed_practical_needs_three():
    with pytest.raises(
        ValueError, match="it needs 3 silos and 3 classes or more, not 2 silos and 10 classes"
    ):
        partition(make(), "diversifed-practical", silos=2, seed=0)


# FedAPM


def test_fedapm_dirichlet_overlaps_between_silos():
    """Shares of a class are rounded down: 10 silos leave fewer than 10 of its 600 samples. Draws overlap."""
    data = make(10, 500, 100)
    result = partition(data, "fedapm-dirichlet", silos=10, seed=0, validation=0)
    counts = train_counts(data, result) + test_counts_of(data, result)
    assert (counts.sum(axis=0) > 590).all() and (counts.sum(axis=0) <= 600).all()
    everything = pooled(result)
    assert len(np.unique(everything)) < 0.9 * len(everything)
    for silo in result:
        own = np.concatenate([silo.train, silo.test])
        assert len(np.unique(own)) == len(own)
        assert len(silo.test) == -(-len(own) // 5)


def test_fedapm_shards():
    """20 silos, 10 classes, q = 2: 4 shards of 150 per class, all drawn; a silo has 300 samples, 60 of them
    for test.
    """
    data = make(10, 500, 100)
    result = partition(data, "fedapm-shards", silos=20, seed=0, validation=0)
    counts = train_counts(data, result) + test_counts_of(data, result)
    assert set(counts.ravel()) <= {0, 150, 300}
    assert (counts.sum(axis=1) == 300).all() and (counts.sum(axis=0) == 600).all()
    assert [len(s.test) for s in result] == [60] * 20
    assert_disjoint(result)


def test_fedapm_shards_that_do_not_divide():
    """12 silos: ceil(24 / 10) = 3 shards of 200 per class; 24 of the 30 are drawn."""
    data = make(10, 500, 100)
    result = partition(data, "fedapm-shards", silos=12, seed=0)
    counts = train_counts(data, result) + test_counts_of(data, result)
    assert counts.sum() == 24 * 200 and counts.max() <= 400
    assert_disjoint(result)


# PLayer-FL


def test_player_dirichlet_uses_the_first_training_samples():
    data = make(10, 300, 50)
    result = partition(
        data,
        "player-dirichlet",
        silos=5,
        seed=0,
        settings=own("player-dirichlet", samples_per_silo=200),
    )
    assert sorted(pooled(result)) == list(range(1000))


@pytest.mark.parametrize("name, used", [("made", 15_000), ("fashion-mnist", 10_000)])
def test_player_dirichlet_sizes_of_the_paper(name, used):
    """Fashion-MNIST: 5 x 2000 of the training file; other data: all of it."""
    result = partition(make(10, 1500, 10, name=name), "player-dirichlet", silos=5, seed=0)
    assert sorted(pooled(result)) == list(range(used))


def test_player_dirichlet_splits_64_16_20():
    """n samples: ceil(n / 5) for test, a fifth of the rest (rounded up) for validation, as scikit-learn
    rounds.
    """
    for silo in partition(make(10, 300, 50), "player-dirichlet", silos=5, seed=0):
        n = len(silo.train) + len(silo.val) + len(silo.test)
        assert len(silo.test) == -(-n // 5)
        assert len(silo.val) == -(-(n - len(silo.test)) // 5)


def test_player_dirichlet_asks_for_no_more_than_there_is():
    with pytest.raises(
        ValueError, match=r"samples-per-silo is 300, .* 1000 training samples: at most 200"
    ):
        partition(
            make(),
            "player-dirichlet",
            silos=5,
            seed=0,
            settings=own("player-dirichlet", samples_per_silo=300),
        )


def test_natural_keeps_the_data_sets_own_silos():
    north, south = partition(make(groups=True), "natural", silos=2, seed=0)
    assert sorted(pooled([north])) == list(range(30))
    assert sorted(pooled([south])) == list(range(30, 1200))
    assert (north.name, north.origin) == ("hospital-01", "north")
    assert [len(a) for a in splits_of(north)] == [19, 5, 6]


def test_natural_refuses():
    with pytest.raises(ValueError, match=r"made does not come with silos of its own"):
        partition(make(), "natural", silos=2, seed=0)
    with pytest.raises(
        ValueError, match=r"comes with 2 silos \(north, south\), not 12; set silos=2"
    ):
        partition(make(groups=True), "natural", silos=12, seed=0)


def test_natural_folds_hold_each_sample_once_and_few_training_samples_are_a_part_of_many():
    def silos(fold, most=0):
        settings = own("natural", folds=5, fold=fold, most=most)
        return partition(make(groups=True), "natural", silos=2, seed=3, settings=settings)

    for silo, rows in ((0, range(30)), (1, range(30, 1200))):
        tests = np.concatenate([silos(fold)[silo].test for fold in range(5)])
        assert sorted(tests) == list(rows)
        whole, some, few = (silos(1, most)[silo] for most in (0, 16, 8))
        learned = [{*s.train, *s.val} for s in (few, some, whole)]
        assert learned[0] < learned[1] <= learned[2] and len(learned[0]) == 8
        assert learned[2] == {*rows} - {*whole.test}
        assert [*few.test] == [*whole.test]


@pytest.mark.parametrize(
    "values", [{"folds": 1}, {"folds": 5, "fold": 5}, {"fold": 1}, {"most": 30}]
)
def test_natural_refuses_a_fold_that_there_is_not(values):
    with pytest.raises(ValueError, match=r"natural\.fold"):
        partition(
            make(groups=True), "natural", silos=2, seed=0, settings=own("natural", **values)
        )


@needs_heart
def test_natural_on_heart_disease(monkeypatch):
    """Complete rows per hospital as FLamby publishes them (without grad, ca, thal)."""
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    data = load_dataset("heart-disease")
    result = partition(data, "natural", silos=4, seed=0)
    assert [(s.origin, len(pooled([s]))) for s in result] == [
        ("cleveland", 303),
        ("hungarian", 261),
        ("switzerland", 46),
        ("va", 130),
    ]
    assert_disjoint(result)
    swiss = silo_data(data, result[2])
    assert (swiss.train.x[:, 4] == 0).all()  # cholesterol was not measured there


# On disk


def test_write_partition(tmp_path):
    data = make()
    out = tmp_path / "silos"
    written = manifest.write_partition(
        data, "dirichlet", out, silos=3, seed=7, settings=own("dirichlet", beta=1.0)
    )
    assert json.loads((out / "manifest.json").read_text()) == written
    assert written["settings"] == {
        "dirichlet.beta": 1.0,
        "dirichlet.least": 0,
        "dirichlet.min-test": 0,
    }
    assert sorted(path.name for path in out.iterdir()) == [
        "hospital-01.npz",
        "hospital-02.npz",
        "hospital-03.npz",
        "manifest.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["silos"]
    silos = partition(data, "dirichlet", silos=3, seed=7, settings=own("dirichlet", beta=1.0))
    for entry, silo in zip(written["silos"], silos, strict=True):
        assert all(check.ok for check in check_silo_file(out / entry["file"]))
        stored, expected = read_silo_file(out / entry["file"]), silo_data(data, silo)
        assert stored.classes == 10
        for kind in ("train", "val", "test"):
            assert_array_equal(getattr(stored, kind).x, getattr(expected, kind).x)
            assert_array_equal(getattr(stored, kind).y, getattr(expected, kind).y)
            assert (
                entry[f"n_{kind}"]
                == len(getattr(silo, kind))
                == sum(entry["labels"][kind].values())
            )


def test_write_partition_twice_gives_the_same_checksums(tmp_path):
    first = manifest.write_partition(make(), "iid", tmp_path / "a", silos=3, seed=7)
    again = manifest.write_partition(make(), "iid", tmp_path / "a", silos=3, seed=7)
    fewer = manifest.write_partition(make(), "iid", tmp_path / "a", silos=2, seed=7)
    assert first == again
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "hospital-01.npz",
        "hospital-02.npz",
        "manifest.json",
    ]
    assert fewer["silos"][0]["sha256"] != first["silos"][0]["sha256"]


def test_write_partition_refuses_other_content(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds something else \(thesis.txt\)"):
        manifest.write_partition(make(), "iid", tmp_path, silos=3, seed=7)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match=r"thesis.txt is a file"):
        manifest.write_partition(make(), "iid", tmp_path / "thesis.txt", silos=3, seed=7)


def test_write_partition_leaves_nothing_when_it_fails(tmp_path):
    with pytest.raises(ValueError, match="is left without"):
        manifest.write_partition(make(2, 3, 1), "iid", tmp_path / "a", silos=3, seed=7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot(tmp_path, ending):
    data = make()
    described = manifest.describe_partition(
        data, partition(data, "iid", silos=3, seed=0), name="iid", seed=0
    )
    path = tmp_path / f"plot.{ending}"
    plot_partition(described, path)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_plot_refuses_other_endings(tmp_path):
    fails(ValueError, "does not end in", plot_partition, {}, tmp_path / "plot.doc")
