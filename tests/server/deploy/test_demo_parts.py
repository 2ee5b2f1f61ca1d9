"""A silo's demo data belong to its name: they stay what they were when others come or go."""

from __future__ import annotations

import pytest

from server.deploy.compose import compose_file
from server.deploy.federation import read_federation
from server.deploy.local.demo_data import split_demo


def federation(tmp_path, *names, demo=""):
    path = tmp_path / "federation.yaml"
    silos = "".join(f"- {{name: {name}, data: demo}}\n" for name in names)
    path.write_text(
        f"name: net\ndemo: {{dataset: digits, partition: iid, seed: 1{demo}}}\nsilos:\n{silos}"
    )
    return read_federation(path)


def contents(tmp_path, *names, demo=""):
    """What each silo reads, once the federation has been brought up with these silos."""
    said: list[str] = []
    files = split_demo(federation(tmp_path, *names, demo=demo), tmp_path, said.append)
    (tmp_path / "said").write_text("\n".join(said))
    return {name: file.read_bytes() for name, file in files.items()}


def test_those_who_stay_keep_their_data(tmp_path):
    """One leaves, one comes back, and the order in the file changes."""
    before = contents(tmp_path, "a", "b", "c")
    assert len(set(before.values())) == 3
    for names in (("a", "c"), ("c", "b", "a"), ("b",), ("a", "b", "c")):
        assert contents(tmp_path, *names) == {name: before[name] for name in names}
        assert (tmp_path / "said").read_text() == ""


def test_one_more_is_refused_and_nobody_is_split_anew(tmp_path):
    before = contents(tmp_path, "a", "b", "c")
    with pytest.raises(ValueError) as caught:
        contents(tmp_path, "a", "b", "c", "d")
    assert str(caught.value) == (
        f"{tmp_path}/federation.yaml: silo d: the demo data are split into 3 parts, and other silos have them: give d "
        "a file of its own, or write `parts: 4` into `demo`, which splits them anew for every silo"
    )
    assert contents(tmp_path, "a", "b", "c") == before
    after = contents(tmp_path, "a", "b", "c", "d", demo=", parts: 4")
    assert len(set(after.values())) == 4 and after["a"] != before["a"]
    assert (tmp_path / "said").read_text() == "splitting digits (iid, seed 1) over 4 silos"
    # The key may go again
    assert contents(tmp_path, "d", "a") == {name: after[name] for name in ("d", "a")}


def test_settings_of_the_split_are_kept_and_a_change_splits_anew(tmp_path):
    """The compose file hands them on, so that containers get the same parts."""
    before = contents(tmp_path, "a", "b")
    half = contents(tmp_path, "a", "b", demo=", settings: {validation: 0.5}")
    assert half != before and "splitting" in (tmp_path / "said").read_text()
    assert contents(tmp_path, "a", "b", demo=", settings: {validation: 0.5}") == half
    assert (tmp_path / "said").read_text() == ""
    made = compose_file(
        federation(tmp_path, "a", "b", demo=", settings: {validation: 0.5}"), tmp_path, tmp_path
    )
    assert "settings: {validation: 0.5}" in made
    assert contents(tmp_path, "a", "b") == before


def test_spare_parts_are_for_later_silos(tmp_path):
    before = contents(tmp_path, "a", "b", demo=", parts: 4")
    after = contents(tmp_path, "c", "a", "b", "d", demo=", parts: 4")
    assert len(set(after.values())) == 4 and before.items() <= after.items()
    with pytest.raises(ValueError, match=r"demo\.parts = 4: too few for 5 silos"):
        federation(tmp_path, *"abcde", demo=", parts: 4")
    for wrong in ("0", "true", "many", "-1"):
        with pytest.raises(ValueError, match=r"demo\.parts = .*: must be "):
            federation(tmp_path, "a", demo=f", parts: {wrong}")


def test_a_new_silo_in_place_of_one_that_left_is_told(tmp_path):
    before = contents(tmp_path, "a", "b")
    after = contents(tmp_path, "a", "new")
    assert after == {"a": before["a"], "new": before["b"]}
    assert (
        (tmp_path / "said")
        .read_text()
        .startswith("new gets the demo data of b, which is no longer in ")
    )
    with pytest.raises(ValueError, match=r"silo b: the demo data are split into 2 parts"):
        contents(tmp_path, "a", "b", "new")


def test_containers_are_told_how_many_parts_there_are(tmp_path):
    text = compose_file(federation(tmp_path, "a", "b", demo=", parts: 5"), tmp_path, tmp_path)
    assert "demo: {dataset: digits, partition: iid, seed: 1, parts: 5}" in text
    assert "parts" not in compose_file(federation(tmp_path, "a", "b"), tmp_path, tmp_path)
