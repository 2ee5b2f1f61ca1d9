"""Every number that a server sets has an upper limit, and it is the silo that checks it."""

import math
from typing import Any

import pytest
from failing import fails
from tiny import write_silo

from client.app import settings_of
from client.local_data import MOST_CLASSES, agreed_classes
from partitions.common.errors import UserError
from partitions.common.settings import keys_of, limits_of
from partitions.silo_file import read_silo_file
from strategies.base.run_settings import defaults, owners, parse_settings
from strategies.base.settings import Common

OWNERS: dict[str, type[Any]] = {"": Common, **owners()}
FIELDS = {key: f for owner, cls in OWNERS.items() for key, f in keys_of(cls, owner).items()}
NUMBERS = sorted(key for key, f in FIELDS.items() if type(f.default) in (int, float))


def test_the_table_is_of_all_settings():
    assert set(FIELDS) == set(defaults()) and len(NUMBERS) > 100


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_beyond_its_limit_is_refused_by_the_silos_own_parser(key):
    """`settings_of` is what the ClientApp makes of a message's run config; the limit itself is still taken."""
    f = FIELDS[key]
    limits = limits_of(f)
    most = limits.get("maximum", limits.get("below"))
    assert most is not None and math.isfinite(most)
    beyond: Any = int(most) + 1 if isinstance(f.default, int) else most * 1.01 if most else 0.01
    with pytest.raises(UserError, match=rf"{key} = .* is out of range: (at most|less than) "):
        settings_of((key,), (beyond,), (type(beyond),))
    for absurd in (10**40, 1e300, math.inf, str(10**40)):
        fails(UserError, f"{key} = ", parse_settings, {key: absurd})
    if "maximum" in limits:
        near = int(most) if isinstance(f.default, int) else float(most)
        others: dict[str, dict[str, Any]] = {
            "min-silos": {"silos": 10**6},
            "min-batch-size": {"batch-size": near},
        }
        others["min-delta"] = {"patience": 1}
        others["patches-per-volume"] = {"patch": "8,8,8"}
        others["secure-clip"] = others["secure-group"] = {"secure-aggregation": True}
        others["warmup-rounds"] = {"rounds": near + 1}
        parse_settings({key: near, **others.get(key, {})})


@pytest.mark.parametrize(
    "hidden",
    ["10001", "1" * 5000, ",".join(["1"] * 9), "100000000"],
    ids=["wide", "digits", "deep", "memory"],
)
def test_a_network_is_as_large_as_a_silo_takes_and_no_larger(hidden):
    with pytest.raises(
        ValueError, match=r"mlp\.hidden must be widths such as .*: at most 8, of at most 10000"
    ):
        settings_of(("model", "mlp.hidden"), ("mlp", hidden), (str, str))
    assert parse_settings({"model": "mlp", "mlp.hidden": "10000,1"}).models["mlp"].widths() == (
        10_000,
        1,
    )


@pytest.mark.parametrize("classes", [1, MOST_CLASSES + 1, 10**9])
def test_the_server_says_a_number_of_classes_that_can_be(tmp_path, classes):
    """The last layer has a row for each: 10^9 of them would fill the hospital's memory."""
    data = read_silo_file(write_silo(tmp_path / "own.npz", [[0.0], [1.0], [2.0]], [0, 1, 1]))
    assert agreed_classes({"classes": 5}, data) == 5
    with pytest.raises(
        UserError,
        match=f"there are {classes} classes: this silo has 2, and takes at most 10000",
    ):
        agreed_classes({"classes": classes}, data)
