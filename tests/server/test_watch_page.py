"""The page of `silofl watch` in a real Chromium: rows, stream, reconnection, sizes, and what it asks for."""

from __future__ import annotations

import json

import chromium
import pytest
from watching import begin, done, event, round_done, served, write

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
)

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(
        chromium.program() is None, reason="there is no Chromium on this machine"
    ),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture
def page(tab):
    """The tab without the page of the test before, which asks for its server still."""
    tab.open("about:blank")
    tab.requests.clear()
    tab.errors.clear()
    return tab


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    write(folder, *round_done(1, {"a": 0.5, "b": 0.7}, rounds=4))
    return folder


def row(name):
    """In the page: the text of a silo's row."""
    return f"[...document.querySelectorAll('#silos tbody tr')].find(r => r.cells[0].textContent === {name!r}).innerText"


def test_events_are_on_the_screen_within_a_second(page, run):
    """From the write of the line to the page's text, by the page's own clock; one request for page and stream each."""
    with served(str(run), "--port", "0") as (address, _):
        page.open(address)
        page.until(f"{row('a')}.includes('0.5000')")
        write(run, begin(2, {"a": "train", "b": "train"}, rounds=4))
        page.until(f"{row('a')}.includes('train')")
        shown = "new Promise(done => { const c = () => REPLIED ? done(Date.now()) : setTimeout(c, 5); c(); })"
        write(run, event("reply", silo="b", seconds=3.25))
        before = page.value("Date.now()")
        after = page.value(shown.replace("REPLIED", f"!{row('b')}.includes('train')"))
        assert after - before < 1000
        write(run, *round_done(2, {"a": 0.625, "b": 0.75}, rounds=4))
        page.until(f"{row('a')}.includes('0.6250')")
        page.until("document.getElementById('head').textContent.includes('round 2 of 4')")
        assert {request.removeprefix(address) for request in page.requests} - {"data:,"} == {
            "",
            "events",
        }
        assert page.errors == []


def test_texts_of_silos_are_text(page, run):
    rejected = {HOSTILE: HOSTILE}
    write(run, *round_done(2, {"a": 0.5, HOSTILE: 0.1}, rounds=4, rejected=rejected))
    write(run, event("note", message=HOSTILE, time="now"))
    with served(str(run), "--port", "0") as (address, _):
        page.open(address)
        page.until("document.getElementById('notes').innerText.includes('onerror')")
        assert page.value("document.images.length") == 0
        assert page.value("document.scripts.length") == 1
        assert "owned" not in page.value("document.title")
        assert page.text().count("<script>") >= 3  # row, reason, note: as text
        assert page.errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(page, run, width):
    """Only the tables scroll sideways, within their own frames."""
    silos = {f"hospital-{i:02d}-of-the-very-long-name": 0.5 + i / 100 for i in range(12)}
    long = {
        "hospital-00-of-the-very-long-name": "no reply within 300 s (straggler-factor, straggler-floor) "
        * 3
    }
    write(run, *round_done(2, silos, rounds=4, rejected=long), *round_done(3, silos, rounds=4))
    with served(str(run), "--port", "0") as (address, _):
        page.resize(width)
        page.open(address)
        page.until("document.querySelectorAll('#silos tbody tr').length === 14")
        assert page.value("document.documentElement.scrollWidth") <= width
        assert (
            page.value("getComputedStyle(document.querySelector('.wide')).overflowX") == "auto"
        )
        assert page.value("document.querySelectorAll('#curve polyline').length") == 2


def test_the_page_finds_a_server_that_is_started_again(page, run):
    with served(str(run), "--port", "0") as (address, process):
        page.open(address)
        # The stream is live before the first picture
        page.until(f"{row('a')}.includes('0.5000')")
        process.kill()
        page.until(
            "document.getElementById('line').textContent.startsWith('The connection is lost')"
        )
        assert "0.5000" in page.value(row("a"))  # the last picture stays
    write(run, *round_done(2, {"a": 0.875, "b": 0.75}, rounds=4))
    with served(str(run), "--port", address.rstrip("/").rpartition(":")[2]):
        page.until(f"{row('a')}.includes('0.8750')")
        page.until("document.getElementById('line').textContent === 'live'")


def test_a_run_that_is_resumed_or_replaced_is_followed(page, run):
    """The other side restarts: a new server process appends to the file, or the directory is made anew."""
    with served(str(run), "--port", "0") as (address, _):
        page.open(address)
        page.until(f"{row('a')}.includes('0.5000')")
        (run / "progress.jsonl").unlink()
        write(run, *round_done(1, {"c": 0.25}, rounds=2), done())
        page.until(f"{row('c')}.includes('0.2500')")
        assert page.value("document.querySelectorAll('#silos tbody tr').length") == 1
        page.until("document.getElementById('head').textContent.includes('done')")
        # Nothing is live any more
        page.until("document.getElementById('line').textContent.startsWith('ended')")


def test_a_token_opens_the_page_and_is_not_in_it(page, run, tmp_path):
    arguments = (str(run), "--port", "0", "--token-file", str(tmp_path / "token"))
    with served(*arguments) as (address, _):
        token = (tmp_path / "token").read_text().strip()
        page.open(base := address)
        assert token not in address
        page.until("document.body.innerText.startsWith('refused')")
        page.open(f"{base}?token={token}")
        page.until(f"{row('a')}.includes('0.5000')")
        assert page.value("location.href") == base
        assert token not in page.value("document.documentElement.outerHTML") + page.value(
            "document.cookie"
        )


def test_a_page_of_another_site_reads_nothing(page, run, tmp_path):
    """A script of another origin: neither by fetch, nor by a stream, nor in a frame."""
    with (
        served(str(run), "--port", "0") as (address, _),
        served(str(run), "--port", "0") as (other, _),
    ):
        page.open(other)
        page.until("document.getElementById('line').textContent === 'live'")
        for mode in ("cors", "no-cors"):
            script = f"fetch({json.dumps(address + 'metrics')}, {{mode: '{mode}'}}).then(r => r.text(), e => 'no')"
            assert page.value(script) in ("no", "")
        page.until(row("a"))


def row_text(page, name):
    return page.value(row(name))
