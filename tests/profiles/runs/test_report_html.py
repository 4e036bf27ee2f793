"""The HTML report, opened in a real browser: its plots are drawn and nothing is fetched."""

from __future__ import annotations

import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from graphengine.cli import main as cli
from timelines.browsers import find_chromium, run_chromium
from timelines.nsys_files import Export
from timelines.simulated_run import simulate, write_recording

pytest.importorskip("matplotlib", reason="plots need matplotlib")

from graphengine.profiles.report import make_document
from graphengine.profiles.runs.findings import judge_run
from graphengine.profiles.runs.plots import POINTS, distribution, over_steps, upper_envelope
from graphengine.profiles.runs.report_html import html_report
from graphengine.profiles.runs.run_file import Kernel
from graphengine.profiles.sources import read_run

PLOTS = {"over-steps", "distribution", "host-and-device", "buckets"}


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
    planted = {"stalls": {100: 3000.0}, "syncs": {50}, "larger": set(range(200, 220))}
    run = Export(folder / "run.sqlite", simulate(**planted), mode="node").path
    base = Export(folder / "base.sqlite", simulate(seed=1), mode="node").path
    html = folder / "report.html"
    options = ("--against", str(base), "--deadline-ms", "1", "--html", str(html))
    assert cli.main(["report", str(run), *options]) == 0
    return html


def test_the_page_names_no_address(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(?:https?:)?//[a-z]", text)
    assert not re.search(r"<(?:script|link|img|iframe|object)\b|@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_ids_are_unique_and_references_hold(page: Path) -> None:
    text = page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_a_browser_draws_the_plots(page: Path, chromium: str, tmp_path: Path) -> None:
    printed = run_chromium(chromium, page, tmp_path, "--dump-dom")
    drawn = re.findall(r'<figure data-plot="([^"]+)"><svg[^>]*viewBox', printed)
    assert set(drawn) == PLOTS | {"kernels"}
    assert printed.count("<path") > 50 and "ITL p99" in printed
    assert "deadline" in printed and "dot_kernel" in printed


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


def test_a_browser_paints_the_page(page: Path, chromium: str, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    run_chromium(chromium, page, tmp_path, "--window-size=1100,1600", f"--screenshot={picture}")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1100, 1600)
    # A blank page of this size is a few kilobytes.
    assert len(data) > 60_000


def test_a_recording_has_captures_and_no_kernels(tmp_path: Path) -> None:
    run = read_run(str(write_recording(tmp_path / "run.jsonl", simulate(60))))
    page = html_report(run, make_document(run), None)
    assert set(re.findall(r'data-plot="([^"]+)"', page)) == PLOTS | {"captures"}
    for drawn in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(drawn.replace("xlink:href", "href"))


def test_names_in_a_file_are_text_in_the_page(tmp_path: Path) -> None:
    path = tmp_path / "<script>alert(1)<" / "x.jsonl"
    path.parent.mkdir()
    evil = "decode/1/<script>alert(2)</script>"
    captures = [{"bucket": evil, "seconds": 1.0, "bytes": 7, "nodes": 3}]
    environment = {"device": "<img src=x onerror=alert(1)>"}
    path = write_recording(path, simulate(60), environment=environment, captures=captures)
    path.write_text(path.read_text().replace("decode/1/fast", evil))
    run = read_run(path)
    kernel = Kernel(
        name="<b onclick=x>$\\frac{a}{b}$ \ud800",
        bucket=evil,
        times_us=np.ones(9),
        replay=np.arange(9),
    )
    run = replace(run, kernels=(kernel,))
    page = html_report(run, make_document(run), None)
    assert "<img" not in page and "&lt;img src=x" in page
    assert "<script" not in page and "&lt;script&gt;alert(2)" in page
    # Dollar signs make no formula, and a lone surrogate does not prevent writing the file.
    assert "<b onclick" not in page and "&lt;b onclick=x&gt;$\\frac{a}{b}$ ?" in page
    page.encode()
    assert set(re.findall(r'data-plot="([^"]+)"', page)) == PLOTS | {"captures", "kernels"}


def test_a_browser_draws_what_captures_cost(tmp_path: Path, chromium: str) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(60))
    html = tmp_path / "x.html"
    assert cli.main(["report", str(path), "--html", str(html)]) == 0
    printed = run_chromium(chromium, html, tmp_path, "--dump-dom")
    drawn = re.findall(r'<figure data-plot="([^"]+)"><svg[^>]*viewBox', printed)
    assert set(drawn) == PLOTS | {"captures"} and "s to capture" in printed


def test_two_histograms_share_their_edges(tmp_path: Path) -> None:
    runs = [
        read_run(write_recording(tmp_path / f"{name}.jsonl", simulate(200, factor=factor)))
        for name, factor in (("a", 1.0), ("b", 2.0))
    ]
    left, _ = distribution(*runs).axes
    edges = [{round(bar.get_x(), 9) for bar in bars} for bars in left.containers]
    assert len(edges) == 2 and len(edges[0]) == 80 and edges[0] == edges[1]
    heights = sum(bar.get_height() for bars in left.containers for bar in bars)
    assert heights == sum(len(run.gaps) for run in runs)


def test_gaps_stand_at_their_steps(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(60, stalls={30: 3000.0}))
    text = path.read_text()
    for step in range(60):
        text = text.replace(f'"step": {step},', f'"step": {step + 1000} ,')
    path.write_text(text)
    run = read_run(path)
    found, judged, _ = judge_run(run)
    (axis,) = over_steps(run, found, judged).axes
    places = axis.lines[0].get_xdata()
    assert (places[0], places[-1]) == (1001, 1058) and axis.get_xlabel().startswith("step")
    (outlier,) = judged
    assert axis.collections[0].get_offsets()[0][0] == outlier.step > 1000


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = read_run(write_recording(tmp_path / "run.jsonl", simulate(60)))
    document = make_document(run)
    assert html_report(run, document, None) == html_report(run, document, None)


def test_long_lines_keep_their_peaks() -> None:
    values = np.ones(50_000)
    values[12_345] = 9.0
    places, shown = upper_envelope(values)
    assert len(shown) == POINTS and shown.max() == 9.0
    assert abs(places[shown.argmax()] - 12_345) < 50_000 / POINTS


def test_without_matplotlib_the_option_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(30))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["report", str(path), "--html", str(tmp_path / "x.html")]) == 2
    assert "need matplotlib: pip install '.[report]' in the checkout" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
    assert cli.main(["report", str(path)]) == 0
