"""The templates: one home for HTML, and the same page from an app's bundle, which carries no `.html` file."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from studies import make_run  # isort: skip


from client.flower.apps import build
from server.rendering import BUNDLED, FOLDER, bundled_text
from server.report.page import page
from server.report.study import StudyResults

ROOT = Path(__file__).resolve().parents[3]
ELEMENT = re.compile(
    r"</?(p|div|table|td|th|tr|span|section|small|h[1-6]|dl|dt|dd|code|style|body)\b[^<]*>"
)


def test_the_bundled_templates_are_the_files():
    assert BUNDLED.read_text("utf-8") == bundled_text(), "make settings writes them"


def test_no_module_of_the_server_has_html():
    """Text of docstrings aside, every element lies in a template."""
    with_html = []
    for path in sorted((ROOT / "server").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and ELEMENT.search(value):
                with_html.append(f"{path.name}: {value[:60]}")
    assert with_html == []


def test_lines_of_templates_have_120_columns_at_most():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
    assert len(files) > 20 and max(map(len, lines)) <= 120


@pytest.mark.exhaustive
def test_an_app_alone_writes_the_same_report(tmp_path):
    run = make_run(tmp_path / "run")
    app = tmp_path / "app"
    with zipfile.ZipFile(io.BytesIO(build(ROOT))) as bundle:
        bundle.extractall(app)
    assert not any(app.rglob("*.html"))
    code = (
        "import sys; from pathlib import Path; import server.report.write as written; "
        "assert Path(written.__file__).is_relative_to(Path.cwd()); "
        "written.write_report(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], cwd=app, check=True)
    text = (run / "report.html").read_text("utf-8")
    assert text == page(StudyResults(run)) and "What each hospital gained" in text
