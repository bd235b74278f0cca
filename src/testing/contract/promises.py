# SPDX-License-Identifier: Apache-2.0
"""Item 5 of the contract: what Lightning promises to a user holds under the strategy.

Where one process can tell what is right, it does: the same body runs on one rank under Lightning's single-device
strategy.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.testing.contract import stages
from stratagem.testing.contract.base import ContractBase, on_ranks, unless_refused
from stratagem.testing.contract.cases import CASES
from stratagem.testing.contract.narrator import Narrator
from stratagem.testing.contract.parity import assert_replicas, assert_same_training, close, close_states, mean_losses
from stratagem.testing.contract.runs import Gangs, Run, reference, train
from stratagem.testing.contract.subject import Precision, Subject

_LOGGED = 1e-6
"""Lightning keeps what is logged in float32, whatever the precision."""

_LOOSE: dict[Precision, float] = {"32-true": 1e-4, "bf16-mixed": 3e-2, "bf16-true": 1e-1}
"""How far a loss may be from one process that computes in the same precision, which rounds in another order."""


class PromisesContract(ContractBase):
    """Stages, logs, metrics, checkpoints, early stopping, precision, hooks, skipped steps."""

    @on_ranks(1, 2, 3)
    def test_stages_logs_and_metrics(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """fit, validate, test, predict, and fit again, in one process: every logged number is that of one process."""
        even = subject.uneven_batches is not True
        told = _run(gangs, num_ranks, stages.tell, {"subject": subject, "even": even})
        (one,) = _run(gangs, 1, stages.tell, {"subject": None, "even": even}, group=False)
        for rank, story in enumerate(told):
            for moment, metrics in one.metrics.items():
                expected = {name: value for name, value in metrics.items() if not name.startswith("local")}
                found = {name: story.metrics[moment].get(name) for name in expected}
                for name, value in expected.items():
                    # A step's value is logged as the plain mean over ranks: that of one process in even batches only.
                    if even or not name.endswith("_step"):
                        close([found[name]], [value], _LOGGED, f"{moment}: {name} on rank {rank}")
                assert set(story.metrics[moment]) == set(metrics), f"{moment}: other names on rank {rank}"
        if num_ranks > 1:
            local = {story.metrics["fit"]["local_epoch"] for story in told}
            assert len(local) == num_ranks, f"what was logged without sync_dist is not each rank's own: {local}"
        seen = sorted(pair for story in told for pair in story.predictions)
        assert [number for number, _ in seen] == [number for number, _ in one.predictions], "samples lost or doubled"
        close([loss for _, loss in seen], [loss for _, loss in one.predictions], subject.tolerance, "predictions")

    @on_ranks(1, 2, 3)
    def test_strategy_talks(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """reduce, broadcast, barrier, votes and `self.all_gather`, gradients included."""
        for rank, said in enumerate(_run(gangs, num_ranks, stages.talk, {"subject": subject})):
            ranks = range(num_ranks)
            assert said["sum"] == sum(number + 1.0 for number in ranks)
            assert said["mean"] == pytest.approx(sum(number + 1.0 for number in ranks) / num_ranks, rel=1e-6)
            assert said["broadcast"] == {"from": num_ranks - 1}
            assert (said["all"], said["any"]) == (num_ranks == 1, True)
            assert said["gathered"] == [[number, 10 * number] for number in ranks], f"all_gather on rank {rank}"
            assert said["tree"] == {"a": [float(number) for number in ranks]}

    @on_ranks(2, 3)
    def test_checkpoints(self, subject: Subject, gangs: Gangs, num_ranks: int, tmp_path: Path) -> None:
        """The best and the last ones are agreed on, written once, and load in a plain process."""
        kwargs = {"subject": subject, "folder": str(tmp_path)}
        kept = _run(gangs, num_ranks, stages.keep, kwargs)
        for rank, mine in enumerate(kept):
            same = dataclasses.replace(mine, state=kept[0].state, output=kept[0].output, rank=0)
            assert same == kept[0], f"rank {rank} thinks otherwise than rank 0: {mine} {kept[0]}"
        found = sorted(str(path) for path in tmp_path.rglob("*.ckpt"))
        assert found == sorted({*kept[0].best_k, kept[0].last}), "files that nobody knows of, or known ones missing"
        assert kept[0].best == min(kept[0].best_k, key=lambda path: kept[0].best_k[path])
        loaded = Narrator.load_from_checkpoint(kept[0].last, map_location="cpu", weights_only=False)
        saved = {name: value.float() for name, value in kept[0].state.items()}
        close_states(loaded.state_dict(), saved, 0.0, "last.ckpt in a plain process")
        assert len(list(tmp_path.rglob("metrics.csv"))) == 1, "a log per rank"

    @on_ranks(2, 3)
    def test_progress_bar_on_rank_0_only(self, subject: Subject, gangs: Gangs, num_ranks: int, tmp_path: Path) -> None:
        """Ranks do not talk all at once."""
        kept = _run(gangs, num_ranks, stages.keep, {"subject": subject, "folder": str(tmp_path)})
        shown = ["Epoch" in mine.output for mine in kept]
        assert shown == [rank == 0 for rank in range(num_ranks)], [mine.output[-200:] for mine in kept]

    @on_ranks(2, 3)
    def test_early_stopping(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """One rank that wants to stop stops all, at the same step; the plateau schedule agrees on the rate."""
        ends = _run(gangs, num_ranks, stages.stop, {"subject": subject})
        assert len({(end["step"], end["epoch"]) for end in ends}) == 1, ends
        assert ends[0]["epoch"] == stages.STOPS_AFTER, ends
        assert len({tuple(end["rates"]) for end in ends}) == 1, ends
        assert ends[0]["rates"][-1] < ends[0]["rates"][0], "the plateau schedule never lowered the rate"

    @on_ranks(2, 3)
    def test_clipping_by_value(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Each element of the averaged gradient is bounded, not of the local one."""
        case = next(case for case in CASES if case.name == "groups_and_schedule")
        run = Run(clip=0.01, clip_by="value")
        with unless_refused(subject, "clipping_by_value"):
            (many,) = train(gangs, subject, case, [run], num_ranks)
            (one,) = reference(gangs, case, [run])
            assert_same_training(one, many, tolerance=subject.tolerance, what=run.label)
            assert_replicas(many, subject.replicated, what=run.label)

    @on_ranks(2, 3)
    def test_precisions(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Each precision trains, near one process in the same precision, and keeps replicas bit-equal."""
        case = next(case for case in CASES if case.name == "gpt_tied")
        runs = [Run(precision=precision, clip=case.clip) for precision in subject.precisions if precision != "64-true"]
        for run, many, one in zip(
            runs, train(gangs, subject, case, runs, num_ranks), reference(gangs, case, runs), strict=True
        ):
            close(mean_losses(many), one.losses, _LOOSE[run.precision], f"losses in {run.precision}")
            assert one.losses[-1] != one.losses[0]
            for name, value in one.state.items():
                found = many[0].state[name]
                assert found.dtype == value.dtype, f"{run.precision}: {name} is {found.dtype}, not {value.dtype}"
                assert bool(torch.isfinite(found).all()), f"{run.precision}: {name} is not finite"
            assert_replicas(many, subject.replicated, what=run.precision)

    @on_ranks(2, 3)
    def test_hooks_see_averaged_gradients(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """on_after_backward and on_before_optimizer_step see the gradient of the whole global batch."""
        many = _run(gangs, num_ranks, stages.watch, {"subject": subject})
        (one,) = _run(gangs, 1, stages.watch, {"subject": None}, group=False)
        for rank, mine in enumerate(many):
            for hook, norms in one.items():
                close(mine[hook], norms, subject.tolerance, f"gradient norms in {hook} on rank {rank}")

    @on_ranks(2, 3)
    def test_step_that_returns_none_on_some_ranks(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Such a rank counts as zero, or the run ends on all ranks with an error that says so; it never hangs."""
        with unless_refused(subject, "skipped_steps"):
            many = _run(gangs, num_ranks, stages.skip, {"subject": subject})
            (one,) = _run(gangs, 1, stages.skip, {"subject": None}, group=False)
            if num_ranks > 1:
                assert any(loss is None for record in many for loss in record.losses[:2]), "no rank skipped alone"
            for rank, record in enumerate(many):
                close(record.norms, one.norms, subject.tolerance, f"gradient norms on rank {rank}")
            close_states(many[0].state, one.state, subject.tolerance, "skipped steps")
            assert_replicas(many, subject.replicated, what="skipped steps")


def _run(gangs: Gangs, num_ranks: int, body: Any, kwargs: dict[str, Any], **options: Any) -> list[Any]:
    return gangs.run(num_ranks, body, kwargs, deadline=timedelta(seconds=60), **options)
