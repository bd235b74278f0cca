# SPDX-License-Identifier: Apache-2.0
"""Every error of a configuration at once, each with its key, its place and what would be right."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule

from stratagem import config
from stratagem.config.messages import understand
from stratagem.config.sources import load, options, read
from stratagem.errors import ConfigError, DataError, UserError

from .fake_plugins import install

BORING = "lightning.pytorch.demos.boring_classes.BoringModel"


@dataclass(frozen=True)
class Sizes:
    """Nested settings, as our own classes have them."""

    width: int
    depth: int = 2
    kind: Literal["thin", "wide"] = "thin"


class Sized(LightningModule):
    """A model with every kind of argument."""

    def __init__(
        self, sizes: Sizes, rate: float = 0.1, more: Sizes | None = None, inner: torch.nn.Module | None = None
    ) -> None:
        super().__init__()

    @classmethod
    def preflight(cls, init_args: Mapping[str, Any]) -> list[UserError]:
        """Refuses a rate that types cannot refuse."""
        if init_args.get("rate", 0.1) > 1:
            return [
                DataError("too fast", where="rate", allowed="up to 1"),
                DataError("no text", where="model.sizes.width"),
            ]
        return []


SIZED = f"{__name__}.Sized"


def errors(tmp_path: Path, text: str, *words: str) -> list[str]:
    """Every error of a run file with a model in it, as text; the file is called run.yaml."""
    file = tmp_path / "run.yaml"
    file.write_text(text if "model:" in text else f"{text}\nmodel:\n  class_path: {BORING}\n")
    form, meaning = config.check(read(["--config", str(file), *words]), "fit")
    return [str(error).replace(str(tmp_path) + "/", "") for error in [*form, *meaning]]


def test_all_errors_of_all_kinds_come_at_once(tmp_path: Path) -> None:
    text = f"""
seed_everythin: 1
trainer:
  max_stps: 3
  max_epochs: three
  devices: 0
  precision: 16-mixt
  strategy: ring_dpp
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {{save_topk: 1, verbose: maybe}}
    - class_path: lightning.pytorch.callbacks.EarlyStoping
model:
  class_path: {SIZED}
  init_args:
    sizes: {{width: x, dept: 3}}
    rat: 2
optimizer:
  class_path: torch.optim.SGD
  init_args: {{lr: fast}}
data: {{class_path: stratagem.models.Txt}}
"""
    found = errors(tmp_path, text, "--trainer.fast_dev_run=perhaps", "--config", str(tmp_path / "none.yaml"))
    for expected in [
        "none.yaml: there is no such file (did you mean run.yaml?)",
        "seed_everythin (run.yaml, line 2): a run has no key 'seed_everythin' (did you mean seed_everything?)",
        "trainer.max_stps (run.yaml, line 4): the trainer has no key 'max_stps' (did you mean max_steps",
        "trainer.max_epochs (run.yaml, line 5): got 'three'. Allowed: int, null",
        "trainer.devices (run.yaml, line 6): got 0",
        "trainer.precision (run.yaml, line 7): got '16-mixt'. Allowed: 64, 32, 16, ",
        "trainer.strategy (run.yaml, line 8): no strategy is called 'ring_dpp' (did you mean ring_ddp?)",
        "trainer.callbacks.0.init_args.save_topk (run.yaml, line 11): ModelCheckpoint has no key",
        "trainer.callbacks.0.init_args.verbose (run.yaml, line 11): got 'maybe'. Allowed: bool",
        "trainer.callbacks.1.class_path (run.yaml, line 12): the module lightning.pytorch.callbacks has no class "
        "'EarlyStoping' (did you mean EarlyStopping?)",
        "model.init_args.sizes.width (run.yaml, line 16): got 'x'. Allowed: int",
        "model.init_args.sizes.dept (run.yaml, line 16): sizes has no key 'dept' (did you mean depth?)",
        "model.init_args.rat (run.yaml, line 17): Sized has no key 'rat' (did you mean rate?)",
        "optimizer.init_args.lr (run.yaml, line 20): got 'fast'",
        "data.class_path (run.yaml, line 21): the module stratagem.models has no class 'Txt'",
        "trainer.fast_dev_run (command line): got 'perhaps'. Allowed: int, bool",
    ]:
        matching = [error for error in found if error.startswith(expected)]
        assert len(matching) == 1, f"{expected!r} is not once in\n" + "\n".join(found)
    assert len(found) == 16


def test_a_right_configuration_has_no_errors(tmp_path: Path) -> None:
    text = f"""
trainer:
  max_steps: 3
  accelerator: cpu
  devices: 2
  strategy: ddp
  precision: bf16-mixed
  logger: false
  callbacks: [{{class_path: ModelCheckpoint, init_args: {{save_top_k: 1}}}}]
model:
  class_path: {SIZED}
  init_args:
    sizes: {{width: 3, kind: wide}}
    more: {{width: 4}}
    rate: 1e-3
    inner: {{class_path: torch.nn.Linear, init_args: {{in_features: 3, out_features: 2}}}}
optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.1}}}}
"""
    assert errors(tmp_path, text, "--model.rate", "0.5", "--trainer.max_time", "00:00:01:00") == []


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("sizes: {depth: 3}", "model.init_args.sizes (run.yaml, line 4): required and absent: sizes.width."),
        ("rate: 1.0", "model (run.yaml, line 1): required and absent: sizes.width."),
        ("sizes: 3", "model.init_args.sizes (run.yaml, line 4): got 3"),
        (
            "sizes: {width: 1, kind: big}",
            "model.init_args.sizes.kind (run.yaml, line 4): got 'big'. Allowed: thin, wide",
        ),
        (
            "more: {width: 1, dept: 3}, sizes: {width: 1}",
            "model.init_args.more.dept (run.yaml, line 4): Sizes has no key",
        ),
        ("more: {width: a}, sizes: {width: 1}", "model.init_args.more.width (run.yaml, line 4): got 'a'. Allowed: int"),
        (
            "sizes: {width: 1}, inner: {class_path: torch.nn.Linear, init_args: {in_features: a, out_features: 1}}",
            "model.init_args.inner.init_args.in_features (run.yaml, line 4): got 'a'. Allowed: int",
        ),
        (
            "sizes: {width: 1}, inner: {class_path: torch.nn.Linear, init_args: {in_feature: 1, out_features: 1}}",
            "model.init_args.inner.init_args.in_feature (run.yaml, line 4): Linear has no key 'in_feature'",
        ),
        (
            "sizes: {width: 1}, inner: {class_path: not_a_module_at_all.Linear}",
            "model.init_args.inner.class_path (run.yaml, line 4): there is no module not_a_module_at_all",
        ),
    ],
)
def test_one_error_inside_a_class_is_one_error_with_its_own_place(inner: str, expected: str, tmp_path: Path) -> None:
    found = errors(tmp_path, f"model:\n  class_path: {SIZED}\n  init_args:\n    {{{inner}}}\n")
    assert len(found) == 1, found
    assert found[0].startswith(expected)


def test_preflight_is_asked_with_converted_values_and_its_words_get_their_place(tmp_path: Path) -> None:
    text = f"model:\n  class_path: {SIZED}\n  init_args:\n    sizes: {{width: 1}}\n    rate: '2e0'\n"
    assert errors(tmp_path, text) == [
        "model.init_args.rate (run.yaml, line 5): too fast. Allowed: up to 1.",
        "model.init_args.sizes.width (run.yaml, line 4): no text.",
    ]
    assert errors(tmp_path, text, "--model.rate=0.5") == []


@pytest.mark.parametrize("devices", ["0", "-1", "two", "-3", "[0, 1]", "1.5", "true"])
def test_wrong_devices_on_cpu(devices: str, tmp_path: Path) -> None:
    found = errors(tmp_path, f"trainer:\n  accelerator: cpu\n  devices: {devices}\n")
    assert len(found) == 1, found
    assert found[0].startswith("trainer.devices (run.yaml, line 3): got ")


@pytest.mark.parametrize("devices", ["1", "2", "auto", "'2'"])
def test_right_devices_on_cpu(devices: str, tmp_path: Path) -> None:
    assert errors(tmp_path, f"trainer:\n  accelerator: cpu\n  devices: {devices}\n") == []


@pytest.mark.parametrize(
    ("devices", "right"),
    [
        ("2", True),
        ("-1", True),
        ("auto", True),
        ("[0, 1]", True),
        ("'0,1'", True),
        ("3", False),
        ("[2]", False),
        ("0", False),
    ],
)
def test_more_gpus_than_there_are(devices: str, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = errors(tmp_path, f"trainer:\n  accelerator: gpu\n  devices: {devices}\n")
    assert found == [] if right else found[0].startswith("trainer.devices (run.yaml, line 3): ")


def test_no_gpu_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = errors(tmp_path, "trainer:\n  accelerator: cuda\n  devices: 2\n")
    assert found == ["trainer.accelerator (run.yaml, line 2): there is no CUDA device here. Allowed: cpu."]


def test_accelerators_nodes_and_checkpoints_are_checked(tmp_path: Path) -> None:
    text = "trainer:\n  accelerator: gpus\n  num_nodes: 0\nckpt_path: nowhere.ckpt\n"
    found = errors(tmp_path, text)
    assert [error.split(":")[0] for error in found] == [
        "trainer.accelerator (run.yaml, line 2)",
        "trainer.num_nodes (run.yaml, line 3)",
        "ckpt_path (run.yaml, line 4)",
    ]
    assert "did you mean gpu?" in found[0]
    assert "Allowed: the path of a checkpoint, " in found[2]
    assert errors(tmp_path, "ckpt_path: last") == []


def test_a_file_that_cannot_be_read_is_one_error_and_not_its_consequences(tmp_path: Path) -> None:
    form, meaning = config.check(read(["--config", str(tmp_path / "far.yaml")]), "fit")
    assert [error.what for error in form] == ["there is no such file"]
    assert meaning == []


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_2", "xla"])
def test_a_name_of_lightning_that_cannot_run_here_says_what_to_install(name: str, tmp_path: Path) -> None:
    module = "torch_xla" if name == "xla" else "deepspeed"
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    assert errors(tmp_path, f"trainer:\n  strategy: {name}\n") == [
        f"trainer.strategy (run.yaml, line 2): {name} cannot run here: it needs the module {module}. "
        f"To mend it: pip install {module}."
    ]


@pytest.mark.parametrize(
    ("model", "seq_len", "expected"),
    [
        ("{class_path: stratagem.models.GPT, init_args: {config: {max_seq_len: 64}}}", 65, "max_seq_len, 64"),
        ("{class_path: stratagem.models.GPT, init_args: {config: {max_seq_len: 64}}}", 64, ""),
        ("{class_path: stratagem.models.GPT, init_args: {config: {max_seq_len: 64}}}", None, "max_seq_len, 64"),
        ("{class_path: stratagem.models.GPT, init_args: {config: {num_layers: 2}}}", 257, "max_seq_len, 256"),
        ("{class_path: stratagem.models.GPT, init_args: {config: {num_layers: 2}}}", None, ""),
        (
            "{class_path: stratagem.models.transformers_lm, init_args: {config_class: G, config: {n_positions: 32}}}",
            33,
            "n_positions, 32",
        ),
        ("{class_path: torch.nn.Linear, init_args: {in_features: 1, out_features: 1}}", 10_000, ""),
    ],
)
def test_a_sequence_that_is_too_long_for_the_model_is_found_before_the_run(
    model: str, seq_len: int | None, expected: str, tmp_path: Path
) -> None:
    """Also by the defaults of either."""
    text = f"""
model:
  class_path: stratagem.models.CausalLM
  init_args:
    model: {model}
data:
  class_path: stratagem.models.TextData
  init_args:
    {"global_batch: 4" if seq_len is None else f"seq_len: {seq_len}"}
"""
    found = errors(tmp_path, text)
    place = f"data.init_args.seq_len (run.yaml, line {8 if seq_len is None else 9})"
    assert (found == []) == (not expected), found
    if expected:
        assert found[0].startswith(
            f"{place}: a sequence of {seq_len or 128} tokens is longer than the model's {expected}"
        )
        assert "set model.init_args.model.init_args.config." in found[0]


def test_a_run_without_a_model_says_how_to_get_one() -> None:
    form, meaning = config.check(read([]), "fit")
    assert form == []
    assert "configs/gpt_tiny.yaml" in str(meaning[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {max_steps: 3", "run.yaml, line 2: this is not YAML"),
        ("- a\n- b", "run.yaml, line 1: the file holds a list"),
        (
            "trainer:\n  max_steps: 1\n  max_steps: 2",
            "trainer.max_steps (run.yaml, line 3): this key is written twice, in line 2",
        ),
    ],
)
def test_files_that_cannot_be_read(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text + "\n")
    problems = read(["-c", str(tmp_path / "run.yaml")]).problems
    assert len(problems) == 1
    assert str(problems[0]).replace(f"{tmp_path}/", "").startswith(expected)


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {max_steps: 1, devices: 2}\n")
    (tmp_path / "b.yaml").write_text("trainer:\n  max_steps: 2\n")
    settings = read(["--config", str(tmp_path / "a.yaml"), "-c", str(tmp_path / "b.yaml"), "--trainer.devices=3"])
    assert settings.values == {"trainer": {"max_steps": 2, "devices": 3}}
    assert settings.where(("trainer", "max_steps")).endswith("b.yaml, line 2)")
    assert settings.where(("trainer", "devices")) == "trainer.devices (command line)"


def test_arguments_of_a_class_that_was_replaced_are_no_error(tmp_path: Path) -> None:
    first = f"model:\n  class_path: {SIZED}\n  init_args: {{sizes: {{width: 1}}}}\n"
    (tmp_path / "over.yaml").write_text(f"model:\n  class_path: {BORING}\n")
    assert errors(tmp_path, first, "--config", str(tmp_path / "over.yaml")) == []


def test_a_group_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "trainer.yaml").write_text("max_steps: 5\nmax_epoch: 3\n")
    found = errors(tmp_path, "", "--trainer", str(tmp_path / "trainer.yaml"))
    assert len(found) == 1
    assert found[0].startswith("trainer.max_epoch (trainer.yaml, line 2): the trainer has no key 'max_epoch'")


def test_lists_grow_by_the_plus_form(tmp_path: Path) -> None:
    text = "trainer:\n  callbacks: [{class_path: ModelCheckpoint}]\n"
    grown = ("--trainer.callbacks+", "{class_path: EarlyStopping, init_args: {monitr: x}}")
    found = errors(tmp_path, text, *grown)
    assert any(error.startswith("trainer.callbacks.1.init_args.monitr (command line)") for error in found), found


def test_words_without_an_option_are_reported() -> None:
    problems: list[UserError] = []
    assert list(options(["fit", "--a.b", "1", "-c=x", "--flag"], problems)) == [("a.b", "1"), ("flag", "")]
    assert [error.what for error in problems] == [
        "the word 'fit' belongs to no option",
        "the word '-c=x' belongs to no option",
    ]


@pytest.mark.parametrize(
    "strategy", ["ring_ddp", "RingDDPStrategy", "stratagem.plugins.ring_ddp.RingDDPStrategy", "auto", "DDP"]
)
def test_strategies_may_be_named_in_every_way(strategy: str, tmp_path: Path) -> None:
    assert errors(tmp_path, f"trainer:\n  strategy: {strategy}\n") == []


def test_options_of_a_strategy_are_typed_whether_it_is_a_name_or_a_class(tmp_path: Path) -> None:
    by_name = errors(tmp_path, "trainer: {strategy: ring_ddp}", "--trainer.strategy.ring.wire", "f16")
    by_class = errors(
        tmp_path, "trainer: {strategy: {class_path: RingDDPStrategy, init_args: {ring: {wire: f16, bucket_mb: 3}}}}"
    )
    assert by_name == ["trainer.strategy.init_args.ring.wire (command line): got 'f16'. Allowed: full, bf16, int8."]
    assert any("ring.wire (run.yaml, line 1): got 'f16'" in error for error in by_class)
    assert any("no key 'bucket_mb' (did you mean bucket_mib" in error for error in by_class)
    assert len(by_class) == 2


def test_a_name_written_as_a_class_path_is_told_apart(tmp_path: Path) -> None:
    found = errors(tmp_path, "trainer: {strategy: {class_path: ring_ddp}}")
    assert found[0].startswith(
        "trainer.strategy.class_path (run.yaml, line 1): 'ring_ddp' is a registered name, not a class"
    )


def test_what_settings_refuse_when_they_are_built_is_told_before_the_run(tmp_path: Path) -> None:
    text = """
trainer: {strategy: ring_ddp}
model:
  class_path: stratagem.models.CausalLM
  init_args:
    model: {class_path: stratagem.models.GPT, init_args: {config: {hidden_size: 128}}}
"""
    words = ("--model.model.config.hidden_size=129", "--model.optimizer.lr=-1", "--trainer.strategy.ring.bucket_mib=-3")
    found = errors(tmp_path, text, *words)
    assert [error.split(":")[0] for error in found] == [
        "trainer.strategy.init_args.ring.bucket_mib (command line)",
        "model.init_args.model.init_args.config.hidden_size (command line)",
        "model.init_args.optimizer (command line)",
    ]
    assert "heads of an even size" in found[1]


def test_a_plugin_whose_extra_is_missing_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(
        monkeypatch,
        tmp_path / "site",
        "needy",
        strategies={"needy": "needy_mod:Needy"},
        modules={"needy_mod": "import absent_engine"},
        requires=("absent-engine; extra == 'engine'",),
    )
    found = errors(tmp_path, "trainer: {strategy: needy}")
    assert len(found) == 1
    assert "it needs the module absent_engine" in found[0]
    assert "pip install 'needy[engine]'" in found[0]


def test_the_number_of_cpu_ranks() -> None:
    def ranks(*words: str) -> int:
        return config.num_cpu_ranks(read(list(words)))

    assert ranks("--trainer.accelerator=cpu", "--trainer.devices=3") == 3
    assert ranks("--trainer.accelerator=cpu") == 1
    assert ranks("--trainer.accelerator=gpu", "--trainer.devices=2") == 0


def test_many_errors_print_as_a_numbered_list_and_travel_between_processes() -> None:
    one, two = ConfigError("a", where="x"), ConfigError("b", where="y")
    assert str(config.ConfigErrors([one])) == "x: a."
    both = pickle.loads(pickle.dumps(config.ConfigErrors([one, two])))
    assert str(both) == "2 errors in the configuration:\n  1. x: a.\n  2. y: b."


class TestMessages:
    """One message of each kind that jsonargparse has, made by it here and now."""

    @staticmethod
    def fault(values: dict[str, Any]) -> Any:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(Sized, None, fail_untyped=False, sub_configs=True)
        with pytest.raises(ArgumentError) as caught:
            parser.parse_object(values)
        return understand(str(caught.value))

    def test_a_wrong_type(self) -> None:
        fault = self.fault({"sizes": {"width": "x"}})
        assert (fault.keys, fault.what, fault.allowed) == (("sizes.width",), "got 'x'", "int")

    def test_a_wrong_choice(self) -> None:
        fault = self.fault({"sizes": {"width": 1, "kind": "big"}})
        assert (fault.keys, fault.what, fault.allowed) == (("sizes.kind",), "got 'big'", "thin, wide")

    def test_an_unknown_key_of_a_group(self) -> None:
        fault = self.fault({"sizes": {"width": 1, "dept": 1}})
        assert (fault.keys, fault.unknown) == (("sizes.dept",), True)

    def test_an_unknown_key_below_a_union(self) -> None:
        fault = self.fault({"sizes": {"width": 1}, "more": {"width": 1, "dept": 1}})
        assert (fault.keys, fault.unknown, fault.owner) == (("more", "dept"), True, f"{__name__}.Sizes")

    def test_a_missing_key(self) -> None:
        assert self.fault({"sizes": {}}).missing == ("sizes.width",)

    def test_a_class_that_does_not_fit(self) -> None:
        fault = self.fault({"sizes": {"width": 1}, "inner": {"class_path": "torch.optim.SGD"}})
        assert fault.keys == ("inner",)
        assert "torch.optim.SGD is not one of the classes that fit here" in fault.what

    def test_what_is_not_understood_is_passed_on(self) -> None:
        assert understand("something new").what == "something new"


def test_every_line_of_a_file_is_numbered(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a:\n  b: 1\n  c:\n    - d: 2\n")
    values, lines = load(tmp_path / "run.yaml")
    assert values == {"a": {"b": 1, "c": [{"d": 2}]}}
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", "0"): 4, ("a", "c", "0", "d"): 4}
