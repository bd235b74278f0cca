# SPDX-License-Identifier: Apache-2.0
"""The table in the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from stratagem.comparison.report import show
from stratagem.comparison.results import Comparison, Contender, Deviation, Held, Reference, Sent

from .samples import REFERENCE, TRACEBACK, comparison, contender, good, troubled


def _shown(found: Comparison, width: int) -> str:
    stream = io.StringIO()
    show(found, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def _row(text: str, name: str) -> list[str]:
    """The words of the rows that begin with this name, in the tables above the legend."""
    table = text[: text.index("\nΔ:")]
    return [word for line in table.splitlines() if re.match(rf"{re.escape(name)} ", line) for word in line.split()[1:]]


def _sentences(text: str) -> str:
    return " ".join(text.split())


def test_at_120_columns_each_strategy_has_one_row_with_every_number() -> None:
    text = _shown(good(), 120)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 120
    for one in good().contenders:
        assert text.count(f"\n{one.name} ") + text.startswith(f"{one.name} ") == 1
    zero_1 = _row(text, "zero_1")
    assert zero_1[:5] == ["equal", "2.0e-7", "6.0e-7", "8.0e-7", "50"]
    assert re.fullmatch(r"\d{3}", zero_1[5])
    assert re.fullmatch(r"±\d+", zero_1[6])
    assert zero_1[7:] == ["0.91", "65.1", "1.00", "195", "1.00", "338", "4.2"]
    assert "Rounding alone carries one process as far as this: loss 3.1e-6, gradient norm 2.2e-5, " in text
    # What DeepSpeed sends has no formula here, and what is bit-equal says so with a bare zero.
    assert _row(text, "deepspeed_zero_1")[9] == "-"
    assert _row(text, "ring_ddp")[1:4] == ["0", "0", "0"]
    assert text.splitlines()[-1] == "All 8 strategies equal one process within 1e-05 over 50 steps."


def test_at_80_columns_the_same_numbers_stand_in_two_tables() -> None:
    wide, narrow = _shown(troubled(), 120), _shown(troubled(), 80)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 80
    for one in troubled().contenders:
        assert _row(narrow, one.name)[: len(_row(wide, one.name))] == _row(wide, one.name), one.name


def test_below_the_table_stands_where_and_why() -> None:
    text = _shown(troubled(), 120)
    said = _sentences(text)
    assert _row(text, "zero_2")[0] == "differs"
    assert "other data" in _sentences(" ".join(_row(text, "deepspeed_zero_1")))
    assert _row(text, "deepspeed_zero_3")[0] == "FAILED"
    assert (
        "zero_2 differs. It first left the reference at step 12, in the parameters "
        "(transformer.blocks.3.mlp.up.weight): found 12.4380021, expected 12.4391187."
    ) in said
    assert "deepspeed_zero_1 had other data. It first left the reference at step 0, in the samples" in said
    assert "Its ranks read 32 samples per step, the reference 16" in said
    assert "ValueError: expected <Tensor[16, 128]> & got [16, 64]" in said
    assert said.endswith(
        "5 of 8 strategies equal one process within 1e-05 over 50 steps: zero_2 differs; "
        "deepspeed_zero_1 had other data; deepspeed_zero_3 failed."
    )


def test_of_a_long_error_the_end_stays() -> None:
    long = "\n".join(
        ["RankError: rank 1 raised", *(f"  frame {number}" for number in range(100)), "ValueError: the cause"]
    )
    text = _shown(comparison(Contender("x", "", "failed", reasons=(long,))), 120)
    assert "RankError: rank 1 raised" in text
    assert "ValueError: the cause" in text
    assert "lines left out here" in text
    assert "frame 50" not in text
    assert "left out" not in _shown(comparison(Contender("x", "", "failed", reasons=(TRACEBACK,))), 120)


def test_text_from_outside_is_neither_markup_nor_an_order_to_the_terminal() -> None:
    """rich reads `[red]` as a colour and drops `[/x]` with an error; a terminal obeys what an error message carries."""
    name = "[red]a[/x]\x1b[2J"
    failed = Contender(name, "", "failed", reasons=("[bold]why[/bold]\x1b[31m\x07 red",))
    text = _shown(comparison(failed), 120)
    assert "[red]a[/x] " in text
    assert "[bold]why[/bold] red" in text
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("width", [120, 80])
def test_what_is_missing_is_a_dash_and_what_is_no_number_is_said(width: int) -> None:
    nothing = Contender("nothing", "", "equal")
    nan = replace(
        contender("nan"),
        loss=Deviation(float("nan"), float("nan")),
        parameters=Deviation(float("inf"), float("inf")),
        verdict="differs",
        step_s=(0.0123,),
        sent=(Sent("tp", 300.0, 300.0), Sent("pp", 1.0, None)),
        held=(Held("parameters", 0, 0.0),),
        peak_bytes=None,
    )
    text = _shown(comparison(nothing, nan), width)
    assert set(_row(text, "nothing")) == {"equal", "-"}
    words = _row(text, "nan")
    assert words[:4] == ["differs", "nan", "6.0e-7", "inf"]
    assert words[4:7] == ["50", "12.3", "1.03"]
    assert words[7:] == ["301", "-", "0", "1.00", "-", "4.2"]


def test_the_last_line_counts() -> None:
    def last(*verdicts: str) -> str:
        contenders = [replace(contender(f"s{number}"), verdict=verdict) for number, verdict in enumerate(verdicts)]
        return _sentences(_shown(comparison(*contenders, steps=1), 200).strip().splitlines()[-1])

    assert last("equal") == "The only strategy, s0, equals one process within 1e-05 over 1 step."
    assert last("failed") == "The only strategy does not equal one process within 1e-05 over 1 step: s0 failed."
    assert last("equal", "differs", "differs") == (
        "1 of 3 strategies equals one process within 1e-05 over 1 step: s1, s2 differ."
    )
    assert last("differs", "failed").startswith("None of 2 strategies equal")
    drifted = replace(contender("s0"), loss=Deviation(3e-5, 1e-4), strict_steps=19, widest=0.02)
    found = comparison(drifted, contender("s1"), reference=replace(REFERENCE, loose=("net.0.bias",)))
    said = _sentences(_shown(found, 200))
    reach = "within 1e-05 for the first 19 of 50 steps, then within what rounding alone does (up to 0.02)"
    assert said.endswith(f"s0: {reach} All 2 strategies equal one process {reach}.")
    assert "Left out of strict steps: net.0.bias, which rounding alone decides." in said
    assert _row(_shown(found, 200), "s0")[4] == "19"
    empty = Comparison((), 1, 0, "", 0.0, "", Reference((), ()), ())
    assert _shown(empty, 120).strip().endswith("No strategy was compared.")
