"""The pages of README.md and docs/: their links, what they name in the code, and the length of their sentences.

Nothing is imported: modules are parsed, because the whole file has to run in a few seconds.
"""

from __future__ import annotations

import ast
import csv
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
LINKED = [*PAGES, ROOT / "benchmarks/README.md"]
CHANGES = ROOT / "CHANGELOG.md"  # its links are followed; what it names may be gone
PACKAGES = ("models", "partitions", "strategies", "client", "server")
ROOMS = (*PACKAGES, "benchmarks", "docker", "requirements", "tests", "experiments", "docs")
LONGEST = 25  # words of a sentence
# Their sentences are those of the settings' declarations, and lists of methods
GENERATED = {"docs/settings.md", "docs/reference-table.md"}
# A key of federation.yaml, files of FLamby, files that a test writes.
NOT_OURS = {
    "server.address",
    "server.public",
    "fed_ixi/common.py",
    "dataset.py",
    "probe_client.py",
    "probe_server.py",
}
PLACEHOLDER = re.compile(r"[/-][A-Z]{3,}\b")  # heart-METHOD.toml stands for several files
FENCE = re.compile(r"^ *```.*?^ *```\n?", re.MULTILINE | re.DOTALL)


def relative(path):
    return path.relative_to(ROOT).as_posix()


def ids(pages):
    return [relative(page) for page in pages]


@cache
def tracked():
    """The files of the checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return frozenset(name for name in names if name and (ROOT / name).is_file())


# --- links


def links(text):
    """The targets of a page's links and pictures that lie in the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    return [
        target for target in targets if "://" not in target and not target.startswith("mailto:")
    ]


@cache
def anchors(page):
    """The anchors of a page's headings, as GitHub makes them; MkDocs makes the same of ours."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain
    )


def resolve(page, target):
    path, _, anchor = target.partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


def broken(page, text):
    """The links of a page that lead nowhere."""
    wrong = []
    for target in links(text):
        path, anchor = resolve(page, target)
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", [*LINKED, CHANGES], ids=ids([*LINKED, CHANGES]))
def test_every_link_resolves(page):
    assert broken(page, page.read_text("utf-8")) == []


def test_a_broken_link_is_found():
    page = ROOT / "docs/index.md"
    text = "[a](nowhere.md) [b](hospital.md#nothing) [c](../README.md) [d](https://example.org/x)\n"
    assert broken(page, text) == ["nowhere.md", "hospital.md#nothing"]


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_every_page_is_reachable(start):
    seen, waiting = set(), [ROOT / start]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        waiting += [resolve(page, target)[0] for target in links(page.read_text("utf-8"))]
    assert {*ids(PAGES), "benchmarks/README.md"} - {relative(page) for page in seen} == set()


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_every_page_of_docs_is_one_link_away(start):
    page = ROOT / start
    linked = {resolve(page, target)[0] for target in links(page.read_text("utf-8"))}
    assert {*(ROOT / "docs").glob("*.md")} - linked - {page} == set()


def test_every_table_of_cells_is_linked_and_whole():
    """Rows of one width below a head without doubles; a table that no page names is lost."""
    linked = {resolve(page, t)[0] for page in LINKED for t in links(page.read_text("utf-8"))}
    tables = {*(ROOT / "docs").rglob("*.csv")}
    assert tables and tables - linked == set()
    for table in tables:
        with table.open(encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        assert rows and len({*head}) == len(head), table
        assert {len(row) for row in rows} == {len(head)}, table


# --- names of the code


def names_of(body):
    """What a module or class binds: definitions, assignments, imports, also below `if` and `try`."""
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {n.id: node for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            found = names_of([*node.body, *node.orelse]) | found
    return found


@cache
def module(path):
    return ast.parse(path.read_text("utf-8"))


def attribute(node, names):
    """Whether a module's or class's syntax has the attribute. What is inherited or imported is taken on trust."""
    if not names:
        return True
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if not isinstance(node, ast.Module | ast.ClassDef):
        return False
    known = names_of(node.body)
    if names[0] in known:
        return attribute(known[names[0]], names[1:])
    if isinstance(node, ast.ClassDef):
        own = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        return names[0] in own or bool(node.bases)
    return False


def dotted(name):
    """Whether `package.module.Class.attribute` exists."""
    parts, folder = name.split("."), ROOT
    for place, part in enumerate(parts):
        file = folder / f"{part}.py"
        if file.is_file():
            return attribute(module(file), parts[place + 1 :])
        if not (folder / part).is_dir():
            init = folder / "__init__.py"
            return place > 0 and init.is_file() and attribute(module(init), parts[place:])
        folder /= part
    return True


def file_exists(name, beside):
    """Whether a path from the root or from the folder of the file that names it, or a bare file name, exists."""
    if "/" not in name:
        return name in bare_names()
    return any((start / name).exists() for start in (ROOT, *beside.parents[:2]))


@cache
def bare_names():
    return frozenset(name.rsplit("/", 1)[-1] for name in tracked())


SPAN = re.compile(r"``([^`\n]+)``|`([^`\n]+)`")
DOTTED = re.compile(rf"(?:{'|'.join(ROOMS)})(?:\.\w+)+")
PATH = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./-]+")
FILE = re.compile(r"[\w/]*\w\.py")


def stale(text, file, *, plain=False):
    """Names of modules, attributes and files in code spans (with `plain` anywhere) that do not exist."""
    wrong = []
    for span in [text] if plain else ["".join(match) for match in SPAN.findall(text)]:
        for match in re.finditer(r"(?<![\w./:-])[\w./-]*\w", span):
            word = match[0].rstrip(".")
            if word in NOT_OURS or PLACEHOLDER.search(word):
                continue
            if FILE.fullmatch(word) or (
                PATH.fullmatch(word) and "." in word.rsplit("/", 1)[-1]
            ):
                good = file_exists(word, file)
            elif DOTTED.fullmatch(word):
                good = dotted(word) or (ROOT / word).exists()
            else:
                continue
            if not good:
                wrong.append(word)
    return wrong


# Parsing every file would take seconds
DOCSTRING = re.compile(r'^ *r?"""(.*?)"""', re.MULTILINE | re.DOTALL)


def python_files():
    return [ROOT / name for name in sorted(tracked()) if name.endswith(".py")]


@pytest.mark.parametrize("page", LINKED, ids=ids(LINKED))
def test_a_page_names_what_exists(page):
    text = page.read_text("utf-8")
    modules = re.findall(r"python -m ((?:server|client|benchmarks|strategies)[\w.]+)", text)
    assert stale(text, page) + [name for name in modules if not dotted(name)] == []


def test_docstrings_name_what_exists():
    wrong = [
        f"{relative(path)}: {word}"
        for path in python_files()
        if path != Path(__file__).resolve()
        for text in DOCSTRING.findall(path.read_text("utf-8"))
        for word in stale(text, path)
        + [w for w in stale(text, path, plain=True) if w.endswith((".py", ".md"))]
    ]
    assert sorted(set(wrong)) == []


def test_a_stale_name_is_found():
    here = ROOT / "server/app.py"
    text = "`server.nothing`, ``server/nothing.py``, `nothing.py`, `models.flat.Nothing`, `server/app.py`, `app.py`"
    assert stale(text, here) == [
        "server.nothing",
        "server/nothing.py",
        "nothing.py",
        "models.flat.Nothing",
    ]


TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def missing_tests(text):
    """The tests that a text names by file and function, and that do not exist."""
    found = sorted({match.groups() for match in TEST.finditer(text)})
    return [
        f"{file}::{name}"
        for file, name in found
        if name not in names_of(module(ROOT / file).body)
    ]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_test_that_a_page_names_exists(page):
    assert missing_tests(page.read_text("utf-8")) == []


def test_a_test_that_does_not_exist_is_found():
    text = "`tests/test_lock.py::test_torch_is_one_version_in_both_builds`, `tests/test_lock.py::test_none`"
    assert missing_tests(text) == ["tests/test_lock.py::test_none"]


# --- sentences


def paragraphs(text):
    """Line number and text of each paragraph and list item, without code blocks, tables, headings and comments."""
    lines, start, kept = FENCE.sub(lambda m: "\n" * m[0].count("\n"), text).split("\n"), 0, ""
    for number, line in enumerate([*lines, ""], 1):
        bare = line.strip()
        skipped = not bare or bare.startswith(("|", "#", "<!--", ":::"))
        item = re.match(r"(?:[*-]|\d+\.) ", bare)
        if (skipped or item) and kept:
            yield start, kept
            kept = ""
        if not skipped:
            start, kept = (
                (start, f"{kept} {bare}")
                if kept
                else (number, bare[item.end() :] if item else bare)
            )


# Some names begin a sentence with a small letter.
END = re.compile(
    r"(?<=[.!?])[\")]*\s+(?=[\"(]?(?:[A-Z0-9]|(?:code|silofl|pip|pydicom|torchvision|uv)\b))"
)


def sentences(paragraph):
    """A simple counter's sentences: a code span or a link is one word, and a full stop before a capital ends one."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    text = re.sub(r"`[^`]*`", "code", text).replace("**", "").replace("*", "")
    return [
        part
        for part in re.split(
            r"(?<=[.!?])[\")]*\s+(?=[\"(]?(?:[A-Z0-9]|(?:code|silofl|pip|pydicom|torchvision|uv)\b))",
            text,
        )
        if part.strip()
    ]


def too_long(text):
    """Line and words of each sentence above the limit."""
    return [
        f"line {line}: {count} words: {sentence[:60]}..."
        for line, paragraph in paragraphs(text)
        for sentence in sentences(paragraph)
        if (count := len(re.findall(r"[\w'’%.,-]*\w[\w'’%.,-]*", sentence))) > LONGEST
    ]


OWN = [page for page in PAGES if relative(page) not in GENERATED]


@pytest.mark.parametrize("page", OWN, ids=ids(OWN))
def test_sentences_are_short(page):
    assert too_long(page.read_text("utf-8")) == []


def test_a_long_sentence_is_found():
    words = " ".join(["word"] * 13)
    long = f"Short. {words.capitalize()}\n{words}."
    text = f"# {words} {words}\n\n{long}\n\n| {words} {words} |\n\n* {words}.\n* `a b c`.\n"
    assert [line.split(":")[0] for line in too_long(text)] == ["line 3"]


def test_images_are_named_by_the_version_that_is_built():
    """A page's command names an image by its tag: with an old one it finds none."""
    (version,) = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    for page in PAGES:
        tags = re.findall(r"silofl-(?:silo|server):(\d[\d.]*\d)", page.read_text())
        assert set(tags) <= {version}, f"{relative(page)} names images of {set(tags)}"


# --- the README's picture


def test_the_picture_is_of_the_run_whose_table_the_readme_shows():
    """`make picture` writes the table of its run into the PNG."""
    from PIL import Image

    readme = (ROOT / "README.md").read_text("utf-8")
    shown = re.search(r"^silo  .*?^mean .*?$", readme, re.DOTALL | re.MULTILINE)
    assert shown is not None
    of_picture = Image.open(ROOT / "docs/images/report.png").info["table"].splitlines()
    assert all(line in of_picture for line in shown[0].splitlines() if line != "...")
