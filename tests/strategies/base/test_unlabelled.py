"""A hospital that does not label a finding or an outline trains with the others, without a word on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from failing import fails
from hospitals import LABELS, NETWORKS, hospital_files, partly_labelled
from near import near
from tiny import federate

from client.privacy.checks import check_floor
from client.protocol.policy import Policy, PolicyRefusedError
from models.privacy.records import each_loss
from models.tasks import VOID, Segmentation, segmentation_loss, task_of
from partitions.common.errors import DataError, UserError
from partitions.schemes.registry import partition, silo_data
from partitions.silo_file import read_silo_file
from partitions.simulated import Division, open_dataset, pool_of
from server.report.page import page
from server.report.study import StudyResults
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from strategies.base.transport.data_summary import read_agreed

RUN = {"rounds": 2, "batch_size": 16, "learning_rate": 0.05, "normalization": "silo"}


def outputs_and_masks():
    """Outputs of four classes; class 2 is unlabelled, so masks have 0, 1, 3 and ignored pixels."""
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 3])[torch.randint(0, 3, (4, 5, 6))]
    y[0, 0] = VOID
    return torch.randn(4, 4, 5, 6, dtype=torch.float64), y


def measured(run):
    return [row for row in run.rows if "seconds" not in row.metric]


def entry_of(run, directory):
    opened = RunDirectory(directory)
    return write_summary(opened, run.federation.history, run.federation.finish_run())["runs"][0]


def test_two_pixels_by_hand():
    """Logits (0, 5, 0) with class 1 unlabelled: pixels of classes 0 and 2 have p = 1/2 each.

    Cross-entropy log 2. Soft Dice of class 2: (2 * 0.5 + 1) / (1 + 1 + 1) = 2/3. Loss log 2 + 1/3.
    """
    outputs = torch.tensor([0.0, 5.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 1, 2).contiguous()
    outputs.requires_grad_()
    loss = task_of("segmentation", unlabelled=(1,)).loss("cross-entropy", 0.0)
    value = loss(outputs, torch.tensor([[[0, 2]]]))
    near(value.item(), np.log(2) + 1 / 3)
    (grad,) = torch.autograd.grad(value, outputs)
    assert torch.equal(grad[:, 1], torch.zeros(1, 1, 2)) and grad[:, 2].any()


@pytest.mark.parametrize("unlabelled", [(2,), (1, 2), (2, 3)])
def test_it_is_the_loss_and_the_score_of_a_network_of_the_labelled_outputs_alone(unlabelled):
    outputs, y = outputs_and_masks()
    kept = [c for c in range(4) if c not in unlabelled]
    for c in set(unlabelled) - {2}:
        y[y == c] = 0
    numbers = torch.arange(256)
    numbers[kept] = torch.arange(len(kept))
    fewer, few = outputs[:, kept].clone().requires_grad_(), numbers[y]
    outputs.requires_grad_()
    task = Segmentation(unlabelled)
    loss = task.loss("cross-entropy", 0.0)
    (grad,) = torch.autograd.grad(loss(outputs, y), outputs)
    (alone,) = torch.autograd.grad(segmentation_loss(fewer, few), fewer)
    assert torch.equal(grad[:, kept], alone) and not grad[:, list(unlabelled)].any()
    assert task.measure(outputs, y) == Segmentation().measure(fewer, few)
    assert torch.equal(
        each_loss(loss, outputs, None, y), each_loss(segmentation_loss, fewer, None, few)
    )


def test_an_unknown_finding_has_no_gradient_and_no_part_in_a_score():
    outputs, y = torch.randn(20, 3, dtype=torch.float64), torch.randint(0, 2, (20, 3)).double()
    y[:, 1], kept = -1, [0, 2]
    task, fewer = task_of("multilabel"), outputs[:, kept].requires_grad_()
    outputs.requires_grad_()
    loss = task.loss("cross-entropy", 0.0)
    (grad,) = torch.autograd.grad(loss(outputs, y), outputs)
    (alone,) = torch.autograd.grad(loss(fewer, y[:, kept]), fewer)
    assert not grad[:, 1].any()
    near(grad[:, kept], alone, 1e-12)
    scores, others = (task.measure(*pair) for pair in ((outputs, y), (fewer, y[:, kept])))
    near([*scores.values()], [*others.values()], 1e-12)


@pytest.mark.parametrize("task", LABELS)
def test_one_hospital_does_not_label_the_last(task, tmp_path):
    """Its own head for that label stays at the run's first; the others' moves. Summary, report and progress say so."""
    files = partly_labelled(tmp_path, task)
    run = federate(files, "local", directory=tmp_path / "run", **RUN, **NETWORKS[task])
    first, layout = run.strategy.initial(""), run.strategy.layout
    last = layout.blocks[-1].slice
    for silo in files:
        moved = (run.personal(silo) - first)[last]
        rows = moved[:-3].view(3, -1), moved[-3:]
        assert all(bool(part[2].any()) == (silo != "south") for part in rows), silo
        assert all(bool(part[1].any()) for part in rows), silo
    label = LABELS[task][2]
    assert entry_of(run, tmp_path / "run")["unlabelled"] == {label: ["south"]}
    notes = (tmp_path / "run" / "progress.jsonl").read_text()
    assert f"south does not label {label}: its losses and scores leave that out" in notes
    text = " ".join(page(StudyResults(tmp_path / "run")).split())
    assert f"{label} is labelled in 2 of 3 hospitals: the scores of south leave it out" in text


@pytest.mark.parametrize("task", LABELS)
def test_all_label_all_as_before(task, tmp_path):
    run = federate(
        hospital_files(tmp_path, task), directory=tmp_path / "run", **RUN, **NETWORKS[task]
    )
    assert "unlabelled" not in entry_of(run, tmp_path / "run")


@pytest.mark.parametrize("task", LABELS)
def test_labels_in_another_order_give_the_same_run(task, tmp_path):
    """South has its labels in another order, by name: what it does not label moves with the name."""
    files = partly_labelled(tmp_path, task)
    one = federate(files, "fedavg", **RUN, **NETWORKS[task])
    arrays = dict(np.load(files["south"]))
    order = [0, 2, 1] if task == "segmentation" else [2, 0, 1]
    arrays["label_names"] = arrays["label_names"][order]
    if task == "segmentation":
        arrays["y"] = np.argsort(order).astype(np.uint8)[arrays["y"]]
    else:
        arrays["y"] = arrays["y"][:, order]
    np.savez(files["south"], **arrays)
    other = federate(files, "fedavg", **RUN, **NETWORKS[task])
    assert measured(other) == measured(one)


def test_a_folder_of_hospitals_keeps_what_each_does_not_label(tmp_path):
    partly_labelled(tmp_path, "segmentation")
    whole = open_dataset(f"{tmp_path}/", "", 1)
    silos = partition(whole, "natural", silos=3, seed=1)
    lacking = {silo.origin: silo_data(whole, silo).schema.unlabelled for silo in silos}
    assert lacking == {"north": (), "south": ("ring",), "west": ()}
    fails(
        DataError,
        "label different things: take natural",
        partition,
        whole,
        "iid",
        silos=3,
        seed=1,
    )


def test_pooled_hospitals_must_label_the_same(tmp_path):
    partly_labelled(tmp_path, "segmentation")
    division = Division(f"{tmp_path}/", "", "natural", 3, 1, -1.0)
    fails(
        DataError, "pooled, one's unlabelled would be others' absent", pool_of, division, (0, 1)
    )


def test_people_of_whom_no_finding_is_known_do_not_reach_a_floor(tmp_path):
    data = read_silo_file(partly_labelled(tmp_path, "multilabel")["south"])
    y = data.train.y.copy()
    y[3:] = -1
    few = replace(data, train=replace(data.train, y=y))
    assert few.measured("train") == 3 and data.measured("train") == len(data.train)
    assert few.measured("test") == len(data.test)
    policy = Policy(floor=5)
    check_floor("south", data.train, data.measured("train"), policy, sends=True)
    people = few.measured("train")
    fails(
        PolicyRefusedError,
        "floor = 5",
        check_floor,
        "south",
        few.train,
        people,
        policy,
        sends=True,
    )


def test_a_schema_for_all_has_nothing_unlabelled():
    text = '{"schema": {"labels": ["a", "b"], "unlabelled": ["b"]}}'
    fails(UserError, "unlabelled is one hospital's own", read_agreed, text)
