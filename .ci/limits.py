"""The limits of the house (docs/contributing.md), checked by `make check`: tokens of each package, sizes, words.

Prints every place beyond a limit, and ends with 1 where there is one.
"""

import ast
import gc
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from shutil import which
from statistics import median
from unicodedata import combining

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("models", "partitions", "strategies", "client", "server")
MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES = 16, 400, 50
# Nodes of the syntax tree per line of code: of the median module, with a little room, and of any module. Lines of
# templates are no code.
MOST_NODES_MEDIAN, MOST_NODES = 9.5, 15
# Packages whose names and texts are checked below. A public function's name, but `main`, stands once in each package.
CLEAN = (*PACKAGES, "benchmarks")
# Names of variables, arguments and functions that say nothing of what they hold
REFUSED = {"found", "own", "given", "asked", "told", "one", "made"}
# Of these modules they are keys of a file's form
KEYS = {("client/protocol/keys.py", "made"), ("client/protocol/manifest.py", "made")}
MOST_COLUMNS = 120
TAGS = re.compile(
    r"</?(?:a|body|div|h[1-6]|head|html|li|p|section|span|t[dhr]|table|ul)\b[^<]*>"
)
# Tokens without imports, docstrings and comments, which neither long lines nor prose change: of a method's file, and of
# all else together, which leaves a new feature room. They are lowered as code goes, and raised only in a commit that
# says why.
MOST_METHOD_TOKENS = 2_500
MOST_TOKENS = {PACKAGES: 458_000, ("tests",): 700_000}
# Words of all documents together, as `wc -w` counts them, without what `make settings` writes: 80,000 with its 6,600,
# which grow with each method and setting. Cells of a table go into docs/tables/*.csv.
MOST_WORDS = 73_400
DOCUMENTS = ("*.md", "benchmarks/*.md", "docs/**/*.md")
WRITTEN = re.compile(
    r"<!-- made by `make settings`: begin -->.*?<!-- made by `make settings`: end -->",
    re.DOTALL,
)
WRITTEN_PAGE = "docs/settings.md"
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}
# The top level is the design's; what a test left there is committed all too easily.
FOLDERS = {*CLEAN, ".ci", "docker", "docs", "examples", "experiments", "requirements", "tests"}
FILES = re.compile(
    r"[A-Z]+\.md|CITATION\.cff|LICENSE|Makefile|silofl\.py|pyproject\.toml|\.dockerignore|\.gitignore"
    r"|(?:\.pre-commit-config|docker-compose|federation|mkdocs)\.ya?ml"
)
LISTS = {"strategies"}  # the list of the methods, one module each
# Words that a reader of Flower's documentation would have to ask about, each with what stands in its place.
WORDS = {
    "hindrance": "incompatibility",
    "warm parent": "template process",
    "minder": "watchdog",
    "resident|keeper": "persistent worker",
    "gathering": "client registration",
    "let_out": "the audit gate's function",
    "data cards?|read_card|(?<!model )cards": "data summary, or model cards",
    r"(?:\w+_)?facts?(?:_\w+)?": "schema, fields",
    r"judge[sd]?|judging": "reconcile, check",
    r"wish(?:es|ed)?": "options, requested",
    "hands? on": "forwards",
    "discreet": "redacted errors",
    "bearable": "breakdown point",
    "owed|owes": "residual, or say what the software does",
    "whoever|nobody|whereupon": "a plain subject",
    "is told|hangs on|by its word|so that not": "what the software does",
}


def beyond() -> Iterator[str]:
    """What is beyond a limit, a line each."""
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            name = folder.relative_to(ROOT).as_posix()
            if len(modules) > MOST_MODULES and name not in LISTS:
                yield f"{name}: {len(modules)} modules; at most {MOST_MODULES}"
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from _in_module(path)


def sizes() -> Iterator[str]:
    """Each method's file with more tokens than its budget, and all other files if they have more than theirs."""
    advice = "remove code, or say in a commit why MOST_TOKENS in .ci/limits.py is raised"
    methods = {path for name in LISTS for path in (ROOT / name).glob("*.py")}
    for path in sorted(methods):
        if (count := tokens(path)) > MOST_METHOD_TOKENS:
            yield f"{path.relative_to(ROOT)}: {count} tokens; at most {MOST_METHOD_TOKENS} in a method's file"
    for packages, most in MOST_TOKENS.items():
        paths = {path for package in packages for path in (ROOT / package).rglob("*.py")}
        if (count := sum(map(tokens, sorted(paths - methods)))) > most:
            yield f"{', '.join(packages)} without methods: {count} tokens; at most {most}: {advice}"


def documents() -> Iterator[str]:
    """Whether the documents have more words than :data:`MOST_WORDS`."""
    pages = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)} - {
        ROOT / WRITTEN_PAGE
    }
    count = sum(
        len(WRITTEN.sub("", path.read_text(encoding="utf-8")).split()) for path in pages
    )
    if count > MOST_WORDS:
        advice = "remove what no longer decides anything, or say in a commit why MOST_WORDS in .ci/limits.py is raised"
        yield f"documents: {count} words; at most {MOST_WORDS}: {advice}"


def tokens(path: Path) -> int:
    """Count the tokens of a module without imports, docstrings and comments."""
    imports = {
        line
        for node in _nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    # A formatted text is one token, as in Python 3.11: newer versions divide it
    count = inside = 0
    for t in _code(path):
        kind = tokenize.tok_name[t.type]
        inside -= kind == "FSTRING_END"
        count += not inside and kind != "FSTRING_START" and t.start[0] not in imports
        inside += kind == "FSTRING_START"
    return count


def top_level() -> Iterator[str]:
    """Files and folders that git holds in the top level, but the project does not know."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = (
        subprocess.run(command, capture_output=True, text=True).stdout if which("git") else ""
    )
    names = {path.split("/")[0] for path in listed.split("\0")[:-1]}
    for name in sorted(names - FOLDERS):
        if not FILES.fullmatch(name):
            yield f"{name}: in the top level, but not in FOLDERS or FILES of .ci/limits.py; did a test leave it?"


def density() -> Iterator[str]:
    """The median of the modules' nodes per line where it is too high, and each module with far more."""
    densities = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        lines = {n for t in _code(path) for n in range(t.start[0], t.end[0] + 1)}
        nodes = len(_nodes(path))
        if lines and (density := nodes / len(lines)) > 0:
            densities[path.relative_to(ROOT).as_posix()] = density
    if (middle := median(densities.values())) > MOST_NODES_MEDIAN:
        yield f"the median module has {middle:.1f} nodes a line of code; at most {MOST_NODES_MEDIAN}"
    for name, density in densities.items():
        if density > MOST_NODES:
            yield f"{name}: {density:.1f} nodes a line of code; at most {MOST_NODES}"


@cache
def _code(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a module without docstrings and comments."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    prose = {
        line
        for node in _nodes(path)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    with path.open("rb") as file:
        every = tokenize.tokenize(file.readline)
        return [t for t in every if t.type not in NO_CODE and t.start[0] not in prose]


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(_tree(path))]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def class_names() -> Iterator[str]:
    """Each class whose name another class outside the tests has."""
    places: dict[str, str] = {}
    packages = (*PACKAGES, "benchmarks", "docker", "examples")
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                if (other := places.setdefault(node.name, place)) != place:
                    yield f"{place}: {node.name} is a class of {other}, too: one of them needs another name"


def names() -> Iterator[str]:
    """Each refused name, and each public function whose name another one of its package has."""
    for package in CLEAN:
        places: dict[str, str] = {}
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for line, bound in sorted(_bound_names(path)):
                if bound in REFUSED and (name, bound) not in KEYS:
                    yield f"{name}:{line}: {bound!r} does not say what it holds"
            for node in _tree(path).body if package in PACKAGES else ():
                if isinstance(node, ast.FunctionDef) and not re.match("_|main$", node.name):
                    place = f"{name}:{node.lineno}"
                    if (other := places.setdefault(node.name, place)) != place:
                        yield f"{place}: {node.name} is a function of {other}, too: say its object"


def _bound_names(path: Path) -> Iterator[tuple[int, str]]:
    """Each name that a module binds, with its line."""
    for node in _nodes(path):
        match node:
            case ast.Name(id=bound, ctx=ast.Store()) | ast.arg(arg=bound):
                yield node.lineno, bound
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound):
                yield node.lineno, bound
            case ast.alias(asname=str(bound)):
                yield node.lineno, bound


def texts() -> Iterator[str]:
    """Each line that is too long, and each text with an HTML tag: templates hold these."""
    for path in sorted(path for package in CLEAN for path in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if (width := sum(not combining(c) for c in line)) > MOST_COLUMNS:
                yield f"{name}:{number}: {width} columns; at most {MOST_COLUMNS}"
        for node in _nodes(path):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and (tag := TAGS.search(text)):
                yield f"{name}:{node.lineno}: {tag[0]} is HTML, which belongs into a template"


def words() -> Iterator[str]:
    """Each place in code and documents with a word of :data:`WORDS`."""
    # A word behind a quotation mark is a value: `--signed-by "nobody"`.
    patterns = {
        re.compile(rf"(?<!--signed-by )(?<![\"'`.-])\b({word})\b", re.IGNORECASE): better
        for word, better in WORDS.items()
    }
    any_of = re.compile(rf"\b(?:{'|'.join(WORDS)})", re.IGNORECASE)  # few lines have one
    code = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    for path in [*code, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1) if any_of.search(text) else ():
            for pattern, better in patterns.items() if any_of.search(line) else ():
                if match := pattern.search(line):
                    yield f"{path.relative_to(ROOT).as_posix()}:{number}: write {better}, not {match[0]!r}"


def _in_module(path: Path) -> Iterator[str]:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > MOST_LINES:
        yield f"{name}: {lines} lines; at most {MOST_LINES}"
    for node in _statements(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines; at most {MOST_FUNCTION_LINES}"


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; a function is one, and stands in no expression."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


if __name__ == "__main__":
    gc.disable()  # it would look through a million tokens and nodes again and again, which takes half of the time
    checks = (top_level, sizes, documents, density, beyond, class_names, names, texts, words)
    faults = [fault for check in checks for fault in check()]
    print("\n".join(faults) or "sizes, names and words are within the limits")
    sys.exit(bool(faults))
