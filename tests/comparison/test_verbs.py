# SPDX-License-Identifier: Apache-2.0
"""`stratagem compare` and `stratagem check`, as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratagem.cli import main
from stratagem.cli._contestants import check_all, write_all
from stratagem.config import ConfigErrors

RUN = """
seed_everything: 1
trainer: {accelerator: cpu, devices: 2, max_steps: 40, gradient_clip_val: 1.0}
model:
  class_path: stratagem.models.CausalLM
  init_args:
    model:
      class_path: stratagem.models.GPT
      init_args: {config: {num_layers: 1, hidden_size: 16, num_heads: 2, max_seq_len: 16}}
data: {class_path: stratagem.models.TextData, init_args: {seq_len: 16, global_batch: 4, max_bytes: 20000}}
"""


def test_files_that_cannot_be_written_are_told_before_and_each_is_written_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried before the work, a file that was there keeps what is in it; a full device shows only in the end."""
    kept, new = tmp_path / "kept.json", tmp_path / "new.html"
    kept.write_text("before")
    check_all([], [kept, new, None])
    assert kept.read_text() == "before"
    assert not new.exists()
    with pytest.raises(ConfigErrors, match="cannot be written: Is a directory") as told:
        check_all([], [tmp_path, tmp_path / "no" / "a.json"])
    assert "there is no folder" in str(told.value)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # nothing is refused to root

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(ConfigErrors, match=r"kept.json: .*Permission denied"):
            check_all([], [kept])

    full = Path("/dev/full")
    check_all([], [full])
    with pytest.raises(ConfigErrors, match="/dev/full: it could not be written: No space left"):
        write_all([(full, lambda file: file.write_text("found")), (None, refuse), (new, lambda f: f.write_text("x"))])
    assert new.read_text() == "x"


@pytest.fixture
def run(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return str(file)


@pytest.mark.slow
def test_every_fault_of_every_contender_is_told_at_once(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Unknown names with near ones, a name twice, a file that names no strategy, a fault of the run, once."""
    empty = tmp_path / "empty.yaml"
    empty.write_text("trainer: {devices: 2}\n")
    words = ["--strategies", f"ring_ddp,zero_9,dpd,{empty},ring_ddp", "--config", run, "--trainer.max_stepz", "3"]
    assert main(["compare", *words, "--baseline", "zero_1", "--json", "/nowhere/at/all.json"]) == 2
    said = capsys.readouterr().err
    for words_of_it in (
        "ring_ddp would take part twice",
        "--baseline: zero_1 takes no part",
        "there is no folder /nowhere/at",
        "no strategy is called 'zero_9' (did you mean zero_",
        "no strategy is called 'dpd' (did you mean ddp?)",
        "empty.yaml: it sets no trainer.strategy",
        "the trainer has no key 'max_stepz' (did you mean max_steps?)",
    ):
        assert said.count(words_of_it) == 1, said
    assert "7 errors" in said


@pytest.mark.slow
def test_compare_writes_what_it_found(run: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A name beside a file with options of its own; a table, JSON and a page."""
    overlay = tmp_path / "small_buckets.yaml"
    overlay.write_text(
        "trainer:\n  strategy:\n    class_path: stratagem.plugins.zero.Zero1Strategy\n"
        "    init_args: {run: {timeout: '0:01:00'}}\n"
    )
    files = ["--json", str(tmp_path / "found.json"), "--html", str(tmp_path / "found.html")]
    words = ["--strategies", f"ring_ddp,{overlay}", "--steps", "3", "--rounds", "1", "--timed-steps", "2", *files]
    assert main(["compare", *words, "--config", run, "--data.global_batch", "8"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["name"] for each in found["contenders"]] == ["ring_ddp", "small_buckets"]
    assert found["reference"]["global_batch"] == 8
    assert found["baseline"] == "small_buckets"
    assert all(len(each["step_s"]) == 2 and each["startup_s"] > 0 for each in found["contenders"])
    assert "small_buckets" in capsys.readouterr().out
    assert "<html" in (tmp_path / "found.html").read_text()


@pytest.mark.slow
def test_check_certifies_in_float64(run: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "certificate.json"
    assert main(["check", "--config", run, "--trainer.strategy", "zero_2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["precision"], found["tolerance"], found["steps"]) == ("64-true", 1e-10, 5)
    assert found["contenders"][0]["parameters"]["relative"] < 1e-10
    said = capsys.readouterr().out
    assert "zero_2 on 2 ranks trains to the numbers of one process" in said
    assert "5 of 5 steps of SGD" in said
    assert main(["check", "--config", run]) == 2
    assert "the run names no strategy" in capsys.readouterr().err
