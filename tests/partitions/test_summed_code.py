"""Code of one's own: every file that its import can reach is summed, and what was summed is what runs."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import py_compile
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from failing import fails

from client.protocol.code import digest_of_code
from client.protocol.policy import PolicyRefusedError
from client.session import ClientSession
from partitions.common.errors import UserError
from partitions.common.own_code import code_sum, load_function
from partitions.common.source_sum import Summed

MAIN = "from ward_helper import VALUE\n\n\ndef train(task):\n    import ward_late\n    return VALUE, ward_late.VALUE\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A trainer's module, a helper beside it, one that is imported at a call, and a package without __init__.py."""
    own = tmp_path / "ward"
    (own / "ward_parts").mkdir(parents=True)
    (own / "ward_main.py").write_text(MAIN)
    for name in ("ward_helper.py", "ward_late.py", "ward_parts/one.py"):
        (own / name).write_text("VALUE = 'summed'\n")
    monkeypatch.syspath_prepend(own)
    yield own
    for name in [name for name in sys.modules if name.startswith("ward_")]:
        del sys.modules[name]
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, Summed)]


def load():
    return load_function("trainer", "ward_main:train", "task")


def swap(file, text="VALUE = 'other'\n"):
    """Another content of the same length and time, which a .pyc would not notice."""
    before = file.stat()
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "name",
    ["ward_main.py", "ward_helper.py", "ward_late.py", "ward_parts/one.py", "ward_new.so"],
)
def test_each_file_that_an_import_can_reach_is_in_the_sum(folder, name):
    before = digest_of_code("ward_main:train")
    assert before == code_sum(load()) == digest_of_code("ward_parts.one:train")
    (folder / name).write_text("VALUE = 'other'\n")
    assert digest_of_code("ward_main:train") != before


@pytest.mark.parametrize("name", ["notes.txt", ".hidden/one.py", "not-a-name/one.py"])
def test_no_other_file_is(folder, name):
    before = digest_of_code("ward_main:train")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("VALUE = 'other'\n")
    assert digest_of_code("ward_main:train") == before


def test_no_pyc_is_read(folder):
    """One beside its source, of another text; and one without a source."""
    helper = folder / "ward_helper.py"
    text = helper.read_text()
    swap(helper, "VALUE = 'pyc!!!'\n")
    cached = Path(str(py_compile.compile(str(helper), doraise=True)))
    swap(helper, text)
    assert cached.is_file()
    py_compile.compile(
        str(folder / "ward_late.py"), str(folder / "ward_late.pyc"), doraise=True
    )
    (folder / "ward_late.py").unlink()
    train = load()
    fails(ImportError, "^ward_late is not among the .py and .so files of", train, None)
    assert sys.modules["ward_helper"].VALUE == "summed"


def test_what_was_read_runs_however_the_files_change(folder):
    """Swapped between check and import, and before an import in a later call."""
    train, before = load(), digest_of_code("ward_main:train")
    for name in ("ward_helper.py", "ward_late.py", "ward_parts/one.py"):
        swap(folder / name)
    assert train(None) == ("summed", "summed")
    assert importlib.import_module("ward_parts.one").VALUE == "summed"
    assert code_sum(train) == before != digest_of_code("ward_main:train")


def test_a_silo_refuses_code_that_is_another_than_checked(folder):
    """The gate reads the files for each message, and the process that imported them keeps what it read."""

    def check(trainer):
        common = SimpleNamespace(trainer="ward_main:train")
        study = SimpleNamespace(trainer=trainer) if trainer else None
        ClientSession.check_code(
            SimpleNamespace(  # type: ignore[arg-type]
                name="north",
                settings=SimpleNamespace(common=common),
                terms=SimpleNamespace(study=study),
            )
        )

    line = "^north refuses: the code of trainer = ward_main:train has changed since it was read"
    check("")
    check(digest_of_code("ward_main:train"))
    fails(PolicyRefusedError, line, check, "0" * 64)
    swap(folder / "ward_helper.py")
    fails(PolicyRefusedError, line, check, "")
    fails(PolicyRefusedError, line, check, digest_of_code("ward_main:train"))


def test_what_came_later_or_by_a_link_is_refused(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "one.py").write_text("VALUE = 'link'\n")
    (folder / "ward_link").symlink_to(elsewhere)
    (folder / "ward_file.py").symlink_to(elsewhere / "one.py")  # its content is in the sum
    load()
    (folder / "ward_came.py").write_text("VALUE = 'later'\n")
    for name in ("ward_link.one", "ward_link", "ward_came"):
        fails(ImportError, "is not among the .py and .so files", importlib.import_module, name)
    (elsewhere / "one.py").write_text("VALUE = 'swap'\n")
    assert importlib.import_module("ward_file").VALUE == "link"


def test_a_missing_helper_is_one_line(folder):
    (folder / "ward_helper.py").unlink()
    fails(UserError, "^trainer = 'ward_main:train': ward_main cannot be imported: ", load)


def test_a_library_is_loaded_from_the_bytes_that_were_read(folder, monkeypatch):
    """An extension module of Python's own under another folder; then its file is broken."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    source = importlib.util.find_spec("_heapq")
    if source is None or not str(source.origin).endswith(".so"):
        pytest.skip("this Python has no library to copy")
    target = folder / f"_heapq{suffix}"
    shutil.copy(str(source.origin), target)
    load()
    target.write_bytes(b"no library")
    monkeypatch.delitem(sys.modules, "_heapq", raising=False)
    made = importlib.import_module("_heapq")
    assert made.__file__ != str(source.origin) and made.heappop([3]) == 3
