"""gdntune/report/html.py, panels.py and figures.py: a report as one file with pictures and samples."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from gdntune import errors
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report import figures, maps
from gdntune.report.document import Bullets, Document, Grid, Section, Text
from gdntune.report.html import html
from gdntune.report.panels import packed
from gdntune.report.report import report
from gdntune.results.published import published
from gdntune.results.records import Cell, Check, Trial

ONE = Contract()
BROWSER = next(
    filter(
        None,
        map(
            shutil.which,
            ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell"),
        ),
    ),
    None,
)
in_a_browser = pytest.mark.skipif(
    BROWSER is None,
    reason="NO CHROMIUM: no page of a report was opened in a browser; install it (Debian: apt-get install chromium) to run this",
)
PEER = Variant("peer:other", "peer:other.decode", {"version": "1.2", "form": "as it comes"})


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """A made-up run on a CPU, with a peer that is half as fast as each choice, and one that failed."""
    header = synthetic.run(
        synthetic.cpu(), policy={"timer": "cpu", "l2": "cold-clean"}, peaks={"measured": 20.0}
    )
    found = synthetic.records(header, HV=8)
    with_peers = []
    for r in found:
        with_peers.append(r)
        if isinstance(r, Trial) and r.role == "floor":
            us = [2.5 * x for x in r.samples_us]
            with_peers.append(
                Trial(
                    problem=r.problem,
                    variant=PEER,
                    role="peer",
                    stage="final",
                    status="ok",
                    samples_us=us,
                )
            )
    return report([synthetic.write(tmp_path_factory.mktemp("cpu"), header, with_peers)])


@pytest.fixture(scope="module")
def h100(h100, tmp_path_factory):
    """The shipped run on an H100 beside the published figures: its cells of one and of four tokens,
    since all of them would take most of the time of these tests.
    """
    _, run, records = h100
    few = [
        r
        for r in records
        if (
            r.problem.contract if isinstance(r, Trial | Cell) else getattr(r, "contract", ONE)
        ).tokens
        in (1, 4)
    ]
    folder = tmp_path_factory.mktemp("h100")
    synthetic.write(
        folder, msgspec.structs.replace(run, cells=msgspec.UNSET), few, with_table=False
    )
    return report([folder], [published("published:flashinfer-pr-3127")])


@pytest.fixture(scope="module")
def pages(cpu, h100, tmp_path_factory):
    """Both as files."""
    folder = tmp_path_factory.mktemp("pages")
    for name, made in (("cpu", cpu), ("h100", h100)):
        (folder / f"{name}.html").write_text(made.html(), encoding="utf-8")
    return folder


def embedded(page):
    """What the page's script reads."""
    return json.loads(
        re.search(r'<script type="application/json" id="samples">(.*?)</script>', page, re.S)[1]
    )


def unpacked(step, text):
    """Samples in ns, as page.js takes them from the page."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    numbers, value, shift = [], 0, 0
    for letter in text:
        digit = digits.index(letter)
        value += (digit & 31) << shift
        shift += 5
        if not digit & 32:
            numbers.append(value)
            value = shift = 0
    samples, at = [], 0
    for up, again in zip(numbers[::2], numbers[1::2], strict=True):
        at += up
        samples += [at * step] * (again + 1)
    return samples


class Outline(HTMLParser):
    """Which elements are open, and whatever refers outside of the page."""

    VOID = ("meta", "br", "img", "input", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.outside, self.count, self.ids = [], [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "data", "action") and not value.startswith("#"):
                self.outside.append((tag, name, value))
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_one_whole_file(pages, name):
    """Every element is closed, no file or address is referred to, and the file is of a size that
    can be mailed.
    """
    text = (pages / f"{name}.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.open == []
    assert outline.outside == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert {i for i in outline.ids if re.fullmatch(r"s\d+|samples", i)} == {
        f"s{n + 1}" for n in range(outline.count["section"])
    } | {"samples"}
    assert len(text) < 3e6


def test_same_journal_same_bytes(cpu, tmp_path):
    """The same report in another process, with another seed of hashes, has the same bytes."""
    header = synthetic.run()
    folder = synthetic.write(tmp_path, header, synthetic.records(header))
    code = f"from gdntune.report.report import report; import sys; sys.stdout.write(report([{str(folder)!r}]).html())"
    pages = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert pages[0] == pages[1]
    assert cpu.html() == cpu.html()


def test_pictures_of_each_contract(h100, pages):
    """Each contract has maps of times, shares and speed-ups, over each peer where there is one,
    curves, and the map of winners. A share above 100% has its reason beside it.
    """
    text = (pages / "h100.html").read_text(encoding="utf-8")
    for caption in (
        "Time of the chosen variant, us",
        "Share of the DRAM&#x27;s peak, %",
        "Speed-up over the default rule",
        "Time against work units",
        "Which variant is called",
    ):
        assert len(re.findall(rf"<figcaption>{re.escape(caption)}", text)) == 2
    # each cell in three maps; where the table's choice was no leader at a held-out cell, as in older
    # sweeps, it has no time to show
    shown = int(h100.frame["chosen"].sum())
    cells = sum(isinstance(r, Cell) for r in h100.sources[0].records)
    assert cells - 20 < shown <= cells
    assert len(re.findall(r'data-key="\d+:\d+:\d+:\d+"', text)) == 3 * shown
    assert ("of these the choice was no leader" in text) is (shown < cells)
    assert shown == cells or f"At {cells - shown} of these the choice was no leader" in text
    assert len(re.findall(r">1\d\d c</td>", text)) > 0
    assert "c: L2-assisted. Part of the state may have stayed in the cache" in text
    assert "Speed-up over other (blue" in (pages / "cpu.html").read_text(encoding="utf-8")


def test_the_map_of_winners_is_the_table(h100, pages):
    """Each interval of the table is an area that says where it begins, and what is called there."""
    text = (pages / "h100.html").read_text(encoding="utf-8")
    intervals = [
        (rule.when.tokens, i) for rule in h100.sources[0].table.rules for i in rule.intervals
    ]
    for tokens, i in intervals:
        span = f"from {i.first} on" if i.last is None else f"from {i.first} to {i.last}"
        assert re.search(rf"<title>T={tokens}, {span}: [A-Z]+ {re.escape(i.variant)}</title>", text)


def test_samples_are_those_of_the_journal(h100, pages):
    """Every final sample of every counted trial is in the page, to the nanosecond, and no screening
    sample is.
    """
    data = embedded((pages / "h100.html").read_text(encoding="utf-8"))
    wanted, held_out = {}, set()
    for r in h100.sources[0].records:
        if isinstance(r, Cell) and r.purpose == "held-out":
            held_out.add(f"{r.problem.contract.tokens}:{r.problem.B}:{r.problem.HV}:{r.problem.H}")
        if isinstance(r, Trial) and r.stage == "final" and r.status == "ok":
            key = f"{r.problem.contract.tokens}:{r.problem.B}:{r.problem.HV}:{r.problem.H}"
            wanted[r.problem.contract.state_dtype, key, r.variant.id] = sorted(
                round(1000 * us) for us in r.samples_us
            )
    found = {}
    for state, part in zip(("bf16", "fp32"), data.values(), strict=True):
        for key, rows in part["cells"].items():
            assert rows[0][2][:1] == ["chosen"] or key in held_out
            for name, role, _, verified, step, text in rows:
                found[state, key, part["names"][name]] = unpacked(step, text)
                assert verified == ("-" if role == "floor" else "ok")
    assert found == wanted


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60))
def test_samples_round_trip(ns):
    """What is packed comes back in order, whatever the times."""
    assert unpacked(*packed(x / 1000 for x in ns)) == sorted(ns)


def test_peers_by_intervals(cpu):
    """Each cell of a peer that takes longer is FASTER for ours, by the interval of the means' ratio,
    and the summary has the counts and the geometric mean's interval.
    """
    (found,) = cpu.peers()
    ratio, low, high = found["mean_ratio"]
    assert low <= ratio <= high and found["FASTER"] == found["cells"] > 0
    assert (found["TIE"], found["SLOWER"], found["UNCLEAR"]) == (0, 0, 0)
    text = " ".join(cpu.markdown().split())
    assert f"ours is FASTER at {found['cells']}, TIE at 0, SLOWER at 0, UNCLEAR at 0" in text


def test_facts_of_peers(cpu):
    """A peer's geometric mean and worst cell stand at the top, and each choice's check."""
    head = cpu.html().partition("<main>")[0]
    assert "as fast as other 1.2 in the geometric mean of 18 cells" in head
    assert "choices agreed with the fp64 reference; 24 checks passed, 0 failed" in head


def test_text_of_others_is_text():
    """A compiler's message cannot become markup, nor end the page's data."""
    hostile = "</script><img src=http://x/ onerror=alert(1)> `a<b`"
    page = html(
        Document(hostile, (Section(hostile, (Text(hostile),)), Section(hostile, (Bullets((hostile,)), Grid(hostile, (hostile,), ((hostile,),)))))),
        (), {},
    )  # fmt: skip
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "<code>a&lt;b</code>" in page


def test_an_unfinished_sweep(tmp_path):
    """A journal without a cell has a page all the same."""
    header = synthetic.run()
    checks = [
        Check(contract=synthetic.contracts()[0], variant="a", status="failed", reason="wrong")
    ]
    for i, found in enumerate(([], checks)):
        page = report([synthetic.write(tmp_path / str(i), header, found, with_table=False)]).html()
        assert "0 of 0" in page
        assert Outline(page).open == []


def test_one_cell(tmp_path):
    """A single cell has its pictures."""
    header = synthetic.run()
    problem = Problem(synthetic.contracts()[0], 8, 16, 64)
    checks = [
        Check(contract=problem.contract, variant=v.id, status="ok") for v in synthetic.VARIANTS
    ]
    page = report(
        [synthetic.write(tmp_path, header, [*checks, *synthetic.cell(problem, header)])]
    ).html()
    assert 'data-key="1:8:64:16"' in page


def test_two_runs(cpu, tmp_path):
    """Numbers of several runs say whose they are, and each run has its pictures."""
    header = synthetic.run()
    runs = [
        synthetic.write(tmp_path / n, synthetic.run(config=n), synthetic.records(header))
        for n in ("one", "two")
    ]
    page = report(runs).html()
    assert all(
        f"cells have a time of the variant chosen for them, {name}" in page
        for name in ("one", "two")
    )
    assert len(embedded(page)) == 4


def test_without_matplotlib(cpu, monkeypatch):
    """Where it is not installed, the message says what to do."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(errors.ToolMissing, match=r"pip install 'gdntune\[report\]'"):
        cpu.html()


def test_a_maps_colours_and_folds():
    """A ratio below 1 is red, the strongest at 1/1.5; a row measured at few T is folded; a hole
    stays a hole; text of others is text.
    """
    tiles = [maps.Tile(i, 0, f"{i}:a", 1 / 1.5, "0.67") for i in range(4)]
    tiles.append(maps.Tile(2, 1, "2:b", 1.0, "1.00", 'a "title"'))
    folded = maps.in_between([t.row for t in tiles])
    assert folded == {1}
    made = maps.map_table("x", "ratio", list("wxyz"), ["0", "<1>"], tiles, folded)
    assert made.count('class="below" style="--v:1.00"') == 4
    between = re.search(r"<tr class=between>.*?</tr>", made)[0]
    assert between.count("<td></td>") == 3 and "<th>&lt;1&gt;</th>" in between
    assert 'style="--v:0.00" title="a &quot;title&quot;">1.00</td>' in between
    assert "also 1 row in between" in maps.fold_box(folded) and maps.fold_box(frozenset()) == ""


def labels(svg):
    """The upright texts of a picture, each as (left, right, y, text) in its own pixels, a letter
    0.56 of the size wide.
    """
    found = []
    for style, x, y, text in re.findall(
        r'<text style="([^"]*)" x="([-\d.]+)" y="([-\d.]+)"[^>]*>([^<]*)</text>', svg
    ):
        width = 0.56 * float(re.search(r"font-size: ([\d.]+)px", style)[1]) * len(text)
        left = float(x) - width * (0.5 if "middle" in style else 1 if "end" in style else 0)
        found.append((left, left + width, float(y), text))
    return found


def test_labels_do_not_overprint():
    """Fault: where intervals were short or peers many, labels stood on one another."""
    bands = [
        figures.Band(0, w, w + 2 if w < 299 else None, "A", 0, "") for w in (1, *range(101, 300, 2))
    ]
    begins = re.findall(
        r'font-size: 9px[^>]* y="([\d.]+)">\d+<',
        figures.winner_map("x", ["T=1"], bands, {0: [100.0, 300.0]}, "work units"),
    )
    assert len(begins) > 2
    assert min(float(b) - float(a) for a, b in pairwise(begins)) >= 8.9
    lines = [figures.Line(f"peer {i}", (1.0, 2.0), (1.0, 2.0), i) for i in range(12)]
    heights = {
        text: y for *_, y, text in labels(figures.curves("x", {"T=1": lines}, "work units", "us"))
    }
    assert max(heights[f"peer {i}"] for i in range(12)) < heights["T=1"] - 10


def test_a_users_style_changes_nothing(cpu):
    """Pictures do not depend on a user's settings of matplotlib, and leave them as they are."""
    import matplotlib

    lines = {"T=1": [figures.Line("a", (1.0, 2.0), (1.0, 2.0))]}
    before = figures.curves("x", lines, "work units", "us")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path"}):
        assert figures.curves("x", lines, "work units", "us") == before
        assert matplotlib.rcParams["font.size"] == 30


def test_many_contracts_are_reached_from_a_table(tmp_path):
    """Where contracts are many, their numbers and names in the table lead to their sections, and
    the line of links is without them.
    """
    header = synthetic.run()
    contracts = [
        Contract(state_dtype=s, mode=m)
        for s in ("bf16", "fp16", "fp32")
        for m in ("update", "frozen")
    ]
    checks = [
        Check(contract=c, variant=v.id, status="ok") for c in contracts for v in synthetic.VARIANTS
    ]
    cells = [r for c in contracts for r in synthetic.cell(Problem(c, 8, 16, 64), header)]
    page = report([synthetic.write(tmp_path, header, [*checks, *cells], with_table=False)]).html()
    assert Outline(page).open == []
    titles = dict(re.findall(r'<section id="(s\d+)"><h2>(\d+)\. ', page))
    rows = re.findall(
        r"<td><a href=#(s\d+)>(\d+)</a></td><td><a href=#(s\d+)>gdn (\w+) (\w+)</a>", page
    )
    assert len(rows) == len(titles) == 6
    for anchor, number, again, state, mode in rows:
        assert titles[anchor] == number and again == anchor
        assert (
            f'<section id="{anchor}"><h2>{number}. gdn_decode, {state} state, bf16 input, mode {mode}'
            in page
        )
    nav = re.search(r"<nav>(.*?)</nav>", page)[1]
    assert "Contracts" in nav and "gdn_decode" not in nav


# -- in a browser


def opened(page, tmp_path):
    """(DOM after the scripts, what the console said, addresses that the page asked for) of a page
    in headless Chromium.
    """
    log = tmp_path / "net.json"
    command = [
        BROWSER, *(["--headless=new"] if "shell" not in BROWSER else []), "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--log-net-log={log}", "--net-log-capture-mode=Everything",
        "--window-size=1280,2000", "--virtual-time-budget=5000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = re.findall(r"CONSOLE[^\n]*", done.stderr)
    # The log may lack its last brackets, so it is read as text. What the browser asks for itself
    # has no page that began it.
    begun = re.findall(
        r'"initiator":"([^"]*)".*?"url":"((?:https?|wss?)://[^"]*)"',
        log.read_text(errors="replace"),
    )
    asked = {address for page, address in begun if page != "not an origin"}
    return done.stdout, console, asked


@in_a_browser
@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_opens_without_error_or_network(pages, name, tmp_path):
    """In Chromium the page's script draws the samples of a cell, the console stays empty, and
    nothing is asked of a network.
    """
    dom, console, asked = opened(pages / f"{name}.html", tmp_path)
    assert console == []
    assert asked == set()
    boxes = re.findall(r'<div class="samples">.*?</table>', dom, re.S)
    assert len(boxes) == len(embedded((pages / f"{name}.html").read_text(encoding="utf-8"))) == 2
    for box in boxes:
        assert (
            "chosen" in box
            and "verified" in box
            and box.count("<rect") >= len(re.findall("<tr", box)) > 3
        )


@in_a_browser
def test_every_cell_can_be_chosen(pages, tmp_path):
    """A click on any cell of a map draws its samples, with the medians of the frame; so does a
    choice by list.
    """
    text = (pages / "cpu.html").read_text(encoding="utf-8")
    probe = """<script>
    const cells = [...document.querySelectorAll("[data-key]")].filter((c) => c.classList.contains("pick"));
    let drawn = 0;
    for (const c of cells) {
      c.dispatchEvent(new MouseEvent("click"));
      const box = c.closest("section").querySelector(".samples");
      const [T, B, HV, H] = c.dataset.key.split(":");
      if (box.querySelector("output").textContent.startsWith(`T=${T}, B=${B}, HV=${HV}, H=${H};`)) drawn++;
    }
    const map = document.querySelector(".map");
    const at = map.querySelector("tr:not(.between) .pick"), to = at.parentElement.nextElementSibling.cells[at.cellIndex];
    at.click();
    at.focus();
    at.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
    if (document.activeElement !== to || !to.classList.contains("picked")) drawn = -2;
    const [tokens] = document.querySelectorAll(".samples select");
    tokens.value = "2";
    tokens.dispatchEvent(new Event("change"));
    const own = document.querySelector(".samples input");
    own.click();
    if (!document.querySelector(".plotted small").textContent.includes(" to ")) drawn = -1;
    own.click();
    document.body.dataset.drawn = `${drawn} of ${cells.length}, ${document.querySelector(".samples output").textContent.slice(0, 3)}`;
    </script>"""
    page = tmp_path / "probe.html"
    page.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    dom, console, _ = opened(page, tmp_path)
    assert console == []
    assert re.search(r'data-drawn="(\d+) of \1, T=2"', dom)


@in_a_browser
def test_the_browser_would_tell(pages, tmp_path):
    """Control: a picture from elsewhere is refused by the page's policy, and asked for without it;
    an exception is seen.
    """
    text = (pages / "cpu.html").read_text(encoding="utf-8")
    addition = '<img src="http://elsewhere.invalid/x.png"><script>missing()</script></body>'
    page = tmp_path / "control.html"
    page.write_text(text.replace("</body>", addition), encoding="utf-8")
    _, console, asked = opened(page, tmp_path)
    assert any("Content Security Policy" in line for line in console)
    assert any("missing is not defined" in line for line in console)
    assert asked == set()
    page.write_text(
        re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", addition), encoding="utf-8"
    )
    assert opened(page, tmp_path)[2] == {"http://elsewhere.invalid/x.png"}
