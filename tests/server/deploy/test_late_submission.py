"""Which silos a submitted run waits for, where hospitals may join it late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from partitions.common.errors import UserError
from server.deploy import submit
from strategies.base.run_settings import parse_settings

HERE = {"north": "online", "south": "online", "west": "offline"}


def here(late):
    nodes = [SimpleNamespace(name=name, status=status) for name, status in HERE.items()]
    control: Any = SimpleNamespace(nodes=lambda: nodes)
    return submit._silos_online(control, late)


@pytest.mark.parametrize(
    ("late", "silos", "said"),
    [
        ("", 2, "without west: not online (--set silos=3 waits)"),
        ("any", 3, ""),
        ("west=3", 3, ""),
        ("east=3", 3, "without west: not online (--set silos=3 waits)"),
        ("south=3", 2, "without west: not online (--set silos=3 waits)"),
    ],
)
def test_there_is_room_for_those_that_may_join(late, silos, said, capsys):
    assert here(late) == silos
    assert capsys.readouterr().err.strip() == said


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"silos": 3}, ""),
        ({"silos": 4}, "silos = 4: only 3 are registered, the run would wait in vain"),
        ({"silos": 4, "late-joiners": "east=3"}, ""),
        ({"silos": 3, "late-joiners": "west=3"}, ""),
        (
            {"silos": 5, "late-joiners": "east=3"},
            "silos = 5: only 3 are registered, besides late-joiners = east=3, the run would wait in vain",
        ),
        ({"silos": 9, "late-joiners": "any", "min-silos": 3}, ""),
        (
            {"silos": 9, "late-joiners": "any", "min-silos": 4},
            "min-silos = 4: only 3 are registered, the run would wait in vain",
        ),
        (
            {"silos": 9, "late-joiners": "any"},
            "late-joiners = any: min-silos is wanted too, the number of silos that the run begins with",
        ),
    ],
)
def test_nobody_is_waited_for_in_vain(settings, refused):
    """East has no key yet: its bundle is made as the run goes on."""
    common = parse_settings({"strategy": "fedavg", "rounds": 5, **settings}).common
    if not refused:
        submit._check_silos(common, HERE.keys())
        return
    with pytest.raises(UserError) as error:
        submit._check_silos(common, HERE.keys())
    assert str(error.value) == refused
