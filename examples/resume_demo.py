# SPDX-License-Identifier: Apache-2.0
"""A rank is killed, twice, and the run comes back by itself; its losses on those of the run that nobody disturbed.

    python examples/resume_demo.py [FOLDER]

Three runs of one config on 4 CPU ranks, in float64 with SGD:

    calm       nobody is killed
    same       rank 2 is killed at step 4, and at step 8 again; `--resume auto` goes on with 4 ranks    equal to the bit
    fewer      the same with `--min-devices 3`: after the first kill 3 ranks go on, and after the second     to 1e-10

Every sample is counted: those that the final model has seen are the same, each as often, in all three. Writes
`resume.html` into the folder, and prints the numbers. Takes about a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO

RANKS, STEPS, EVERY, KILLS = 4, 12, 3, (4, 8)


class Ledger(Callback):
    """Writes down what each rank sees in each step: its loss, and a number for each of its samples.

    Args:
        folder: of the files, one per rank.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One line."""
        rows: Tensor = batch["input_ids"]
        entry = {
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "step": trainer.global_step,
            "loss": float(outputs["loss"]),
            "rows": [zlib.crc32(row.numpy().tobytes()) for row in rows],
        }
        with open(self.folder / f"rank-{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")


def settings(folder: Path, kills: tuple[int, ...]) -> dict[str, Any]:
    """The run file."""
    faults = [{"kind": "kill", "rank": 2, "step": step, "attempt": number} for number, step in enumerate(kills)]
    kept = {"dirpath": str(folder / "kept"), "filename": "{step}", "every_n_train_steps": EVERY, "save_top_k": -1}
    callbacks = [
        {"class_path": "stratagem.testing.Faults", "init_args": {"faults": faults}},
        {"class_path": "resume_demo.Ledger", "init_args": {"folder": str(folder)}},
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": kept},
    ]
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_seq_len": 16}
    return {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": RANKS,
            "strategy": "ring_ddp",
            "precision": "64-true",
            "max_steps": STEPS,
            "limit_val_batches": 0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "callbacks": callbacks,
        },
        "model": {
            "class_path": "stratagem.models.CausalLM",
            "init_args": {
                "model": {"class_path": "stratagem.models.GPT", "init_args": {"config": model}},
                "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
            },
        },
        "data": {
            "class_path": "stratagem.models.TextData",
            "init_args": {"seq_len": 16, "global_batch": 12, "max_bytes": 6000},
        },
    }


def train(folder: Path, kills: tuple[int, ...] = (), *options: str) -> str:
    """One run of the command line, to its end; what it printed.

    Raises:
        CalledProcessError: it failed.
    """
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(folder, kills)))
    command = [sys.executable, "-m", "stratagem", "fit", "--config", str(folder / "run.yaml"), *options]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    return done.stdout


def history(folder: Path) -> tuple[dict[int, float], Counter[int], dict[int, list[tuple[int, float]]]]:
    """Of the final model: the loss of each step and how often it saw each sample; and each attempt's own losses."""
    lines = [json.loads(line) for path in folder.glob("rank-*.jsonl") for line in path.read_text().splitlines()]
    last: dict[int, int] = {}
    for line in lines:
        last[line["step"]] = max(line["attempt"], last.get(line["step"], 0))
    of: dict[tuple[int, int], list[float]] = {}
    seen: Counter[int] = Counter()
    for line in lines:
        of.setdefault((line["attempt"], line["step"]), []).append(line["loss"])
        if line["attempt"] == last[line["step"]]:
            seen.update(line["rows"])
    means = {key: sum(losses) / len(losses) for key, losses in of.items()}
    attempts: dict[int, list[tuple[int, float]]] = {}
    for (attempt, step), loss in sorted(means.items()):
        attempts.setdefault(attempt, []).append((step, loss))
    return {step: means[attempt, step] for step, attempt in sorted(last.items())}, seen, attempts


def weights(folder: Path) -> dict[str, Tensor]:
    """Those at the end."""
    found: dict[str, Tensor] = FaultTolerantCheckpointIO().load_checkpoint(folder / "kept" / f"step={STEPS}.ckpt")[
        "state_dict"
    ]
    return dict(found)


def compare(calm: Path, other: Path) -> dict[str, Any]:
    """How far a run that was disturbed is from the one that was not."""
    (losses, seen, _), (theirs, also_seen, _) = history(calm), history(other)
    assert losses.keys() == theirs.keys(), "every step has its loss"
    mine, yours = weights(calm), weights(other)
    report = json.loads((other / "guard" / "restarts.json").read_text())
    return {
        "loss": max(abs(losses[step] - theirs[step]) for step in losses),
        "weights": max(float((mine[name] - yours[name]).abs().max()) for name in mine),
        "equal bits": all(torch.equal(mine[name], yours[name]) for name in mine),
        "same samples": seen == also_seen and sum(seen.values()) == 12 * STEPS,
        "devices": [attempt["devices"] for attempt in report["attempts"]],
        "reached": [attempt["reached"] for attempt in report["attempts"]],
        "redone": report["redone_steps"],
        "lost seconds": report["lost_seconds"],
    }


def picture(path: Path, calm: Path, runs: dict[str, Path]) -> None:
    """A panel per run: the losses of its attempts, one after the other, on those of the undisturbed run."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    losses, colors = history(calm)[0], ("#1f5fa8", "#d1622b", "#2c8a57")
    undisturbed = {"x": list(losses), "y": list(losses.values()), "name": "nobody is killed", "mode": "lines"}
    titles = {"same": "4 ranks go on, with the same bits", "fewer": "3 ranks go on, with the same global batch"}
    figure = make_subplots(cols=len(runs), subplot_titles=[titles[run] for run in runs], shared_yaxes=True)
    for column, folder in enumerate(runs.values(), 1):
        line = {"width": 12, "color": "#cfd8e3"}
        figure.add_trace(go.Scatter(**undisturbed, line=line, showlegend=column == 1), row=1, col=column)
        for attempt, points in history(folder)[2].items():
            steps, values = zip(*points, strict=True)
            marker = {"size": 8 + 5 * attempt, "symbol": "circle-open", "line": {"width": 2}}  # a redone step has two
            figure.add_scatter(
                x=steps,
                y=values,
                name=f"attempt {attempt + 1}",
                mode="lines+markers",
                line={"color": colors[attempt]},
                marker=marker,
                showlegend=column == 1,
                row=1,
                col=column,
            )
        for step in KILLS:
            figure.add_vline(x=step + 0.5, line_dash="dot", annotation_text="killed", row=1, col=column)
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title="loss", col=1)
    figure.update_layout(title="A rank is killed twice, and the run comes back by itself", template="plotly_white")
    figure.write_html(path)


def main(folder: Path) -> dict[str, dict[str, Any]]:
    """All three runs; how far the two are from the first."""
    train(folder / "calm")
    runs = {"same": folder / "same", "fewer": folder / "fewer"}
    found = {}
    for name, run in runs.items():
        options = ["--min-devices", "3"] if name == "fewer" else []
        text = train(run, KILLS, "--resume", "auto", *options)
        found[name] = compare(folder / "calm", run)
        print(f"{name}:", *(line for line in text.splitlines() if line.startswith(("rank ", "Restarts"))), sep="\n  ")
        print("  " + ", ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
    picture(folder / "resume.html", folder / "calm", runs)
    print(f"The picture is {folder / 'resume.html'}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="resume-")))
