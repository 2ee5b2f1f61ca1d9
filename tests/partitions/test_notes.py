"""`silofl import --text`: notes of a csv become tokens; nothing of them is shown."""

from __future__ import annotations

import csv
import hashlib

import numpy as np
import pytest
from failing import fails
from taken import all_x, imported, silofl, splits_of

from partitions.importing.options import Take
from partitions.silo_file import check_silo_file, read_silo_file
from partitions.tokens import Hashed
from server.cli.main import main

HEADER = ["patient", "age", "bmi", "NOTE", "label"]


def row(i, text=None):
    note = f"Pt {i} seen;\nno fever, sat. {90 + i % 10}" if text is None else text
    return [f"p{i // 2}", str(40 + i), f"{20 + i / 10}", note, "ill" if i % 3 else "well"]


@pytest.fixture
def notes(tmp_path):
    def write(*changed, header=HEADER, n=50):
        rows = [dict(changed).get(i, row(i)) for i in range(n)]
        path = tmp_path / "notes.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return path

    return write


def take_in(source, take, **options):
    return imported(source, source.with_name("ours.npz"), take=take, **options)


def test_notes_become_tokens(notes):
    """pt I seen no fever , sat . 9x: nine words; no other column is in the file, and two of a patient stay together."""
    made = take_in(notes(), Take(text="NOTE", length=8))
    assert (
        str(made).splitlines()[0] == "train 32, val 8, test 10 samples: texts of up to 8 tokens"
    )
    assert made.notes == (
        "left out are age, bmi; --columns age,bmi takes them beside the text",
        "17 of 25 patients have samples of several classes",
        "words are hashed into 65536 numbers (hashed:65536)",
        "50 of 50 texts are cut at 8 tokens (--length)",
    )
    assert all(check.ok for check in check_silo_file(made.file))
    data = read_silo_file(made.file)
    assert data.vocabulary == 65538 and data.input_shape == ("tokens", 8, 65538)
    x = all_x(data)
    hashed = Hashed()
    wanted = {tuple(hashed.tokens(row(i)[3])[:8]) for i in range(50)}
    assert {tuple(tokens) for tokens in x.tolist()} == wanted and len(wanted) == 50
    numbers = [set(split.x[:, 1].tolist()) for split in splits_of(data)]
    for i in range(0, 50, 2):
        pair = set(hashed.tokens(f"{i} {i + 1}"))
        assert sum(bool(pair & own) for own in numbers) == 1
    assert b"fever" not in made.file.read_bytes()


def test_numbers_beside_the_text(notes):
    made = take_in(
        notes((3, row(3, "")), (4, row(4, " ; "))),
        Take(text="NOTE", columns=("age", "bmi"), length=12),
    )
    assert "2 of 50 samples have no text: it counts as missing" in made.notes
    assert (
        str(made)
        .splitlines()[0]
        .endswith("columns: a table of 2 columns, float32; text: texts of up to 12 tokens")
    )
    data = read_silo_file(made.file)
    assert data.input_shape == (("columns", (2,)), ("text", ("tokens", 12, 65538)))
    x = all_x(data)
    for sample in x:
        i = int(sample["columns"][0]) - 40
        tokens = [] if i in (3, 4) else Hashed().tokens(row(i)[3])
        assert sample["text"].tolist() == tokens + (12 - len(tokens)) * [0]
        assert sample["columns"][1] == np.float32(20 + i / 10)


def test_a_file_of_words_is_compared_by_its_sum(notes):
    source = notes()
    words = source.with_name("words.txt")
    words.write_text("no\nfever\n,\nseen\n.\n")
    made = take_in(source, Take(text="NOTE", vocabulary=str(words)))
    digest = hashlib.sha256(words.read_bytes()).hexdigest()
    assert (
        f"5 words in words.txt, SHA-256 {digest}: every hospital must have the same"
        in made.notes
    )
    assert "200 of 450 words are not in the vocabulary" in made.notes  # pt, the number, sat, 9x
    data = read_silo_file(made.file)
    assert data.vocabulary == 7
    assert np.unique(np.concatenate([data.train.x, data.test.x])[:, :10], axis=0).tolist() == [
        [1, 1, 5, 2, 3, 4, 1, 6, 1, 0]
    ]


def test_a_text_without_words_in_berts_pieces_is_missing(notes):
    source = notes((3, row(3, "")))
    (source.parent / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nfever\n")
    made = take_in(
        source, Take(text="NOTE", columns=("age",), vocabulary=str(source.parent / "vocab.txt"))
    )
    x = all_x(made.data)
    assert (~x["text"].any(axis=1)).sum() == 1
    made.file.unlink()
    # Two lines a note
    with pytest.raises(ValueError, match=r"notes\.csv, line 8: NOTE has no word; fill or drop"):
        take_in(source, Take(text="NOTE", vocabulary=str(source.parent / "vocab.txt")))


def test_notes_that_are_copied_into_the_test_part_are_told(notes):
    header = ["NOTE", "label", "split"]
    rows = [
        (i, [f"note {i % 5}", str(i % 2), "test" if i >= 40 else "train"]) for i in range(50)
    ]
    made = take_in(notes(*rows, header=header), Take(text="NOTE"))
    assert made.notes[-2:] == (
        "10 of 10 test samples have a text that is also in training or validation: tests are too easy by that",
        "50 of 50 samples have the same text as another patient's: keep one of each, or give the copies one patient",
    )


def test_words_that_share_a_number_are_counted(notes):
    made = take_in(notes(), Take(text="NOTE", vocabulary="hashed:4"))
    shared = next(note for note in made.notes if "share a number" in note)
    words = {
        word
        for i in range(50)
        for word in ("pt", str(i), "seen", "no", "fever", ",", "sat", ".", str(90 + i % 10))
    }
    assert (
        shared
        == f"{len(words)} of {len(words)} different words share a number with another one"
    )


def test_the_label_is_said_where_no_column_has_that_name(notes):
    header = ["age", "ill", "NOTE"]
    rows = [(i, [str(i), str(i % 2), f"note {i}"]) for i in range(50)]
    source = notes(*rows, header=header)
    with pytest.raises(
        ValueError,
        match=r"no column label; name the label's column with --label: age, ill, NOTE$",
    ):
        take_in(source, Take(text="NOTE"))
    made = take_in(source, Take(text="NOTE"), label="ill")
    assert made.data.classes == 2 and made.notes[0].startswith("left out are age;")


def test_columns_of_a_table_may_be_chosen(notes):
    header = ["age", "sex", "bmi", "label"]
    rows = [(i, [str(i), str(i % 2), str(i / 2), str(i % 2)]) for i in range(50)]
    made = take_in(notes(*rows, header=header), Take(columns=("bmi", "age")))
    assert (
        made.feature_names == ("bmi", "age")
        and (made.data.test.x[:, 0] * 2 == made.data.test.x[:, 1]).all()
    )


SECRET = "Anna Schmidt, b. 1950, was seen today because of her cough"


@pytest.mark.parametrize(
    "changed, take, options, fault",
    [
        (
            (),
            Take(text="NOTES"),
            {},
            r"unknown column of .*notes\.csv 'NOTES' \(did you mean 'NOTE'\?\)",
        ),
        (
            (),
            Take(text="NOTE"),
            {"label": "NOTE"},
            "NOTE is the text and the label; name another column",
        ),
        (
            (),
            Take(text="NOTE", columns=("weight",)),
            {},
            "unknown column of .* besides label, split, patient, NOTE: 'weight'",
        ),
        (
            (),
            Take(text="NOTE", columns=("NOTE",)),
            {},
            "unknown column of .* besides label, split, patient, NOTE: 'NOTE'",
        ),
        (
            ((0, row(0, "")),),
            Take(text="NOTE"),
            {},
            r"line 2: NOTE has no word; fill or drop such rows",
        ),
        (((0, row(0, ";")),), Take(text="NOTE"), {}, r"line 2: NOTE has no word"),
        (
            ((0, row(0, SECRET)),),
            Take(text="bmi", columns=("NOTE",)),
            {},
            r"line 2: NOTE is a text of 58 characters",
        ),
        (
            ((0, row(0, 4 * SECRET)),),
            Take(text="bmi"),
            {"label": "NOTE"},
            "line 2: the label is a text of 232 characters",
        ),
    ],
)
def test_faults_are_one_line_and_quote_no_note(notes, changed, take, options, fault):
    source = notes(*changed)
    said = fails(ValueError, fault, take_in, source, take, **options)
    assert "\n" not in said and "Schmidt" not in said
    assert not source.with_name("ours.npz").exists()


def test_texts_are_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("file,NOTE,label\na.png,x,0\n")
    with pytest.raises(ValueError, match="has pictures; --text and --columns are of a table"):
        take_in(tmp_path / "a.csv", Take(text="NOTE"))
    fails(ValueError, "1 to 65536 tokens, not 0", Take, text="NOTE", length=0)


def test_a_long_note_is_read(notes):
    """Longer than the csv library's own limit of 131,072 characters."""
    made = take_in(notes((0, row(0, 30_000 * "word "))), Take(text="NOTE", length=20_000))
    assert made.data.train.x.shape[1] == 20_000


def test_the_command(notes, capsys):
    """Two hospitals with other notes make files of one shape."""
    source = notes()
    ours = str(source.with_name("ours.npz"))
    assert (
        silofl("import", source, "--text", "NOTE", "--columns", "age, bmi", "--out", ours) == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "train 32, val 8, test 10 samples: columns: a table of 2 columns, float32; text: texts of up to 200 tokens",
        "2 classes",
        "0 = ill",
        "1 = well",
        "note: 17 of 25 patients have samples of several classes",
        "note: words are hashed into 65536 numbers (hashed:65536)",
        f"{source.with_name('ours.recipe.toml')}: the recipe; silofl import NEW.csv --recipe "
        f"{source.with_name('ours.recipe.toml')} repeats it",
        "the split is written into the file: no run can change it",
        ours,
    ]
    assert silofl("check-data", ours) == 0
    assert (
        "ok    inputs: columns: a table of 2 columns, float32; text: texts of up to 200 tokens"
        in capsys.readouterr().out
    )
    again = (
        f"import {source} --text NOTE --vocabulary hashed:99 --length 5 --out {ours}".split()
    )
    assert main(again) == 2 and "is there already" in capsys.readouterr().err
    assert silofl(*again, "--overwrite") == 0
    assert read_silo_file(ours).input_shape == ("tokens", 5, 101)
