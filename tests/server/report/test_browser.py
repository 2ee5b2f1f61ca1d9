"""The report in a real browser: a phone and a desk, light and dark. Skipped where there is no Chromium."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chromium import browser, program
from tiny import small_study

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)

SIZES = {"phone": (390, 844), "desk": (1280, 900)}
SCHEMES = ("light", "dark")
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3, level AA

# Every element with text of its own that is visible, with its box and the contrast of its colour to what is behind it.
TEXTS = """(() => {
  const rgb = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 && n[3] === 0 ? null : n; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c) return c; }
    return [255, 255, 255];
  };
  return [...document.body.querySelectorAll('*')].filter(e => e.checkVisibility() &&
      [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    const a = light(rgb(e.closest('svg') ? style.fill : style.color)), b = light(behind(e));
    return {text: e.textContent.trim().slice(0, 60), tag: e.tagName, left: box.left, right: box.right,
      width: box.width, height: box.height, scrolls: !!e.closest('.scroll'), hidden: box.width * box.height === 0,
      contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size: parseFloat(style.fontSize)};
  }).filter(e => !e.hidden);
})()"""

# Pairs of texts of one chart whose boxes share more than a rim.
OVERLAPS = """[...document.querySelectorAll('svg')].filter(s => s.checkVisibility()).flatMap(s => {
  const boxes = [...s.querySelectorAll('text')].map(t => [t.textContent.trim(), t.getBoundingClientRect()])
    .filter(([text, box]) => text && box.width > 0);
  return boxes.flatMap(([t, a], i) => boxes.slice(i + 1).filter(([u, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 3 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5)
    .map(([u]) => `${s.getAttribute('aria-label')}: ${t} / ${u}`));
})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a small study with every section."""
    out = tmp_path_factory.mktemp("browser") / "run"
    given = {"silos": 6, "model": "linear", "strategy": "local,fedavg,apple"}
    return small_study(out, "breast-cancer", **given) / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in SCHEMES], ids="-".join)
def opened(request, page, report):
    size, scheme = request.param
    page.show(report, *SIZES[size], scheme)
    if folder := os.environ.get("SILOFL_SCREENSHOTS"):  # to look at
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{size}-{scheme}.png").write_bytes(page.picture())
    dark = page.value("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (scheme == "dark") and page.value("innerWidth") == SIZES[size][0]
    return page, SIZES[size][0]


def test_nothing_is_wider_than_the_window(opened):
    """Tables scroll in a box of their own; all other text is inside the window."""
    page, width = opened
    assert page.value("document.documentElement.scrollWidth") <= width
    texts = page.value(TEXTS)
    assert len(texts) > 100
    assert [
        t for t in texts if not t["scrolls"] and (t["left"] < -1 or t["right"] > width + 1)
    ] == []


def test_every_text_can_be_read(opened):
    page, _ = opened
    texts = page.value(TEXTS)
    assert [t for t in texts if t["contrast"] < LEAST_CONTRAST] == []
    assert [t for t in texts if t["tag"] != "text" and t["size"] < 11] == []


def test_no_names_in_a_chart_overlap(opened):
    page, _ = opened
    assert page.value(OVERLAPS) == []


def test_the_answer_stands_at_the_head(opened):
    """On the first screen of a desk; on a phone above every section."""
    page, width = opened
    top = page.value("document.querySelector('.answer').getBoundingClientRect().top")
    assert top < (
        900
        if width > 600
        else page.value("document.querySelector('section').getBoundingClientRect().top")
    )
    ids = page.value("[...document.querySelectorAll('section')].map(s => s.id)")
    assert {"silos", "methods", "evidence", "rounds", "data", "cost"} <= set(ids)


def test_colours_follow_the_readers_setting(page, report):
    found = []
    for scheme in SCHEMES:
        page.show(report, *SIZES["desk"], scheme)
        found.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert found == ["rgb(246, 246, 244)", "rgb(16, 20, 24)"]


def test_it_asks_the_network_for_nothing_and_logs_no_error(page, report):
    page.show(report, *SIZES["desk"], "light")
    assert page.requests == [report.as_uri()]
    assert page.errors == []
