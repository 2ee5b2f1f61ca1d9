"""Samples that are there more than once: counted by digest for every kind of input, at import and in a file."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from PIL import Image
from taken import imported, silofl

from partitions.copies import sample_notes
from partitions.importing.options import Take
from partitions.silo_file import check_silo_file, map_silo_file
from partitions.tokens import Hashed, Words

N = 60


def same(rng, shape, dtype=np.float32):
    """N samples, each three times in a row."""
    thirds = rng.integers(0, 200, (N // 3, *shape))
    return np.repeat(thirds, 3, axis=0).astype(dtype)


def noted(path):
    return [check.detail for check in check_silo_file(path) if check.name == "note"]


@pytest.mark.parametrize(
    "kind, shape, dtype",
    [
        ("row", (4,), np.float32),
        ("signal", (2, 20), np.float32),
        ("picture", (8, 8), np.uint8),
        ("volume", (1, 4, 8, 8), np.float32),
        ("text", (12,), np.int32),
    ],
)
def test_copies_are_counted_for_every_kind_of_input(tmp_path, kind, shape, dtype):
    x, y = same(np.random.default_rng(0), shape, dtype), np.arange(N) // 3 % 2
    more: dict[str, Any] = {"vocabulary": 300} if kind == "text" else {}
    parts = {
        "train": slice(0, 45),
        "test": slice(
            44, N
        ),  # its first sample is there three times more, two of these in training
    }
    arrays: dict[str, Any] = {
        f"{k}_{part}": v[rows] for part, rows in parts.items() for k, v in (("x", x), ("y", y))
    }
    np.savez(tmp_path / "a.npz", **arrays, **more)
    test, several = noted(tmp_path / "a.npz")
    assert test.startswith(f"1 of 16 test samples have a {kind} that is also in training")
    assert several.startswith(f"61 of 61 samples have the same {kind} as another patient's")
    patients: dict[str, Any] = {
        f"patient_{part}": np.arange(N)[rows] // 3 for part, rows in parts.items()
    }
    patients["patient_test"][0] = N  # another number than in training
    np.savez(tmp_path / "b.npz", **arrays, **more, **patients)
    twice, test, several = noted(tmp_path / "b.npz")
    assert twice.startswith(f"40 of 61 samples repeat a {kind} of the same patient")
    assert several.startswith(f"4 of 61 samples have the same {kind} as another patient's")
    rng = np.random.default_rng(1)
    other: dict[str, Any] = {
        "x_train": rng.permuted(arrays["x_train"].reshape(45, -1), axis=1).reshape(45, *shape)
    }
    np.savez(tmp_path / "c.npz", **arrays | other, **more)
    assert len(noted(tmp_path / "c.npz")) <= 1  # within the test part alone


def test_rows_of_few_values_are_equal_by_chance(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (200, 3)).astype(np.float32)
    np.savez(tmp_path / "t.npz", x=x, y=rng.integers(0, 2, 200))
    assert noted(tmp_path / "t.npz") == []


def test_of_several_inputs_each_is_compared_without_missing_ones(tmp_path):
    rng = np.random.default_rng(0)
    scan, age = (
        rng.integers(1, 255, (N, 6, 6), np.uint8),
        rng.normal(size=(N, 3)).astype(np.float32),
    )
    arrays: dict[str, Any] = {
        "x_scan_train": scan[:40],
        "x_age_train": age[:40],
        "y_train": np.arange(40) % 2,
    }
    arrays |= {"x_scan_test": scan[40:], "x_age_test": age[40:], "y_test": np.arange(20) % 2}
    arrays["x_scan_test"][:5] = scan[:5]
    arrays["x_scan_test"][5:9] = 0  # missing
    arrays["x_scan_train"][5:9] = 0
    np.savez(tmp_path / "t.npz", **arrays)
    data = map_silo_file(tmp_path / "t.npz")
    assert [note[:45] for note in sample_notes(data)] == [
        "5 of 20 test samples have a picture that is a",
        "10 of 60 samples have the same picture as ano",
    ]


def test_an_import_notes_copies(tmp_path, capsys):
    rng = np.random.default_rng(0)
    (tmp_path / "p").mkdir()
    rows = ["file,label,patient"]
    for i in range(30):
        if i % 3 == 0:
            pixels = rng.integers(0, 256, (8, 8), np.uint8) * (i > 0)
        Image.fromarray(pixels).save(tmp_path / "p" / f"{i}.png")
        rows.append(f"p\\{i}.png,{i // 3 % 2},P{i}")
    (tmp_path / "l.csv").write_text("\n".join(rows) + "\n")
    silofl("import", tmp_path / "l.csv", "--labels", "0,1", "--out", tmp_path / "p.npz")
    text = capsys.readouterr().out
    assert "note: 27 of 30 samples have the same picture as another patient's" in text
    assert "note: 3 of 30 samples are blank" in text
    silofl("check-data", tmp_path / "p.npz")
    assert "note: 27 of 30 samples have the same picture" in capsys.readouterr().out


# Texts


def write_table(path, cells, header="pid,note,ill"):
    rows = [f"P{i},{cell},{i % 2}" for i, cell in enumerate(cells)]
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("form", "other"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_two_unicode_forms_of_a_class_a_category_and_a_folder_are_one(tmp_path, form, other):
    spelled = [unicodedata.normalize(f, "Größe Ä") for f in (form, other)]
    path = tmp_path / "t.csv"
    rows = [f"P{i},{i},{spelled[i % 2]},{(*spelled, 'x')[i % 3]}" for i in range(N)]
    path.write_text(
        "\n".join([unicodedata.normalize(form, "pid,äge,ort,Böse"), *rows]) + "\n",
        encoding="utf-8",
    )
    made = imported(path, label=unicodedata.normalize("NFC", "Böse"), take=Take(patient="pid"))
    assert made.label_names == (unicodedata.normalize("NFC", "Größe Ä"), "x")
    assert made.feature_names == ("äge", "ort=Größe Ä")
    for name in spelled:
        (tmp_path / "s" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng([i, *name.encode()]).integers(
                0, 256, (8, 8), np.uint8
            )
            Image.fromarray(pixels).save(tmp_path / "s" / name / f"{i}.png")
    (tmp_path / "s" / "x").mkdir()
    for i in range(6):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / "s" / "x" / f"{i}.png")
    assert imported(tmp_path / "s").label_names == ("Größe Ä", "x")


def test_the_command_takes_names_in_either_form(tmp_path):
    path = write_table(tmp_path / "t.csv", [f"{20 + i}" for i in range(N)], "pid,note,Böse")
    code = silofl(
        "import", path, "--label", unicodedata.normalize("NFD", "Böse"), "--labels", "0,1",
        "--patient", "pid", "--out", tmp_path / "t.npz",
    )  # fmt: skip
    assert code == 0


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("胸部CT检查未见异常。", ["胸", "部", "ct", "检", "查", "未", "见", "异", "常", "。"]),
        ("右肺に影がある", ["右", "肺", "に", "影", "が", "あ", "る"]),
        ("ปวดหัว 3 วัน", ["ป", "ว", "ด", "ห", "ั", "ว", "3", "ว", "ั", "น"]),
        ("no fever, sat. 95", ["no", "fever", ",", "sat", ".", "95"]),
        ("폐렴 의심", ["폐렴", "의심"]),
    ],
)
def test_scripts_without_blanks_are_cut_by_characters(text, tokens):
    assert Hashed().tokens(text) == [Hashed().token(token) for token in tokens]
    characters = Words(tokens)
    assert characters.tokens(text) == [characters.number[token] for token in tokens]
    assert Words(["胸部"]).tokens("胸部 检") == [2, 1]  # a list's own words stay whole


def test_a_column_of_texts_that_share_no_token_is_named(tmp_path):
    codes = [f"x{i * 7919:06d}" for i in range(N)]
    made = imported(
        write_table(tmp_path / "t.csv", codes),
        label="ill",
        take=Take(text="note", patient="pid"),
    )
    assert any(note.startswith("no two texts share a token") for note in made.notes)
    words = [f"fall {i}" for i in range(N)]
    made = imported(
        write_table(tmp_path / "t.csv", words),
        label="ill",
        take=Take(text="note", patient="pid"),
    )
    assert not any(note.startswith("no two texts") for note in made.notes)
