"""Output that is closed, full, or cannot hold a class's name: files are complete, and the exit code is about them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from representatives import seldom

from partitions.common.errors import UserError
from partitions.common.output import print_document

SILOFL = Path(sys.executable).with_name("silofl")


@pytest.fixture()
def table(tmp_path):
    rows = [f"{i},{('gesund ü', '病')[i % 2]}" for i in range(30)]
    (tmp_path / "t.csv").write_text("値,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


def silofl(command, place, **env):
    own = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=place, env=own
    )


IMPORT = f"{SILOFL} import t.csv --no-patient --out o.npz"


@pytest.mark.parametrize(
    ("after", "code", "said"),
    [
        # Unbuffered: the first line already finds no reader
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
        seldom("2>&1 | true; exit ${PIPESTATUS[0]}", 0, ""),
        seldom(">&-", 0, ""),
        (">/dev/full", 2, "silofl import: standard output: No space left on device\n"),
    ],
)
def test_an_import_is_complete_without_a_reader(table, after, code, said):
    done = silofl(f"{IMPORT} {after}", table)
    assert (done.returncode, done.stderr) == (code, said)
    assert {path.name for path in table.iterdir()} == {"t.csv", "o.npz", "o.recipe.toml"}


def test_an_import_is_complete_where_its_output_lacks_a_letter(table):
    done = silofl(IMPORT, table, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (
        0,
        "",
    ) and "0 = gesund \\xfc\n1 = \\u75c5\n" in done.stdout
    assert (table / "o.recipe.toml").exists()
    draft = silofl(
        f"{SILOFL} import t.csv --no-patient --propose", table, PYTHONIOENCODING="latin-1"
    )
    assert (
        draft.returncode == 2
        and "standard output is iso8859-1, which has no '\\u5024'" in draft.stderr
    )


def test_a_document_is_printed_as_it_is_or_not_at_all(capsys):
    print_document("ü\n")
    assert capsys.readouterr().out == "ü\n"
    with pytest.raises(UserError):
        print_document("\udcff")
