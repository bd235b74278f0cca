# SPDX-License-Identifier: Apache-2.0
"""`FaultTolerantCheckpointIO`: Lightning's checkpoints, written by all ranks and committed by one.

    save      wait for the save before; take the state apart; copy this rank's share aside; training may go on
    persist   write the share, tell rank 0; rank 0 joins the manifests and commits (in a thread, if `async_save`)
    settle    at the next save and at the end: whoever failed is known to every rank, and raised on every rank
    load      newest first: the ranks check the files together, and fall back to an older one, aloud, if one is damaged

Under our strategies every rank writes what it holds; under Lightning's own, where only rank 0 is asked to save, rank 0
writes all. The files are the same.

Note [one thread talks]: the persisting thread has a communicator of its own, and there is one save in flight at most;
so ranks meet in it in the same order, whatever the training does meanwhile. A peer that dies ends the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from stratagem.checkpoint import commit, dcp, remote, tree
from stratagem.checkpoint.manifest import OBJECTS, Manifest, Written
from stratagem.checkpoint.remote import Upload, is_remote
from stratagem.checkpoint.retention import Retention
from stratagem.checkpoint.writing import Choice, Stage, frozen, write, write_object
from stratagem.errors import CheckpointError, ConfigError
from stratagem.strategy.composing import compose
from stratagem.strategy.crew import Alone, Crew
from stratagem.strategy.opening import is_file, local_path, moved, open_folder, open_remote, whole_one

Verify = Literal["checksums", "sizes"]


Point = Literal[
    "staged", "drafted", "writing", "written", "agreed", "described", "manifest", "renamed", "committed", "settled"
]
"""Where a save can be watched, in order. From `described` to `committed` rank 0 alone is there."""

Watcher = Callable[[Point, int, Path], None]
"""Is told the point, the checkpoint's `global_step`, and the folder: of the draft, and from `renamed` on the target."""


@final
@dataclass
class _Job:
    """What one rank has to persist; `draft` is rank 0's, `upload` every rank's where the target is in a store."""

    draft: commit.Draft | Upload | None
    upload: Upload | None
    target: Path
    folder: Path
    choices: Sequence[Choice]
    objects: Any
    aliases: Mapping[str, str]
    about: Mapping[str, Any]
    step: int


class FaultTolerantCheckpointIO(CheckpointIO):
    """Writes checkpoints that any strategy reads on any number of ranks; see the module's documentation.

    Our strategies use it unless another plugin is given; under Lightning's own, or to set something, put it into the
    Trainer's `plugins`, in Python or in a config:

        trainer:
          plugins:
            - class_path: stratagem.strategy.FaultTolerantCheckpointIO
              init_args: {async_save: true}

    A checkpoint is a folder. `ckpt_path` and `LightningModule.load_from_checkpoint` take it under every strategy, and
    plain `.ckpt` files still; `stratagem convert FOLDER x.ckpt` makes such a file. In a store that fsspec opens
    (`s3://...`, `memory://...`) the manifest is the commit, with the limits that `stratagem.checkpoint.remote` states.

    Args:
        async_save: return as soon as the state was copied aside, and write in the background. A failure is raised at
            the next save or at the end of the run. Needs host memory for one copy of what a rank writes.
        verify: what is compared before a checkpoint is loaded: `checksums` reads every file once, shared by the ranks;
            `sizes` does not.
        keep_last: of each folder that it saves into, checkpoints of so many steps are kept, the newest; all if left
            out. What goes is removed after the commit; if the run dies in between, the next commit makes up for it. It
            counts every checkpoint in the folder, so `ModelCheckpoint` has to leave the choice to it: `save_top_k: -1`.
        keep_every: the first checkpoint at or past each multiple of so many steps is kept for good.

    Attributes:
        watcher: called at each `Point` of a save, in the thread that saves (`stratagem.testing.Faults`).
    """

    def __init__(
        self,
        async_save: bool = False,
        verify: Verify = "checksums",
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        if verify not in ("checksums", "sizes"):
            raise ConfigError(f"{verify!r}", where="verify", allowed="checksums, sizes")
        self._async, self._verify = async_save, verify
        self._retention = Retention(keep_last, keep_every)
        self.watcher: Watcher | None = None
        self._crew: Crew = Alone()
        self._stage = Stage()
        self._thread: ThreadPoolExecutor | None = None
        self._flying: Future[None] | None = None
        self._doomed: list[Path | str] = []
        self._swept: set[Path] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Without thread and memory, for launchers that copy a Trainer."""
        return {
            "settings": (self._async, self._verify, self._retention.keep_last, self._retention.keep_every),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As new."""
        self.__init__(*state["settings"])  # type: ignore[misc]

    # -- who saves -------------------------------------------------------------------------------------------------

    def join(self, crew: Crew) -> None:
        """From here on every rank of the crew calls each method, in the same order."""
        self._crew = crew

    def leave(self) -> None:
        """Waits for the save in flight; the crew ends. Collective.

        Raises:
            CheckpointError: of the save in flight.
        """
        try:
            self.settle()
        finally:
            self._crew = Alone()

    def abandon(self) -> None:
        """As `leave` on the failing path: waits for nobody. What was not committed is not there."""
        self._flying, self._crew, self._doomed = None, Alone(), []
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    @override
    def teardown(self) -> None:
        self.settle()

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    # -- save ------------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves; with `async_save` returns when the state was copied aside.

        Every rank of the crew calls it. Each writes its share of the state, and of what is equal on several ranks only
        its share of that; nothing is gathered.

        Args:
            checkpoint: Lightning's, with tensors or `Part`s.
            path: the folder that the checkpoint will be; one that is there is replaced when the new one is complete.
            storage_options: none are known.

        Raises:
            CheckpointError: this save, or the one before it in the background, failed on some rank; on every rank.
        """
        if storage_options is not None:
            raise CheckpointError("there are no storage options", where="save_checkpoint", do="leave them out")
        if is_remote(path) and self._retention.keep_last is not None:
            raise CheckpointError(
                "only in local folders is it known what may go", where="keep_last", do=f"leave it out for {path}"
            )
        self.settle()
        job = self._prepare(checkpoint, path)
        if self._async:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._flying = self._thread.submit(self._persist, job)
        else:
            self._persist(job)

    def settle(self) -> None:
        """Waits for the save in flight, if there is one, and removes what may go now that it is committed. Collective.

        Raises:
            CheckpointError: it failed on some rank; on every rank.
        """
        flying, self._flying = self._flying, None
        doomed, self._doomed = self._doomed, []  # gone too if the save has failed: what it was to replace is needed
        if flying is not None:
            try:
                flying.result()
            finally:
                self._end_thread()
        for folder in doomed:
            _remove(folder)

    def _prepare(self, checkpoint: dict[str, Any], path: Any) -> _Job:
        target, in_store, crew = local_path(path), is_remote(path), self._crew
        picture = compose(checkpoint, crew)
        choices = self._stage.take(picture.choices) if self._async else picture.choices
        self._at("staged", picture.step, target)
        draft, refusal = self._begin(path) if crew.rank == 0 else (None, None)
        place = draft.within if isinstance(draft, Upload) else draft.folder if draft is not None else target
        words = crew.gather_objects((place, refusal, picture.own))
        folder, refusal, _ = words[0]
        if refusal is not None:
            raise refusal
        upload = draft if isinstance(draft, Upload) else Upload(str(path), within=folder) if in_store else None
        if upload is not None:
            folder = upload.folder
        objects = picture.complete([own for *_, own in words])
        if self._async and crew.rank == 0:
            objects = self._freeze(objects, target)
        self._at("drafted", picture.step, folder)
        return _Job(draft, upload, target, folder, choices, objects, picture.aliases, picture.about, picture.step)

    def _freeze(self, objects: Any, target: Path) -> bytes | CheckpointError:
        """What is no tensor is copied aside, too: a callback may go on changing its array or its list. If it cannot be
        written, that is known to every rank where the others tell of theirs."""
        try:
            return frozen(objects)
        except Exception as error:
            return _as_refusal(error, target)

    def _begin(self, path: Any) -> tuple[commit.Draft | Upload | None, CheckpointError | None]:
        """The draft, or why there can be none. Rank 0 alone."""
        target = local_path(path)
        try:
            if is_remote(path):
                return Upload(str(path)), None
            if target.parent.exists() and target.parent not in self._swept:
                self._swept.add(target.parent)
                commit.sweep(target.parent)
            return commit.Draft(target), None
        except CheckpointError as error:
            return None, error

    def _persist(self, job: _Job) -> None:
        """Collective, on the thread: see Note [one thread talks]."""
        try:
            self._write_and_commit(job)
        finally:
            if job.upload is not None:
                job.upload.close()

    def _write_and_commit(self, job: _Job) -> None:
        crew, failure = self._crew, None
        written = Written({}, {})
        try:
            with commit.reported("written", job.target):
                written = write(job.folder, crew.rank, self._watched(job))
                if crew.rank == 0:
                    if isinstance(job.objects, CheckpointError):
                        raise job.objects
                    objects = write_object(job.folder / OBJECTS, job.objects)
                    written = Written(written.entries, {**written.files, OBJECTS: objects})
                if job.upload is not None:
                    for name in written.files:
                        job.upload.send(name)
                self._at("written", job.step, job.folder)
        except Exception as error:
            failure = _as_refusal(error, job.target)
        outcomes: list[tuple[Written, CheckpointError | None]] = crew.gather_objects((written, failure))
        failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
        if job.draft is not None:
            try:
                self._at("agreed", job.step, job.folder)
                if not failures:
                    self._commit(job, job.draft, [part for part, _ in outcomes])
            except Exception as error:
                failures[0] = _as_refusal(error, job.target)
            if failures:
                job.draft.discard()
        failures = crew.broadcast_object(failures)
        if failures:
            text = "; ".join(f"rank {rank}: {failure.what}" for rank, failure in failures.items())
            remedy = next((failure.do for failure in failures.values() if failure.do), "")
            raise CheckpointError(text, where=str(job.target), do=remedy)
        self._at("settled", job.step, job.folder)

    def _commit(self, job: _Job, draft: commit.Draft | Upload, parts: Sequence[Written]) -> None:
        manifest = Manifest.join(parts, job.aliases, job.about)
        dcp.write_metadata(job.folder, manifest)
        self._at("described", job.step, job.folder)
        draft.commit(manifest, lambda point, folder: self._at(point, job.step, folder))
        self._at("committed", job.step, job.target)
        for old in self._retention.superfluous(job.target, job.step):
            try:
                commit.remove(old)
            except OSError as error:  # the save itself has succeeded
                rank_zero_warn(f"{old} cannot be removed: {error.strerror}")

    def _at(self, point: Point, step: int, folder: Path) -> None:
        if self.watcher is not None:
            self.watcher(point, step, folder)

    def _watched(self, job: _Job) -> Iterator[Choice]:
        """What is to be written, with half of it behind us at `writing`."""
        for number, choice in enumerate(job.choices):
            if number == len(job.choices) // 2:
                self._at("writing", job.step, job.folder)
            yield choice

    # -- load ------------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Lightning's: every tensor whole. A plain `.ckpt` file is read too, wherever Lightning can read one.

        Raises:
            CheckpointError: there is no whole checkpoint at the path or before it.
        """
        if is_file(path):
            where: Any = map_location or "cpu"
            theirs: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, where, weights_only)
            return theirs
        found = self.open_checkpoint(path, weights_only)
        return {key: moved(tree.whole(value), map_location) for key, value in found.items()}

    def open_checkpoint(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint with tensors that are read when they are asked for. Every rank of the crew calls it.

        Raises:
            CheckpointError: there is no whole checkpoint at the path or before it.
        """
        if is_remote(path):
            return open_remote(str(path), self._crew, weights_only)
        return open_folder(whole_one(local_path(path), self._crew, self._verify == "checksums"), weights_only)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, but not before the save in flight is known to be committed."""
        folder = str(path) if is_remote(path) else local_path(path)
        if self._flying is not None:  # even if it is over: it may have failed, and then this one is needed
            self._doomed.append(folder)
        else:
            _remove(folder)


def _remove(folder: Path | str) -> None:
    remote.remove(folder) if isinstance(folder, str) else commit.remove(folder)


def _as_refusal(error: Exception, target: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        return commit.refusal("written", target, error)
    return CheckpointError(f"{type(error).__name__}: {error}", where=str(target))
