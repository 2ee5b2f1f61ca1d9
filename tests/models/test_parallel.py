"""Several processes of one silo compute a batch's gradient together: the numbers are those of one."""

from __future__ import annotations

import pytest
import torch
from ranks import CASES, ranks, trained
from torch.testing import assert_close

# Dropout draws for each process; BatchNorm's running statistics are a mean
APART = ("norm", "dropout")
# And the gradients of a word in both shares are added up in another order
OTHER_BITS = (*APART, "words")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_all_processes_have_the_same_model_bit_for_bit(two, case):
    first, second = (results[case] for results in two)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {*OTHER_BITS}))
def test_two_processes_are_one_with_two_parts_bit_for_bit(two, case):
    alone = trained(case, None, parts=2)
    assert all(torch.equal(two[0][case][name], alone[name]) for name in alone)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {*APART}))
def test_they_are_near_the_whole_batch(two, case):
    assert_close(two[0][case], trained(case, None), rtol=1e-5, atol=1e-6)


def test_batch_norm_has_each_shares_statistics_and_their_mean(two):
    """Of the batch of three one process computes all."""
    alone = trained("norm", None, parts=2)
    assert_close(two[0]["norm"]["vector"], alone["vector"], rtol=1e-5, atol=1e-6)
    assert not torch.equal(two[0]["norm"]["buffers"], alone["buffers"])


def test_dropout_draws_for_each_share(two):
    together, alone = two[0]["dropout"]["losses"], trained("dropout", None, parts=2)["losses"]
    assert not torch.equal(together, alone)


@pytest.mark.exhaustive
def test_three_processes(tmp_path):
    """Batches of one and two samples are too small for them."""
    first, *others = ranks(3, tmp_path)
    for case in CASES:
        assert all(
            torch.equal(first[case]["vector"], other[case]["vector"]) for other in others
        )
        if case not in APART:
            assert_close(first[case], trained(case, None), rtol=1e-5, atol=1e-6)


def test_models_that_differ_are_named(two):
    for results in two:
        assert results["error"].startswith("device = cpu,cpu: the processes' models differ")


def test_one_that_has_ended_is_named_in_a_line(two):
    assert two[0]["left"] == (
        "device = cpu,cpu: a process of the silo has ended: Connection closed by peer"
    )
