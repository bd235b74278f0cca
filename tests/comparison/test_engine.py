# SPDX-License-Identifier: Apache-2.0
"""Whole comparisons: right strategies are equal, planted faults are found where they are, who dies harms nobody."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything

from stratagem.comparison.engine import Options, compare
from stratagem.comparison.results import Comparison, Contender
from stratagem.errors import ConfigError
from tests.comparison.runs import Regression, candidate, dataset, die, fail, pair
from tests.contract.wrong import NormOfItsOwnPart, OneParameterForgotten, SameShareEverywhere, SumInsteadOfMean

STEPS = 8  # more than an epoch, which has 7, the last of them with one small micro-batch


def children() -> set[str]:
    """Processes of this one that still live, zombies among them."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


def busy() -> int:
    """Ticks of the processor that the ranks of all contenders have used: children of this process's children."""
    total = 0
    for child in children():
        for rank in Path(f"/proc/{child}/task/{child}/children").read_text().split():
            fields = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def by_name(comparison: Comparison) -> dict[str, Contender]:
    return {contender.name: contender for contender in comparison.contenders}


def test_right_strategies_equal_one_process_and_are_measured() -> None:
    """Shuffled data, accumulation, clipping, over the uneven end of an epoch, in float64."""
    before = children()
    said: dict[str, int] = {}

    def say(text: str) -> None:
        said[text] = busy()

    names = ["ring_ddp", "zero_3", "ddp"]
    options = Options(steps=STEPS, rounds=2, turn=3)
    found = compare([candidate(name) for name in names], options, config=["a.yaml"], say=say)

    assert found.passed, [(each.name, each.reasons) for each in found.contenders]
    assert (found.ranks, found.precision, found.tolerance, found.baseline) == (2, "64-true", 1e-10, "ddp")
    assert found.reference.global_batch == 16
    assert found.reference.twin_strict_steps == STEPS
    assert len(set(found.reference.losses)) == STEPS
    seed_everything(3, verbose=False)
    untrained, (rows, targets) = Regression().double(), dataset().tensors
    mean = float(torch.nn.functional.mse_loss(untrained.net(rows), targets).detach())
    assert 0.7 < found.reference.losses[0] / mean < 1.4  # of a step's 16 samples, not divided by the accumulation
    num_bytes = found.reference.num_parameters * 8
    assert num_bytes == (9 * 16 + 17 * 3) * 8
    for each in found.contenders:
        assert each.loss is not None
        assert each.loss.relative < 1e-12
        assert each.gradient_norm is not None
        assert each.gradient_norm.relative < 1e-12
        assert each.parameters is not None
        assert each.parameters.relative < 1e-11
        assert each.strict_steps == len(each.losses) == STEPS
        assert len(each.step_s) == 2 * 3
        assert min(each.step_s) > 0
        assert each.startup_s is not None
        assert each.startup_s > 0
        assert each.peak_bytes is not None
        assert each.peak_bytes > 0
        assert [place.data_rank for place in each.layout] == [0, 1]
        assert each.about == f"about {each.name}"
    ring, zero, ddp = found.contenders
    assert ddp.ratio == 1.0
    assert (ring.sent[0].axis, ddp.sent[0].axis, ddp.sent[0].source) == ("dp_replicate", "world", "kernel")
    for each in found.contenders[:2]:
        assert each.sent[0].formula is not None
        assert each.sent[0].num_bytes == pytest.approx(each.sent[0].formula, rel=0.2)  # small model: votes count
        assert {held.kind for held in each.held} == {"parameters", "gradients", "optimizer"}
    for each in found.contenders:
        assert [kind.num_bytes for kind in each.held] == pytest.approx([kind.formula for kind in each.held], rel=0.02)
    assert ddp.sent[0].formula == num_bytes
    assert 0 < ddp.sent[0].num_bytes - num_bytes < 1000  # votes
    held, shared = ({kind.kind: kind.num_bytes for kind in each.held} for each in (ring, zero))
    assert held["optimizer"] == held["gradients"] == num_bytes  # the momentum
    assert shared["optimizer"] < 0.6 * num_bytes
    assert all(place.parameters == found.reference.num_parameters for place in ring.layout)
    assert json.loads(found.to_json())["contenders"][1]["verdict"] == "equal"
    # While the reference ran, which takes a second or two, the six paused ranks used no processor to speak of.
    assert said["round 1 of 2 at full speed"] - said["one process: starts"] <= 0.1 * os.sysconf("SC_CLK_TCK")
    assert said["round 2 of 2 at full speed"] > said["round 1 of 2 at full speed"]
    assert children() == before


def test_faults_are_found_where_they_are_and_who_dies_harms_nobody() -> None:
    """The faults of `tests/contract/wrong.py`, other data, another global batch, and two deaths, beside one that is
    right."""
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    found = by_name(
        compare(
            [
                candidate("ring_ddp"),
                candidate("sum", SumInsteadOfMean),
                candidate("forgotten", OneParameterForgotten),
                candidate("own_norm", NormOfItsOwnPart),
                candidate("same_share", SameShareEverywhere),
                candidate("other_rows", "ring_ddp", data=6),
                candidate("other_batch", "ring_ddp", per_rank=2),
                candidate("raises", "zero_1", act=fail, step=5),
                candidate("killed", "ddp", act=die, step=7),
            ],
            Options(steps=5, rounds=0),
        )
    )
    assert found["ring_ddp"].verdict == "equal", found["ring_ddp"].reasons
    assert {name: each.verdict for name, each in found.items() if name != "ring_ddp"} == {
        "sum": "differs",
        "forgotten": "differs",
        "own_norm": "differs",
        "same_share": "other data",
        "other_rows": "other data",
        "other_batch": "other data",
        "raises": "failed",
        "killed": "failed",
    }
    where = {name: each.departure for name, each in found.items()}
    summed, forgotten, own = where["sum"], where["forgotten"], where["own_norm"]
    assert summed is not None
    assert (summed.step, summed.quantity) == (0, "gradient norm")
    assert "2 times the reference's on 2 ranks" in " ".join(found["sum"].reasons)
    assert forgotten is not None
    assert (forgotten.step, forgotten.quantity) == (0, "gradient norm")
    assert own is not None
    assert (own.step, own.quantity) == (0, "parameters")
    assert own.parameter.startswith("net.")
    assert own.parameter in " ".join(found["own_norm"].reasons)
    assert "clipping" in " ".join(found["own_norm"].reasons)
    share, batch = where["same_share"], where["other_batch"]
    assert share is not None
    assert (share.step, share.quantity) == (0, "samples")
    assert batch is not None
    assert batch.quantity == "samples"
    assert "As many samples, but others" in " ".join(found["other_rows"].reasons)
    assert "8 samples" in " ".join(found["other_batch"].reasons)
    assert "16" in " ".join(found["other_batch"].reasons)
    raises, killed = found["raises"], found["killed"]
    assert "rank 1 of 2" in raises.reasons[0]
    assert "the third batch is cursed" in raises.reasons[0]
    assert "rank 1 of 2" in killed.reasons[0]
    assert "SIGKILL" in killed.reasons[0]
    assert (len(raises.losses), len(killed.losses)) == (2, 3)
    assert raises.departure is None
    assert raises.strict_steps == 2
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_a_comparison_leaves_no_process(signum: signal.Signals) -> None:
    """Ctrl-C, SIGTERM, and a parent that is killed outright, in the middle of a turn."""
    code = (
        "from stratagem.comparison.engine import Options, compare\n"
        "from tests.comparison.runs import candidate\n"
        "say = lambda text: print(text, flush=True)\n"
        "compare([candidate('ring_ddp'), candidate('ddp')], Options(steps=10**6), say=say)\n"
    )
    mark = f"{MARK}={os.getpid()}-{signum}"
    environment = {**os.environ, **dict([mark.split("=")])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "steps" in line:
                break
        assert len(marked(mark)) == 7  # it, two contenders, four ranks
        process.send_signal(signum)
        process.stdout.close()
        process.wait(60)
    end = time.monotonic() + 10
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert not marked(mark)


MARK = "STRATAGEM_TEST_COMPARISON"


def marked(mark: str) -> list[str]:
    """Living processes that were started with `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and "(zombie)" not in (folder / "status").read_text():
                found.append(folder.name)
    return found


@pytest.mark.slow
def test_one_after_the_other_and_what_depends_on_the_batch_is_named() -> None:
    """`sequential`, with dropout and with a batch norm that sees only its rank's samples."""
    options = Options(steps=3, rounds=1, turn=1, sequential=True)
    (dropout,) = compare([candidate("ring_ddp", dropout=0.5)], options).contenders
    assert (dropout.verdict, len(dropout.step_s)) == ("differs", 1)
    assert "random numbers" in " ".join(dropout.reasons)
    (norm,) = compare([candidate("ddp", batch_norm=True)], options).contenders
    assert norm.verdict == "differs"
    assert "net.1 normalises" in " ".join(norm.reasons)


def test_several_optimizers_that_step_by_themselves_are_compared_by_batch() -> None:
    """On the terms of `check`: SGD with the rates that are meant, though the schedules begin at 0."""
    options = Options(steps=6, rounds=0, precision="64-true", optimizer="sgd")
    (found,) = compare([pair("zero_2")], options).contenders
    assert (found.verdict, len(found.losses), found.strict_steps) == ("equal", 6, 6), found.reasons
    assert len(set(found.losses)) == 6


def test_what_cannot_be_compared_is_said_before_anything_starts() -> None:
    for candidates, options in (
        ([], Options()),
        ([candidate("ddp"), candidate("ddp")], Options()),
        ([candidate("ddp")], Options(baseline="zero_1")),
    ):
        with pytest.raises(ConfigError, match="at least one strategy, each once"):
            compare(candidates, options)
    with pytest.raises(ConfigError, match="--steps: got 0"):
        Options(steps=0)
