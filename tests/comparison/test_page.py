# SPDX-License-Identifier: Apache-2.0
"""The HTML page: what is written, and what a browser makes of it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from stratagem.comparison.judge import HEADROOM
from stratagem.comparison.page_words import verdict
from stratagem.comparison.report import write_page
from stratagem.comparison.results import Comparison, Contender, Departure, Deviation, Held, Place, Reference, Sent

from .chromium import Page, browser, executable
from .samples import NUM_PARAMETERS, REFERENCE, STEPS, TRACEBACK, comparison, contender, diverging, good, troubled

EVIL = "<img src=x onerror=alert(1)></script><b>&"
FIGURES = ("losses", "differences", "time", "memory", "wire")
SECTIONS = ("summary", *FIGURES, "ranks", "findings")


def _twelve() -> Comparison:
    """Twelve strategies with all that may be missing, be no number or be long."""
    mesh = tuple(
        Place(rank, {"pp": rank // 4, "dp_shard": rank // 2 % 2, "tp": rank % 2}, rank // 2 % 2, NUM_PARAMETERS // 8)
        for rank in range(8)
    )
    exploding = replace(
        contender("ddp"),
        name="tensor_parallel_with_a_rather_long_name_that_somebody_chose",
        verdict="differs",
        losses=(*REFERENCE.losses[:20], 1e9, inf, *(nan,) * (STEPS - 22)),
        gradient_norms=(*REFERENCE.gradient_norms[:20], *(nan,) * 20, *(None,) * 10),
        loss=Deviation(nan, nan, "step 21"),
        departure=Departure(20, "loss", 1e9, 2.9),
        sent=(Sent("pp", 1e6, 1e6), Sent("dp_shard", 4e7, 4.2e7), Sent("tp", 2e7)),
        held=(Held("parameters", 10**7, 1e7), Held("scratch", 10**6)),
        layout=mesh,
    )
    evil = replace(
        diverging(EVIL), about=EVIL, departure=Departure(3, "parameters", EVIL, EVIL, EVIL), reasons=(EVIL, TRACEBACK)
    )
    bare = [Contender("nothing_known", "", "equal"), Contender("never_started", "", "failed", reasons=("gone",))]
    usual = (
        "ddp",
        "ring_ddp",
        "zero_1",
        "zero_2",
        "zero_3",
        "deepspeed_zero_1",
        "deepspeed_zero_2",
        "deepspeed_zero_3",
    )
    found = comparison(exploding, evil, *bare, *(contender(name) for name in usual))
    return replace(found, config=(EVIL,), machine={EVIL: EVIL}, created=EVIL, baseline=EVIL, precision=EVIL)


def _one_step() -> Comparison:
    def first(name: str) -> Contender:
        one = contender(name)
        return replace(one, losses=one.losses[:1], gradient_norms=one.gradient_norms[:1], step_s=one.step_s[:1])

    reference = replace(REFERENCE, losses=REFERENCE.losses[:1], gradient_norms=REFERENCE.gradient_norms[:1])
    return comparison(*map(first, ("ddp", "zero_1", "zero_3")), reference=reference, steps=1)


TROUBLED = "one diverges, one on other data, one failed"
CASES = {
    "eight equal": good(),
    TROUBLED: troubled(),
    "twelve": _twelve(),
    "one": comparison(contender("ddp")),
    "one step": _one_step(),
    "none": Comparison((), 1, 0, "", 0.0, "", Reference((), ()), ()),
}


@dataclass
class _Text(HTMLParser):
    """What a reader gets of a page: text by section, the elements, the scripts."""

    sections: dict[str, str] = field(default_factory=dict)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    styles: str = ""
    section: str = ""
    _inside: str = ""
    _script: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in {"section", "header"}:
            self.section = attributes.get("id") or tag
        elif tag in {"script", "style"}:
            self._inside, self._script = tag, attributes.get("id") or "code"

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif self._inside == "style":
            self.styles += data
        else:
            self.sections[self.section] = self.sections.get(self.section, "") + data


def _write(found: Comparison, folder: Path) -> Path:
    path = folder / "new" / "page.html"
    write_page(found, path)
    return path


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _Text]:
    """The page of a case as a reader gets it."""
    return functools.cache(lambda case: _read(CASES[case], tmp_path_factory.mktemp("page")))


def _read(found: Comparison, folder: Path) -> _Text:
    written = _write(found, folder).read_text(encoding="utf-8")
    # plotly's script is 5 MB of text in which nothing can be an element; that is looked for without a parser.
    before, script, after = written.partition(get_plotlyjs())
    assert script
    assert "</script" not in script
    assert before.endswith("<script>")
    assert after.startswith("</script>")
    text = _Text()
    text.feed(before + after)
    return text


def _words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("case", CASES)
def test_the_page_asks_for_nothing_and_forbids_itself_to(case: str, read: Callable[[str], _Text]) -> None:
    page = read(case)
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "a", "video", "audio"}, (
            attributes
        )
        assert not {"src", "href", "srcset", "action", "data", "poster"} & attributes.keys(), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert not re.search(r"url\(|@import", page.styles)
    policies = [found["content"] for tag, found in page.elements if tag == "meta" and "http-equiv" in found]
    assert [policy.split(";")[0] for policy in policies if policy] == ["default-src 'none'"]


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_is_in_every_section(case: str, read: Callable[[str], _Text]) -> None:
    found, page = CASES[case], read(case)
    assert _words(verdict(found)) in _words(page.sections["header"])
    assert page.sections.keys() >= set(SECTIONS)
    for section in SECTIONS:
        figure = json.loads(page.scripts.get(f"figure-{section}", "{}"))
        traced = {trace["meta"] for trace in figure.get("data", []) if "meta" in trace}
        for index, one in enumerate(found.contenders):
            assert index in traced or one.name in _words(page.sections[section]), (section, one.name)


def test_text_from_outside_stays_text(read: Callable[[str], _Text]) -> None:
    """In HTML by entities, in the figures twice: plotly reads tags in every label."""
    page = read("twelve")
    assert "img" not in {tag for tag, _ in page.elements}
    for section in ("header", "summary", "ranks", "findings"):
        assert EVIL in page.sections[section], section
    assert TRACEBACK in page.sections["findings"]
    for name in FIGURES:
        written = page.scripts[f"figure-{name}"]
        assert "<" not in written
        assert "onerror" in written, name
        for text in _strings(json.loads(written)):
            assert not re.search(r"<(?!/?(b|span|extra)\b|br>)", text), (name, text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def test_the_figures_hold_what_was_found(read: Callable[[str], _Text]) -> None:
    found, page = troubled(), read(TROUBLED)
    figures = {name: json.loads(page.scripts[f"figure-{name}"]) for name in FIGURES}
    colours: dict[int, set[str]] = {index: set() for index in range(len(found.contenders))}
    for name in ("losses", "differences"):
        for trace in figures[name]["data"]:
            if "meta" in trace and "line" in trace:
                colours[trace["meta"]].add(trace["line"]["color"])
    assert all(len(colour) == 1 for colour in colours.values()), colours
    assert len(set.union(*colours.values())) == len(found.contenders)

    losses = {
        trace["meta"]: trace for trace in figures["losses"]["data"] if "meta" in trace and "lines" in trace["mode"]
    }
    strands = [losses[index]["line"]["dash"] for index in (0, 1, 2, 3, 4, 5)]  # zero_2 is off by less than one can see
    assert len(set(strands)) == len(strands)
    assert losses[6]["line"]["dash"] == losses[7]["line"]["dash"] == "solid"

    zero_2 = [trace for trace in figures["differences"]["data"] if trace.get("meta") == 5]
    said = [text for text in zero_2[0]["customdata"] if text]
    assert said[:13] == ["exact"] * 13
    assert "exact" not in said[13:]
    assert (
        min(height for height in zero_2[0]["y"] if height is not None)
        > figures["differences"]["layout"]["yaxis"]["range"][0]
    )

    # What is allowed: the tolerance, and a multiple of the twin's drift once that is more.
    allowed = next(trace for trace in figures["differences"]["data"] if trace["name"] == "allowed")["y"]
    assert allowed[0] == pytest.approx(-5)
    assert allowed == sorted(allowed)
    drift = max(abs(a - b) / b for a, b in zip(REFERENCE.twin_losses, REFERENCE.losses, strict=True))
    assert 10 ** allowed[-1] == pytest.approx(HEADROOM * drift)
    assert "rounding alone" in page.sections["summary"]

    zero_3 = next(trace for trace in figures["memory"]["data"] if trace.get("meta") == 3)
    whole = 4 * NUM_PARAMETERS / 2**20
    assert zero_3["x"] == pytest.approx([whole / 2, whole / 2, whole])
    assert zero_3["base"] == pytest.approx([0, whole / 2, whole])
    ticks = next(trace for trace in figures["memory"]["data"] if trace["name"] == "formula")
    assert [x for x, y in zip(ticks["x"], ticks["y"], strict=True) if y == 3] == pytest.approx(
        [whole / 2, whole, 2 * whole]
    )
    assert "50 %" in page.sections["ranks"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = executable()
    if path is None:
        pytest.skip("no Chromium or Chrome on this machine to look at the page with")
    with browser(path, tmp_path_factory.mktemp("profile")) as page:
        yield page


_DRAWN = """Object.fromEntries([...document.querySelectorAll(".figure")].map((figure) => {
  const drawn = figure.calcdata.filter(([first, ...more]) => first.trace.visible === true && "meta" in first.trace
    && [first, ...more].some((point) => point.x !== undefined || point.p !== undefined));
  return [figure.dataset.figure, [...new Set(drawn.map(([first]) => first.trace.meta))]];
}))"""
_MARKS = """Object.fromEntries([...document.querySelectorAll(".figure")].map((figure) => [figure.dataset.figure,
  figure.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length]))"""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_browser_without_network_draws_every_strategy_and_complains_of_nothing(
    case: str, tab: Page, tmp_path: Path
) -> None:
    found = CASES[case]
    tab.complaints.clear()
    tab.requests.clear()
    path = _write(found, tmp_path)
    tab.open(path, width=900)
    everyone = range(len(found.contenders))
    known = {
        "losses": [index for index in everyone if found.contenders[index].losses],
        "differences": [index for index in everyone if found.contenders[index].losses],
        "time": [index for index in everyone if found.contenders[index].step_s],
        "memory": [index for index in everyone if found.contenders[index].held or found.contenders[index].peak_bytes],
        "wire": [index for index in everyone if found.contenders[index].sent],
    }
    drawn = tab.evaluate(_DRAWN)
    assert {name: sorted(indices) for name, indices in drawn.items()} == known
    marks = tab.evaluate(_MARKS)
    assert all(marks[name] >= len(known[name]) for name in FIGURES), marks
    assert verdict(found) in tab.evaluate("document.querySelector('h1').textContent")
    for width in (900, 1600):
        tab.resize(width)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.requests == [path.as_uri()]
    assert tab.complaints == []

    # One click hides a strategy everywhere, another one brings it back.
    for hidden in [{0}, set()] if found.contenders else []:
        tab.evaluate("document.querySelector('nav [data-strategy=\"0\"]').click()")
        expected = {name: [index for index in indices if index not in hidden] for name, indices in known.items()}
        assert {name: sorted(indices) for name, indices in tab.evaluate(_DRAWN).items()} == expected
    assert tab.complaints == []
