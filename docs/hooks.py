"""Pages from outside docs/ in the site (mkdocs.yml), with links that fit their place there."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# A page's path in the repository, and its path in the site.
OUTSIDE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "in-short.md",
    "SECURITY.md": "security-faults.md",
    "benchmarks/README.md": "benchmarks.md",
}
PLAIN = ("LICENSE",)  # files that are copied as they are
INSIDE = {place: source for source, place in OUTSIDE.items()}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    for name in PLAIN:
        files.append(
            File.generated(config, f"{name}.txt", content=(ROOT / name).read_text("utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links between docs/ and the repository's other pages to their places in the site."""
    place = page.file.src_uri
    source = INSIDE.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        known = OUTSIDE.get(path) or (
            f"{path}.txt" if path in PLAIN else path.removeprefix("docs/")
        )
        return f"{match[1]}{posixpath.relpath(known, posixpath.dirname(place) or '.')}{match[3] or ''}{match[4]}"

    return LINK.sub(moved, markdown)
