"""The HTML report: what it says, and how a real browser shows it on a phone and on a desktop."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from html import unescape
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphengine.cli import main as cli
from graphengine.profiles.report import make_document
from graphengine.profiles.runs.causes import REMEDIES
from graphengine.profiles.runs.findings import HOST_STAGES, judge_run
from graphengine.profiles.runs.plots import POINTS, distribution, over_steps, upper_envelope
from graphengine.profiles.runs.report_html import MARKS, html_report, policy_hash
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.runs.run_file import Kernel
from graphengine.profiles.sources import read_run
from timelines import browsers
from timelines.browsers import find_chromium, measure, run_chromium
from timelines.nsys_files import Export
from timelines.simulated_run import simulate, write_recording

PLOTS = {"over-steps", "distribution", "host-and-device", "buckets"}
PHONE, DESKTOP = (390, 844), (1280, 900)
PLANTED: dict[str, Any] = {
    "stalls": {100: 3000.0}, "syncs": {50}, "larger": set(range(200, 220)), "prefills": {60},
    "slower": {70: 400.0}, "planning": {80: 900.0},
}  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> str:
    found, reason = find_chromium()
    if found is None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with kernels, compared with another run."""
    folder = tmp_path_factory.mktemp("report")
    run = Export(folder / "run.sqlite", simulate(**PLANTED), mode="node").path
    base = Export(folder / "base.sqlite", simulate(seed=1), mode="node").path
    html = folder / "report.html"
    options = ("--against", str(base), "--deadline-ms", "1", "--html", str(html))
    assert cli.main(["report", str(run), *options]) == 0
    return html


# What the file holds.


def test_the_page_names_no_address(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(?:https?:)?//[a-z]", text)
    assert not re.search(
        r"<(?:link|img|iframe|object)\b|<script[^>]*src|@import|url\((?![#`])", text
    )


def test_the_policy_allows_the_one_script_and_nothing_else(page: Path) -> None:
    text = page.read_text()
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, flags=re.DOTALL)
    assert json.loads(data) and text.count("<script") == 2
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{policy_hash(script)}'" in text
    )


def test_ids_are_unique_and_references_hold(page: Path) -> None:
    text = page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_comparison_is_a_table(page: Path) -> None:
    text = page.read_text()
    section = text[text.index("<h2>Compared with base.sqlite</h2>") :]
    section = section[: section.index("<figure")]
    heads = re.findall(r"<th\b[^>]*>(.*?)</th>", section)
    assert heads[:6] == ["ITL", "before, ms", "after, ms", "change", "interval", "verdict"]
    assert re.search(
        r"p99</td><td[^>]*>0\.\d{3}</td><td[^>]*>\d\.\d{3}</td>.*?>slower</td>", section
    )
    assert "decode/1 dot_kernel</td>" in section and "no change shown</td>" in section


def test_each_cause_has_its_remedy_beside_it(page: Path) -> None:
    section = page.read_text().partition("<h2>What stands out</h2>")[2].partition("</ul>")[0]
    lines = re.findall(
        r'<span class="cause">(\w+)</span>.*?<div class="remedy">What to do: (.*?)\.</div></li>',
        section,
    )
    assert {cause for cause, _ in lines} >= {"outside", "sync", "prefill", "device", "plan"}
    for cause, remedy in lines:
        assert unescape(re.sub(r"</?code>", "`", remedy)) == REMEDIES[cause]


def test_words_that_need_it_are_explained_where_they_stand(tmp_path: Path) -> None:
    run = read_run(str(write_recording(tmp_path / "run.jsonl", simulate(60))))
    document = make_document(run)
    page, text = html_report(run, document, None), describe_report(document)
    for word in ("n", "separate", "lookahead", "numerics_id", "max_batch"):
        meaning = re.findall(rf'<abbr title="([^"]+)">{word}</abbr>', page)[0]
        # A phone has no pointer to rest on a word.
        assert f"{word}: {meaning}" in text and f"{word}: {meaning}" in re.sub(
            "<abbr.*?>", "", page
        )


def test_one_thing_is_not_counted_as_several(tmp_path: Path) -> None:
    found = simulate(60, larger={30}, prefills={20}, unseen={40: 900.0}, away={40: 900.0})
    run = read_run(str(write_recording(tmp_path / "run.jsonl", found)))
    document = make_document(run, deadline_ms=1.0)
    page, text = html_report(run, document, None), describe_report(document)
    wrong = re.compile(
        r"(?<![\d.,])1 (?:replays|steps|gaps|rows|times|tokens|prompt tokens|graphs|live ones)\b"
    )
    for shown in (page, text):
        assert not wrong.findall(shown)
        assert "1 replay of 32 rows" in shown and "interrupted 1 time" in shown


def test_a_recording_has_captures_and_no_kernels(tmp_path: Path) -> None:
    run = read_run(str(write_recording(tmp_path / "run.jsonl", simulate(60))))
    page = html_report(run, make_document(run), None)
    assert set(re.findall(r'data-plot="([^"]+)"', page)) == PLOTS | {"captures"}
    assert "50.0 ms, 1.0 MiB" in page and "Compared" not in page


def hostile_page(folder: Path) -> str:
    """The page of a run whose names are code, and long."""
    path = folder / "<script>window.hostile=1<" / "script>x.jsonl"
    path.parent.mkdir()
    evil = "decode/1/</script><script>window.hostile=2</script>"
    captures = [{"bucket": evil, "seconds": 1.0, "bytes": 7, "nodes": 3}]
    environment = {"device": "<img src=x onerror=window.hostile=3>"}
    path = write_recording(
        path, simulate(60, slower={30: 400.0}), environment=environment, captures=captures
    )
    path.write_text(path.read_text().replace("decode/1/fast", evil))
    run = read_run(path)
    name = "<b onclick=x>$title ${a} \ud800" + "elementwise_kernel<4, std::array" * 9
    kernel = Kernel(name=name, bucket=evil, times_us=np.ones(9), replay=np.arange(9))
    run = replace(run, kernels=(kernel,))
    return html_report(run, make_document(run), None)


def test_names_in_a_file_are_text_in_the_page(tmp_path: Path) -> None:
    page = hostile_page(tmp_path)
    assert "<img" not in page and "&lt;img src=x" in page
    assert page.count("<script") == 2 and "&lt;/script&gt;&lt;script&gt;window.hostile=2" in page
    # The template fills in nothing, and a lone surrogate does not prevent writing the file.
    assert "<b onclick" not in page and "&lt;b onclick=x&gt;$title ${a} ?" in page
    page.encode()
    assert set(re.findall(r'data-plot="([^"]+)"', page)) == PLOTS | {"captures", "kernels"}


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = read_run(write_recording(tmp_path / "run.jsonl", simulate(60)))
    document = make_document(run)
    assert html_report(run, document, None) == html_report(run, document, None)


# The data of the charts.


def test_two_histograms_share_their_edges(tmp_path: Path) -> None:
    runs = [
        read_run(write_recording(tmp_path / f"{name}.jsonl", simulate(200, factor=factor)))
        for name, factor in (("a", 1.0), ("b", 2.0))
    ]
    histogram, percentiles = distribution(*runs).charts
    one, other = histogram["bars"]
    assert one["edges"] == other["edges"] and len(one["edges"]) == 81
    assert sum(one["counts"]) == len(runs[0].gaps) and sum(other["counts"]) == len(runs[1].gaps)
    assert (one["name"], other["name"]) == ("this run", "before")
    assert [line["name"] for line in percentiles["lines"]] == ["before", "this run"]
    assert [name for _, name in percentiles["x"]["ticks"]] == ["p50", "p90", "p99"]


def test_gaps_stand_at_their_steps(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(60, stalls={30: 3000.0}))
    text = path.read_text()
    for step in range(60):
        text = text.replace(f'"step": {step},', f'"step": {step + 1000} ,')
    path.write_text(text)
    run = read_run(path)
    found, judged, _ = judge_run(run)
    (chart,) = over_steps(run, found, judged).charts
    places = chart["lines"][0]["x"]
    assert (places[0], places[-1]) == (1001, 1058) and chart["x"]["label"] == "step"
    (outlier,), (points,) = judged, chart["points"]
    assert points["x"] == [outlier.step] and outlier.step > 1000
    assert points["y"] == [pytest.approx(1e3 * outlier.milliseconds, abs=0.01)]


def test_long_lines_keep_their_peaks() -> None:
    values = np.ones(100_000)
    values[12_345] = 9.0
    places, shown = upper_envelope(values)
    assert len(shown) == POINTS and shown.max() == 9.0
    assert abs(places[shown.argmax()] - 12_345) < 100_000 / POINTS


# Colours and marks.

CSS = files("graphengine.profiles.runs").joinpath("page/page.css").read_text()
SYMBOLS = files("graphengine.profiles.runs").joinpath("page/page.html").read_text()


def palette(dark: bool) -> dict[str, tuple[float, float, float]]:
    """Colours by name, red, green and blue from 0 to 1."""
    block = re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)[dark]
    found = re.findall(r"--([a-z]+): #([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2});", block)
    return {name: tuple(int(part, 16) / 255 for part in parts) for name, *parts in found}  # type: ignore[misc]


def luminance(colour: tuple[float, float, float]) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_stand_out_from_the_page(dark: bool) -> None:
    colours = palette(dark)
    for name, colour in colours.items():
        if name not in ("paper", "shade", "edge"):
            least = 4.5 if name in ("ink", "muted") else 3.0
            assert contrast(colour, colours["paper"]) >= least, name
            assert contrast(colour, colours["shade"]) >= least, name


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_each_cause_has_its_own_colour_and_shape(dark: bool) -> None:
    colours = palette(dark)
    assert set(HOST_STAGES) < set(MARKS) and set(MARKS) < set(colours)
    assert all(f".c-{cause} {{ color: var(--{cause}); }}" in CSS for cause in MARKS)
    for one, other in combinations(MARKS, 2):
        apart = [abs(a - b) for a, b in zip(colours[one], colours[other], strict=True)]
        assert max(apart) > 0.1, (one, other)
    # Who cannot tell the colours apart sees the shapes.
    shapes = re.findall(r'<symbol id="mark-([a-z]+)"[^>]*>(.*?)</symbol>', SYMBOLS)
    assert {name for name, _ in shapes} == set(MARKS)
    assert len({shape for _, shape in shapes}) == len(MARKS)


def test_lines_of_a_chart_differ_in_style_too(page: Path) -> None:
    data = re.findall(r'id="charts">(.*?)</script>', page.read_text())[0]
    for chart in json.loads(data):
        styles = [line["style"] for line in [*chart["lines"], *chart["limits"], *chart["bars"]]]
        assert len(styles) == len(set(styles)), chart["name"]


# In a browser.

MEASURE = Path(browsers.__file__).with_name("report_page.js").read_text()


@pytest.mark.parametrize(
    ("size", "dark"), [(PHONE, True), (DESKTOP, False)], ids=["phone, dark", "desktop, light"]
)
def test_a_browser_shows_the_page(
    size: tuple[int, int], dark: bool, page: Path, chromium: str, tmp_path: Path
) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found = measure(chromium, page.read_text(), tmp_path, MEASURE, size, scheme)
    assert found["width"] == found["scroll"] == size[0]
    assert found["overlaps"] == []
    # Every cell is in sight; on a phone each shows its heading.
    assert found["hidden"] == 0
    shown = {'"interval"', '"verdict"', '"kernel"'} & set(found["heads"])
    assert len(shown) == (3 if size == PHONE else 0)
    assert found["paper"] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert len(found["plots"]) == 4 and all(drawn >= 1 for drawn in found["drawn"])
    assert all(wide >= 300 and high == 250 for wide, high in found["plots"])
    assert len(found["bars"]) > 6 and all(wide >= 1 and high > 5 for wide, high in found["bars"])


def test_a_chart_zooms(page: Path, chromium: str, tmp_path: Path) -> None:
    found = measure(chromium, page.read_text(), tmp_path, MEASURE, DESKTOP)
    whole, dragged = found["whole"], found["dragged"]
    assert {"100", "200", "300", "longest gap of the step (ms)"} <= set(whole["labels"])
    # A tenth of the chart, about steps 237 to 278, where no gap stands out and times are in us.
    assert "250" in dragged["labels"] and "300" not in dragged["labels"]
    assert dragged["marks"] == 0 < whole["marks"]
    assert "longest gap of the step (us)" not in whole["labels"]
    assert re.fullmatch(r"step 2\d\d, gap 30\d\.\d+ us", found["told"])
    assert found["all"] == whole
    assert len({json.dumps(found[name]) for name in ("whole", "nearer", "right")}) == 3
    assert found["farther"]["labels"] != found["right"]["labels"]


def test_code_in_names_does_not_run(chromium: str, tmp_path: Path) -> None:
    page = hostile_page(tmp_path)
    found = measure(chromium, page, tmp_path, MEASURE, PHONE)
    assert found["hostile"] is None
    # Long names leave the page as wide as it is.
    assert found["scroll"] == PHONE[0] and found["overlaps"] == []
    script = "window.hostile = 1;\n"
    assert measure(chromium, page, tmp_path, script + MEASURE, PHONE)["hostile"] == 1


def requests_of(page: Path, chromium: str, folder: Path) -> list[str]:
    """Addresses requested by the page; the browser's own requests have no origin."""
    log = folder / "net.json"
    run_chromium(chromium, page, folder, f"--log-net-log={log}", "--dump-dom")
    parameters = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    return [
        found["url"]
        for found in parameters
        if found.get("initiator", "not an origin") != "not an origin"
        and not str(found.get("url", "file:")).startswith("file:")
    ]


def test_a_browser_fetches_nothing_for_the_page(page: Path, chromium: str, tmp_path: Path) -> None:
    assert requests_of(page, chromium, tmp_path) == []
    # The check sees a request if there is one, as long as the page allows it.
    address = "http://example.invalid/x.png"
    other = tmp_path / "other.html"
    other.write_text(f'<!DOCTYPE html><img src="{address}">')
    assert set(requests_of(other, chromium, tmp_path)) == {address}
    policy = re.findall(r"<meta http-equiv.*?>", page.read_text())[0]
    other.write_text(f'<!DOCTYPE html><head>{policy}</head><img src="{address}">')
    assert requests_of(other, chromium, tmp_path) == []


def test_a_browser_paints_the_page_as_it_is(page: Path, chromium: str, tmp_path: Path) -> None:
    """With its own policy: the script that it names is run, and draws."""
    picture = tmp_path / "page.png"
    run_chromium(chromium, page, tmp_path, "--window-size=1100,1600", f"--screenshot={picture}")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1100, 1600)
    # A blank page of this size is a few kilobytes.
    assert len(data) > 60_000
    printed = run_chromium(chromium, page, tmp_path, "--virtual-time-budget=500", "--dump-dom")
    assert printed.count('class="trace') > 10 and "deadline</li>" in printed
