# SPDX-License-Identifier: Apache-2.0
"""`fit`, `validate`, `test` and `predict`: LightningCLI, with every config error reported at once.

Any LightningModule and any LightningDataModule goes, by class path. The words of the command line are read twice: by
`stratagem.config`, which finds every fault and its place, and by LightningCLI's own parser, which has the last word on
keys and types, and builds the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from stratagem import config
from stratagem.checkpoint.manifest import MANIFEST
from stratagem.checkpoint.tree import whole
from stratagem.cli import RUN_VERBS
from stratagem.cli._quiet import quiet
from stratagem.config.messages import understand
from stratagem.errors import ConfigError, UserError
from stratagem.registry import strategies
from stratagem.resilience import restart_words
from stratagem.resilience.restart import Restarts
from stratagem.resilience.restart_attempt import Attempt, for_fresh_ranks
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO


def run(verb: str, words: list[str]) -> int:
    """Check, build and run; returns the exit code, and raises what stopped it.

    With `--resume auto`, a `fit` goes on from its newest checkpoint, if there is one, and again if it loses a rank.

    Args:
        verb: one of `RUN_VERBS`.
        words: the command line after the verb.

    Raises:
        ConfigErrors: every error of the configuration; nothing was built.
        ConfigError: the objects of the run could not be built; no process was started.
        RankError: a rank failed; with `--resume`, more often than is allowed.
    """
    options, rest = restart_words.take(verb, words)
    with quiet():
        if options is None:
            RunCLI([verb, *rest])
            return 0
        if config.read(rest).values.get("ckpt_path"):
            raise ConfigError("it names a checkpoint, and so does --resume", where="ckpt_path", do="leave one out")

        def work(attempt: Attempt) -> None:
            RunCLI([verb, *rest, *attempt.words], attempt=attempt)

        if restart_words.refuse_where_others_restart(options, words):
            work(Attempt(named=options.named))
            return 0
        return Restarts(options, work).run()


@final
class RunCLI(LightningCLI):
    """LightningCLI for any model and data, which checks the whole configuration before it builds anything.

    Args:
        words: the command line, verb first.
        change: if given, nothing is run: `trainer`, `model` and `datamodule` are built for whoever asked, the Trainer
            from what `change` makes of its arguments.
        parses_only: nothing is built.
        attempt: of a run that restarts; it finds the checkpoint to go on from.
    """

    def __init__(
        self,
        words: list[str],
        *,
        change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        parses_only: bool = False,
        attempt: Attempt | None = None,
    ) -> None:
        self._change, self._parses_only, self._attempt = change, parses_only, attempt
        self._words = words
        quiet: dict[str, Any] = {"exit_on_error": False}
        super().__init__(
            seed_everything_default=1,
            save_config_callback=SavedConfig if change is None else None,
            parser_kwargs={**quiet, **{verb: dict(quiet) for verb in RUN_VERBS}},
            args=words,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the words, and raise every error that they hold.

        Raises:
            ConfigErrors: at least one error.
        """
        assert isinstance(args, list), "RunCLI is built with the words of a command line"
        verb, words = args[0], args[1:]
        asks = bool({"-h", "--help"} & set(words))
        if asks or any(word.startswith("--print_config") or word.partition("=")[0].endswith("help") for word in words):
            if asks and verb == "fit":
                restart_words.describe(self._subcommand_parsers[verb])
            self.config = parser.parse_args(args)  # prints and ends
            return
        settings = config.read(words)
        form, meaning = config.check(settings, verb) if self._change is None else ([], [])  # who changes has checked
        try:
            self.config = parser.parse_args([verb, *_with_class_path(words)])
        except ArgumentError as error:
            form = form or ([] if meaning else [_in_our_words(error, verb)])
        else:
            form = []  # jsonargparse knows a grammar for it that the check does not
        if form or meaning:
            raise config.ConfigErrors([*form, *meaning])
        if config.num_cpu_ranks(settings) > 1 and "OMP_NUM_THREADS" not in os.environ:
            # A process with a pool of OpenMP threads cannot be forked safely, and ranks may be forked from this one.
            torch.set_num_threads(1)

    @override
    def _parse_ckpt_path(self) -> None:
        """LightningCLI reads hyperparameters out of the checkpoint; a file that is none is the user's mistake.

        Of a folder, which LightningCLI passes over, they are read here.

        Raises:
            ConfigError: the file is not a checkpoint.
        """
        verb = self.config["subcommand"]
        path = self.config[verb].get("ckpt_path")
        try:
            if path and (Path(path) / MANIFEST).is_file():
                self._adopt(verb, FaultTolerantCheckpointIO(verify="sizes").open_checkpoint(path, weights_only=True))
            else:
                super()._parse_ckpt_path()
        except ArgumentError as error:
            fault = understand(str(error))
            what = f"its hyperparameters do not fit the model: {'.'.join(fault.keys)}: {fault.what or 'unknown key'}"
            raise ConfigError(what, where="ckpt_path") from error
        except Exception as error:  # torch.load raises as many kinds of errors as there are broken files
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise ConfigError(f"this file is no checkpoint ({reason})", where="ckpt_path") from error

    def _adopt(self, verb: str, checkpoint: Mapping[str, Any]) -> None:
        """Takes the hyperparameters of a checkpoint for those of the model, as LightningCLI does."""
        found = whole(checkpoint.get("hyper_parameters", {}))
        found.pop("_instantiator", None)
        if "_class_path" in found:
            found = {"class_path": found.pop("_class_path"), "dict_kwargs": found}
        if found:
            self.config = self.parser.parse_object({verb: {"model": found}}, self.config)

    @override
    def _set_seed(self) -> None:
        if not self._parses_only:
            super()._set_seed()

    @override
    def instantiate_classes(self) -> None:
        """Build data, model and trainer.

        Raises:
            ConfigError: a constructor refused its arguments.
        """
        if self._parses_only:
            return
        try:
            super().instantiate_classes()
        except Exception as error:  # constructors of the user's classes may raise anything
            causes: list[BaseException] = [error]
            while (cause := causes[-1].__cause__) is not None:  # jsonargparse wraps what a constructor raises
                causes.append(cause)
            for cause in causes:
                if isinstance(cause, UserError):
                    raise cause from None
            worded = isinstance(causes[-1], MisconfigurationException)  # Lightning's, addressed to the user
            reason = str(causes[-1]).rstrip(".") if worded else f"{type(causes[-1]).__name__}: {causes[-1]}"
            raise ConfigError(f"the run cannot be built: {reason} (--traceback shows where)") from error

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if self._change is not None:
            written = config.get("callbacks") or []
            own = written if isinstance(written, list) else [written]
            config = self._change({**config, "callbacks": [*own, *callbacks]})
            callbacks = []
        if self._attempt is not None:
            callbacks = [*callbacks, *self._attempt.callbacks]
        return super()._instantiate_trainer(config, callbacks)

    @override
    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if self._attempt is not None:
            arguments["ckpt_path"] = self._attempt.prepare(self.trainer, self.model, self.datamodule)
            for_fresh_ranks(self._words, self._attempt.named, arguments["ckpt_path"])
        return arguments

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        if self._change is None and not self._parses_only:
            super()._run_subcommand(subcommand)

    def predict(self, **arguments: Any) -> None:
        """What the verb does in place of `Trainer.predict` alone: it also says what became of the predictions."""
        predicted = self.trainer.predict(**arguments)
        if not self.trainer.is_global_zero:
            return
        owner: Any = self.trainer  # which does not declare its callbacks
        writers = [type(call).__name__ for call in owner.callbacks if isinstance(call, BasePredictionWriter)]
        batches = [batch for part in predicted or [] for batch in (part if isinstance(part, list) else [part])]
        ranks = f" on rank 0 of {self.trainer.world_size}" if self.trainer.world_size > 1 else ""
        fate = f"kept by {', '.join(writers)}" if writers else "not kept: a BasePredictionWriter callback writes them"
        print(f"Predicted {len(batches)} batches{ranks}; the predictions were {fate}.")


@final
class SavedConfig(SaveConfigCallback):
    """Writes the full configuration of a `fit` beside its logs, from rank 0, over that of an earlier run.

    The text is made before ranks start: a parser cannot be pickled, and a launcher may have to.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        super().__init__(parser, config, overwrite=True)
        self.text = parser.dump(config, skip_unset=False)
        del self.parser, self.config

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file; called on all ranks, and moves the name of the log folder once."""
        if stage != "fit" or self.already_saved:
            return
        self.already_saved = True
        folder = trainer.log_dir  # broadcast: every rank must ask
        if trainer.is_global_zero and folder is not None and "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / self.config_filename).write_text(self.text, encoding="utf-8")


def check_words(words: list[str], *, confirm: bool = True) -> list[UserError]:
    """Every error in the words of a `fit`; builds nothing.

    Args:
        words: the command line after the verb.
        confirm: ask LightningCLI's own parser too, which takes a second; where there is a fault of form it is asked in
            any case, since it has the last word.
    """
    form, meaning = config.check(config.read(words), "fit")
    if confirm or form:
        try:
            RunCLI(["fit", *words], parses_only=True)
        except config.ConfigErrors as errors:
            return list(errors.errors)
        return meaning
    return meaning


def _in_our_words(error: ArgumentError, verb: str) -> ConfigError:
    fault = understand(str(error))
    place = ".".join(fault.keys).removeprefix(f"{verb}.")
    what = f"required and absent: {', '.join(fault.missing)}" if fault.missing else fault.what or "unknown key"
    return ConfigError(what, where=place, allowed=fault.allowed)


def _with_class_path(words: list[str]) -> list[str]:
    """Lets a strategy be named in ways that jsonargparse takes for a plain string.

    A registered name that is followed by `--trainer.strategy.OPTION`, the bare name of a class of ours, and a class
    path without arguments all become a class entry; the check has imported the class by then.
    """
    nested = [index for index, word in enumerate(words) if word.startswith("--trainer.strategy.")]
    end = nested[0] if nested else len(words)
    trainer = config.read(words[:end]).values.get("trainer")
    strategy = trainer.get("strategy") if isinstance(trainer, dict) else None
    if not isinstance(strategy, str):
        return words
    paths = {entry.value.rpartition(":")[2]: entry.value.replace(":", ".") for entry in strategies().values()}
    if strategy in strategies() and nested:
        path = strategies()[strategy].value.replace(":", ".")
    elif strategy in paths or "." in strategy:
        path = paths.get(strategy, strategy)
    else:
        return words
    return [*words[:end], f"--trainer.strategy={json.dumps({'class_path': path})}", *words[end:]]
