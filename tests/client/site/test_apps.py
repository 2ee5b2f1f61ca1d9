"""An app bundle is byte for byte the one that `flwr run` makes: a hospital pins its SHA-256."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest
from apps import project
from failing import fails
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab

from client.flower.apps import build, files_of, install_app
from client.protocol.parsed import SiteError

ROOT = Path(__file__).parents[3]
FILES = (
    "probe.py",
    "part/within.py",
    "part/test_within.py",  # Flower leaves tests out
    "part/__pycache__/within.py",
    ".github/notes.md",  # hidden, and part of the app all the same
    ".git/hooks.py",
    ".venv/lib/torch.py",
    "part/runs/old.py",
    "runs.py",
    "made/of/code.py",
    "drafts-1/a.py",
    "LICENSE",
    "data.npz",
)
IGNORED = "# results\n.venv/\nruns/\n__pycache__/\nmade/of/*\n/drafts-*/\n"


def test_of_this_checkout(tmp_path):
    """Flower itself looks at each file that lies about: of a copy without most of those."""
    shutil.copytree(
        ROOT,
        tmp_path / "copy",
        ignore=shutil.ignore_patterns(".git", ".venv*", "*cache*", "runs"),
    )
    (tmp_path / "copy/.venv").mkdir()
    (tmp_path / "copy/.venv/theirs.py").touch()
    assert build(ROOT) == build(tmp_path / "copy") == build_fab_from_disk(tmp_path / "copy")
    assert not any(name.startswith(".venv/") for name in files_of(ROOT))


def test_the_app_of_this_checkout_holds_every_module_and_table():
    """`fab-include` names each kind of file by folder.

    A pattern of `.gitignore` that means a folder at the top, `site/`, takes `client/site/` out of the app too.
    """
    with zipfile.ZipFile(io.BytesIO(build(ROOT))) as app:
        held = set(app.namelist())
    folders = ("client", "models", "partitions", "server", "strategies")
    modules = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".toml", ".json")
    }
    assert len(modules) > 200 and sorted(modules - held) == []


@pytest.mark.parametrize("ignored", [IGNORED, None])
def test_of_a_folder_with_all_that_lies_about(tmp_path, ignored):
    (tmp_path / "pyproject.toml").write_text(project("probe:server", "probe:client"))
    if ignored is not None:
        (tmp_path / ".gitignore").write_text(ignored)
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "probe.py")
    fab = build(tmp_path)
    assert fab == build_fab_from_disk(tmp_path)
    assert (
        (b"runs/old.py" in fab) is (ignored is None)
        and b".github/notes.md" in fab
        and b"linked.py" not in fab
    )


def content_of(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_an_app_is_unpacked_as_flower_does(tmp_path):
    """The same files in a folder of the same name, for Flower's function that loads it."""
    fab = build(ROOT)
    theirs = install_from_fab(fab, install_dir=tmp_path / "theirs", skip_prompt=True)
    ours = install_app(fab, tmp_path / "ours")
    assert ours.name == theirs.name and len(content_of(ours)) > 200
    assert content_of(ours) == content_of(theirs)


def test_an_app_is_unpacked_into_its_folder_alone(tmp_path):
    """A server made it: its name, and those of its files, lead nowhere else."""
    text = project("probe:server", "probe:client")

    def unpack(pyproject, *names):
        with zipfile.ZipFile(content := io.BytesIO(), "w") as archive:
            for name, words in (
                ("pyproject.toml", pyproject),
                *((n, "# a line\n") for n in names),
            ):
                archive.writestr(name, words)
        return install_app(content.getvalue(), tmp_path / "a/b")

    unpacked = unpack(text, "../../up.py", "/rooted.py", ".info/CONTENT", "in/../../over.py")
    assert unpacked.parent == tmp_path / "a/b"
    assert {*content_of(tmp_path)} == {
        f"a/b/{unpacked.name}/{name}"
        for name in ("pyproject.toml", "up.py", "rooted.py", "in/over.py")
    }
    for part in ("../out", "/out", ".hidden", "a b", "a\\nb"):
        named = text.replace('"test"', f'"{part}"')
        assert named != text
        fails(SiteError, "an app's name has letters, digits", unpack, named)
    fails(KeyError, "project", unpack, "")
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == [unpacked.name]


def test_of_no_app(tmp_path):
    fails(ValueError, r"pyproject\.toml not found", build, tmp_path)
