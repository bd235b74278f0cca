# SPDX-License-Identifier: Apache-2.0
"""The command line: verbs, exit codes, one line per error, and runs started in each of the ways a user starts them."""

from __future__ import annotations

import enum
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities._pytree import _tree_flatten
from rich.console import Console

import stratagem
from stratagem.cli import main, verbs
from stratagem.cli._availability import first_line_unimported
from stratagem.cli._quiet import LOG_LINES, quiet
from stratagem.cli._run import RunCLI
from stratagem.cli.explain import _options
from stratagem.collectives import Wire
from stratagem.registry import Entry, strategies

from .fake_plugins import install

BORING = "lightning.pytorch.demos.boring_classes.BoringModel"


class Failing(BoringModel):
    """Fails in the middle of a run, as a user's own code may."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("the user's own bug")


class Unbuildable(LightningModule):
    """Fails while it is built."""

    def __init__(self) -> None:
        raise TypeError("no such thing")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, with the state of the process that a run changes put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    num_threads, before = torch.get_num_threads(), dict(StrategyRegistry)
    yield tmp_path
    torch.set_num_threads(num_threads)
    StrategyRegistry.clear()
    StrategyRegistry.update(before)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


def run_file(folder: Path, **trainer: Any) -> str:
    """A run of two steps on one CPU process."""
    quick = {"max_steps": 2, "accelerator": "cpu", "devices": 1, "limit_val_batches": 1, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": {**quick, **quiet, **trainer}, "model": {"class_path": BORING}}))
    return str(file)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    assert set(verbs()) >= {"fit", "validate", "test", "predict", "strategies", "explain"}
    for verb, line in verbs().items():
        assert line, f"{verb} has no docstring"
        assert f"  {verb}" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stratagem {stratagem.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fitt"], "stratagem: 'fitt' is no verb (did you mean fit?). Allowed: fit, validate, test, predict, check"),
        (["--config", "x.yaml", "fit"], "stratagem: the verb comes before --config"),
        (["explain", "ring_dpp"], "stratagem explain: no strategy is called 'ring_dpp' (did you mean ring_ddp?)"),
        (["fit", "--config", "nowhere.yaml"], "stratagem fit: nowhere.yaml: there is no such file"),
        (
            ["validate", "--trainer.strategy", "ring_dpp", "--model", BORING],
            "stratagem validate: trainer.strategy (command",
        ),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message), printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_all_errors_are_listed_and_no_object_is_built(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunCLI, "instantiate_classes", lambda self: pytest.fail("objects were built"))
    file = run_file(here, max_stps=1, strategy="ring_dpp", max_epochs="three", devices=0)
    assert main(["fit", "--config", file]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stratagem fit: 4 errors in the configuration:"
    assert [line.split(".")[0].strip() for line in lines[1:]] == ["1", "2", "3", "4"]
    assert "  4. trainer.strategy" in "\n".join(lines) or any(
        "no strategy is called 'ring_dpp'" in line for line in lines
    )


def test_a_missing_text_folder_is_found_before_any_process_starts(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunCLI, "instantiate_classes", lambda self: pytest.fail("objects were built"))
    (here / "empty").mkdir()
    (here / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (here / "short.txt").write_text("short")
    for path, message in {
        "nowhere": "there is no folder or file nowhere",
        "empty": "the folder empty has no files in it",
        "*.none": "no file matches *.none",
        "binary.txt": "binary.txt is not UTF-8 text",
        "short.txt": "a sequence of 128 tokens and its label do not fit",
    }.items():
        words = ["--data", "stratagem.models.TextData", "--data.path", path]
        assert main(["fit", "--config", run_file(here), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("stratagem fit: data.init_args."), error
        assert message in error
        assert len(error.splitlines()) == 1


def test_a_run_that_fails_shows_its_traceback_and_exits_with_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", run_file(here), "--model", f"{__name__}.Failing"]) == 1
    error = capsys.readouterr().err
    assert "RuntimeError: the user's own bug" in error
    assert "in training_step" in error


def test_what_cannot_be_built_is_one_line_and_a_traceback_on_request(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["fit", "--config", run_file(here), "--model", f"{__name__}.Unbuildable"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "the run cannot be built: TypeError: no such thing" in error
    assert "Traceback" not in error
    assert main([*words, "--traceback"]) == 2
    assert "in __init__" in capsys.readouterr().err
    monkeypatch.setenv("STRATAGEM_TRACEBACK", "1")
    assert main(words) == 2
    assert "in __init__" in capsys.readouterr().err


def test_fit_saves_its_configuration_and_a_second_fit_may_follow(here: Path) -> None:
    file = run_file(here)
    assert main(["fit", "--config", file, "--trainer.max_steps", "1"]) == 0
    assert yaml.safe_load((here / "config.yaml").read_text())["trainer"]["max_steps"] == 1
    assert main(["fit", "--config", file]) == 0
    assert main(["validate", "--config", file, "--trainer.max_steps", "7"]) == 0
    saved = yaml.safe_load((here / "config.yaml").read_text())
    assert saved["trainer"]["max_steps"] == 2, "only a fit writes, over that of an earlier one"
    assert saved["seed_everything"] == 1
    assert main(["fit", "--config", str(here / "config.yaml")]) == 0, "what was saved runs again"


@pytest.mark.parametrize("content", [b"", b"trainer: {}", b"\x80\x04not a pickle", b"PK\x03\x04broken"])
def test_a_file_that_is_no_checkpoint(content: bytes, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "no.ckpt").write_bytes(content)
    assert main(["fit", "--config", run_file(here), "--ckpt_path", "no.ckpt"]) == 2
    assert capsys.readouterr().err.startswith("stratagem fit: ckpt_path: this file is no checkpoint")


def test_later_overlays_and_options_win(here: Path) -> None:
    (here / "over.yaml").write_text("trainer: {max_steps: 3}\n")
    words = ["fit", "--config", run_file(here), "--config", "over.yaml"]
    assert main(words) == 0
    assert yaml.safe_load((here / "config.yaml").read_text())["trainer"]["max_steps"] == 3
    assert main([*words, "--trainer.max_steps=1"]) == 0
    assert yaml.safe_load((here / "config.yaml").read_text())["trainer"]["max_steps"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.strategy", "ring_ddp"],
        ["--trainer.strategy", "RingDDPStrategy"],
        ["--trainer.strategy", "stratagem.plugins.ring_ddp.RingDDPStrategy"],
        ["--trainer.strategy=ring_ddp", "--trainer.strategy.ring.bucket_mib=3", "--trainer.strategy.ring.wire=bf16"],
        ["--config", "class.yaml"],
        ["--config", "class.yaml", "--trainer.strategy.ring.wire", "int8"],
        ["--config", "name.yaml", "--trainer.strategy.ring.wire", "int8"],
    ],
)
def test_a_strategy_is_reached_in_every_way(words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Trainer] = []
    monkeypatch.setattr(Trainer, "fit", lambda self, **kwargs: built.append(self))
    (here / "name.yaml").write_text("trainer: {strategy: ring_ddp}\n")
    strategy = {"class_path": "stratagem.plugins.ring_ddp.RingDDPStrategy", "init_args": {"ring": {"bucket_mib": 3}}}
    (here / "class.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    assert main(["fit", "--config", run_file(here), *words]) == 0
    ring = built[0].strategy.ring
    assert type(built[0].strategy).__name__ == "RingDDPStrategy"
    assert ring.bucket_mib == (3 if "class.yaml" in words or len(words) == 3 else 25)
    assert ring.wire == ("int8" if "int8" in words else "bf16" if len(words) == 3 else "full")


def test_a_plain_script_and_a_plain_lightning_cli_reach_it_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(strategy="ring_ddp", accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy).__name__ == "RingDDPStrategy"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    strategy = {"class_path": "stratagem.plugins.ring_ddp.RingDDPStrategy", "init_args": {"ring": {"wire": "bf16"}}}
    settings = {"trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 1, "logger": False}}
    cli = LightningCLI(BoringModel, args=settings, run=False, save_config_callback=None)
    assert cli.trainer.strategy.ring.wire == "bf16"


def test_ranks_on_cpu_get_one_thread_unless_the_user_chose(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "fit", lambda self, **kwargs: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    words = ["fit", "--config", run_file(here, devices=2, strategy="ddp")]
    assert main(words) == 0
    assert torch.get_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert main([*words, "--trainer.devices", "1"]) == 0
    assert torch.get_num_threads() == 3
    assert main(words) == 0
    assert torch.get_num_threads() == 1


def test_jsonargparse_has_the_last_word_on_its_own_grammar(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option for a class that was named on the command line is right, though the check knows no such short form."""
    built: list[Trainer] = []
    monkeypatch.setattr(Trainer, "fit", lambda self, **kwargs: built.append(self))
    words = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs"]
    assert main(["fit", "--config", run_file(here), *words]) == 0
    assert built[0].logger.save_dir == "logs"


def test_print_config_and_help_of_a_run_verb(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", run_file(here), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 2
    assert main(["fit", "--help"]) == 0
    assert "--trainer.max_steps" in capsys.readouterr().out


class TestStrategies:
    """The table."""

    def table(self, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
        assert main(["strategies", "--json", *words]) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    def test_it_has_every_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        table = self.table(capsys)
        assert set(table) == set(StrategyRegistry) | set(strategies())
        assert table["ring_ddp"]["origin"] == "ours"
        assert table["ring_ddp"]["distribution"] == "stratagem"
        assert table["ring_ddp"]["why_not"] == ""
        assert table["ring_ddp"]["what"].startswith("Replicas of the whole model")
        assert table["ddp"]["distribution"] == "lightning"
        assert table["ddp"]["why_not"] == ""

    def test_each_reason_why_a_name_cannot_run_here_is_told(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        doc = '"""Broken things.\n\nMore."""'
        modules = {
            "mod_extra": f"import absent_engine\nclass P:\n  {doc}",
            "mod_bad": f"class P:\n  {doc}\n1/0",
            "mod_exit": "raise SystemExit",
            "mod_cuda": "class P:\n  'Needs a GPU.'\n  @classmethod\n  def unavailable(cls): return 'needs CUDA'",
        }
        names = {
            "x_extra": "mod_extra:P",
            "x_bad": "mod_bad:P",
            "x_exit": "mod_exit:P",
            "x_cuda": "mod_cuda:P",
            "ddp": "m:P",
        }
        extra = ("absent_engine; extra == 'engine'",)
        install(monkeypatch, tmp_path, "strange", strategies=names, modules=modules, requires=extra)
        install(monkeypatch, tmp_path, "rival", strategies={"x_cuda2": "mod_cuda:P", "x_twice": "a:P"})
        install(monkeypatch, tmp_path, "rival2", strategies={"x_twice": "b:P"})
        table = self.table(capsys)
        assert table["x_extra"]["why_not"].endswith("pip install 'strange[engine]'")
        assert table["x_extra"]["what"] == "Broken things."
        assert "ZeroDivisionError" in table["x_bad"]["why_not"]
        assert table["x_exit"]["why_not"] == "its import failed with SystemExit"
        assert table["x_cuda"]["why_not"] == "needs CUDA"
        assert "claimed by rival 1.0" in table["x_twice"]["why_not"]
        assert table["fsdp"]["why_not"] == "needs CUDA"
        assert table["ddp"]["why_not"] == "", "the row of Lightning's own name stays"

    def test_without_import_nothing_is_imported(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        source = "class P:\n  'Seen from outside.'\nraise SystemExit"
        install(monkeypatch, tmp_path, "shy", strategies={"shy": "mod_shy:P"}, modules={"mod_shy": source})
        assert self.table(capsys, "--no-import")["shy"]["what"] == "Seen from outside."
        assert "mod_shy" not in sys.modules

    def test_the_table_is_drawn(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["strategies"]) == 0
        text = capsys.readouterr().out
        for name in StrategyRegistry:
            assert name in text
        assert "runs here" in text

    def test_a_narrow_terminal_gets_a_list_without_a_broken_name(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stratagem.cli.strategies.Console", lambda **_: Console(width=80, force_terminal=True))
        assert main(["strategies"]) == 0
        lines = capsys.readouterr().out.splitlines()
        first_words = {line.replace("*", " ").split()[0] for line in lines if line.strip() and line[3:4].strip()}
        assert first_words >= {*StrategyRegistry, *strategies()}
        assert max(map(len, lines[:-1])) <= 80

    def test_a_docstring_is_followed_through_a_package(self) -> None:
        entry = strategies()["ring_ddp"]
        assert first_line_unimported(entry).startswith("Replicas of the whole model")
        lost = Entry(name="x", group=entry.group, value="stratagem.nowhere:X", distribution="d", version="1")
        assert first_line_unimported(lost) == ""


class TestExplain:
    """The page of one name."""

    def test_ours(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(Path(__file__).parent.parent)
        assert main(["explain", "ring_ddp"]) == 0
        text = capsys.readouterr().out
        for expected in [
            "ring_ddp  (stratagem.plugins.ring_ddp.RingDDPStrategy, stratagem",
            "Replicas of the whole model",
            "2 (N-1)/N",
            "  ring: buckets, wire format",
            "    ring.wire: full | bf16 | int8 = full\n      what travels",
            "    run.backend: str | null = null",
            "Config: --config configs/strategy/ring_ddp.yaml\n  trainer:\n    strategy: ring_ddp",
        ]:
            assert expected in text, f"{expected!r} is not in\n{text}"
        assert "Args:" not in text, "the arguments are told once, among the options"

    def test_lightnings_own_and_capitals(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "DDP_Spawn"]) == 0
        text = capsys.readouterr().out
        assert "lightning.pytorch.strategies.DDPStrategy" in text
        assert "{'start_method': 'spawn'}" in text
        assert "strategy: ddp_spawn" in text


class _Choice(enum.Enum):
    SLOW = 1
    FAST = 2


def test_types_and_defaults_are_shown_as_a_config_writes_them() -> None:
    def build(
        choice: _Choice = _Choice.FAST,
        word: Literal["a", "b"] | None = None,
        flag: bool = True,
        wire: Wire = Wire.BF16,
        text: str = "",
    ) -> None:
        pass

    assert list(_options(build)) == [
        "choice: SLOW | FAST = FAST",
        "word: a | b | null = null",
        "flag: bool = true",
        "wire: full | bf16 | int8 | int4 = bf16",
        "text: str = ''",
    ]


def test_explain_and_the_check_show_the_same_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nosuch"]) == 2
    explained = capsys.readouterr().err.partition("Allowed: ")[2]
    assert main(["fit", "--config", run_file(here), "--trainer.strategy", "nosuch"]) == 2
    checked = capsys.readouterr().err.partition("Allowed: ")[2]
    assert checked == f"auto, {explained}"
    assert "find_unused" not in checked


def test_a_refusal_of_lightning_is_told_in_its_own_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", run_file(here, gradient_clip_algorithm="nothing")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("stratagem fit: the run cannot be built: `gradient_clip_algorithm` nothing is invalid")
    assert "Exception" not in error
    assert "To mend it" not in error


@pytest.mark.parametrize("writes", [False, True])
def test_predict_says_what_became_of_the_predictions(
    writes: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [{"class_path": f"{__name__}.Writer", "init_args": {"write_interval": "epoch"}}] if writes else []
    assert main(["predict", "--config", run_file(here, limit_predict_batches=3, callbacks=callbacks)]) == 0
    fate = "kept by Writer" if writes else "not kept: a BasePredictionWriter callback writes them"
    assert capsys.readouterr().out.endswith(f"Predicted 3 batches; the predictions were {fate}.\n")


class Writer(BasePredictionWriter):
    """A user's own, which need not write anything here."""

    def write_on_epoch_end(self, *_: Any) -> None:
        pass


class TestQuiet:
    """Noise is left out while a run lasts, and nothing else is."""

    def test_log_lines(self) -> None:
        logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        seen: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
        parent = logging.getLogger("lightning.pytorch")
        parent.addHandler(handler)
        told = ["GPU available: True (cuda), used: False", "`Trainer.fit` stopped: `max_steps=1` reached."]
        noise = [f"{line} and so on" for line in LOG_LINES]
        try:
            with quiet():
                for text in (*noise, *told):
                    logger.info(text)
            assert seen == told
            logger.info(noise[0])
            assert seen[2:] == noise[:1]
        finally:
            parent.removeHandler(handler)

    def test_warnings(self) -> None:
        checkpoint, module = ModelCheckpoint(dirpath="here"), "something else"
        state = {**checkpoint.state_dict(), "dirpath": "there"}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with quiet():
                checkpoint.load_state_dict(state)
                _tree_flatten([torch.zeros(1)])
                warnings.warn(module, stacklevel=1)
            assert [str(warning.message) for warning in caught] == ["something else"]
            checkpoint.load_state_dict(state)
            assert len(caught) == 2, "the message is as the pattern says"

    def test_a_message_begins_on_a_line_of_its_own_beside_a_bar(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parent = logging.getLogger("lightning.pytorch")
        handler = logging.StreamHandler(sys.stderr)
        parent.addHandler(handler)
        try:
            with quiet(), Tqdm(total=3, file=sys.stderr, ncols=80) as bar:
                bar.update()
                bar.refresh()
                parent.warning("a message")
            assert handler.stream is sys.stderr
        finally:
            parent.removeHandler(handler)
        assert "\ra message\n" in capsys.readouterr().err


def test_the_real_command_reports_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """One true process, for what the others take for granted: the installed script, its exit code, its two streams."""
    script = Path(sys.executable).parent / "stratagem"
    run = {"trainer": {"strategy": "ring_dpp", "devices": "two"}, "model": {"class_path": BORING}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    words = ["fit", "--config", "run.yaml"]
    done = subprocess.run([str(script), *words], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("stratagem fit: 2 errors in the configuration:")
    assert len(done.stderr.splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stratagem", "--version"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, f"stratagem {stratagem.__version__}\n"), done.stderr
