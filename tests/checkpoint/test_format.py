# SPDX-License-Identifier: Apache-2.0
"""Any layout writes, any layout reads, each element once; and torch's own tools read the same files."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stratagem.checkpoint import dcp, writing
from stratagem.checkpoint.commit import Draft, candidates, sweep
from stratagem.checkpoint.manifest import MANIFEST, OBJECTS, Manifest, Written
from stratagem.checkpoint.parts import Part, boxes_of_span, numel, whole_box, within
from stratagem.checkpoint.reading import Reader
from stratagem.checkpoint.writing import Stage, choose, cut, write, write_object
from stratagem.errors import CheckpointError

SPLITS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    # Megatron-LM, tests/unit_tests/dist_checkpointing/test_serialization.py: what each of 8 ranks holds, and reads
    ((3,) * 8, (1,) * 6 + (2, 16)),
    (tuple(range(1, 9)), (4, 5) * 4),
    ((1, 5, 7, 3, 6, 2, 5, 4), (14, 3, 6, 3, 1, 1, 2, 3)),
    ((2,) * 7 + (1,), (1,) + (2,) * 7),
    ((2,) * 7 + (10,), (3,) * 8),
    ((5,) * 6 + (0, 0), (5, 0, 5, 0, 5, 5, 3, 7)),
    ((15,) + (0,) * 7, (0, 0, 0) + (3,) * 5),
)

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive spans of these sizes."""
    edges = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(edges))


def save(folder: Path, ranks: Sequence[dict[str, Part]]) -> Reader:
    """A checkpoint of what these ranks hold."""
    draft = Draft(folder)
    written = [write(draft.folder, rank, choose(parts)) for rank, parts in enumerate(ranks)]
    draft.commit(Manifest.join(written, {}, {}))
    return Reader(folder)


@given(shapes, st.data())
def test_the_boxes_of_a_span_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    whole = torch.arange(total).view(shape)
    boxes = list(boxes_of_span(shape, start, stop))
    found = [within(whole, whole_box(shape), box).reshape(-1) for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(shapes, st.data())
def test_a_span_of_strided_memory_reads_what_lies_there(shape: tuple[int, ...], data: st.DataObject) -> None:
    """`channels_last` and transposed parameters: the run is one of memory, the boxes are those of the tensor."""
    order = data.draw(st.permutations(range(len(shape))))
    memory = torch.arange(math.prod(shape))
    inverse = [order.index(dim) for dim in range(len(shape))]
    whole = memory.view([shape[dim] for dim in order]).permute(inverse)
    start, stop = sorted((data.draw(st.integers(0, len(memory))), data.draw(st.integers(0, len(memory)))))
    part = Part.span(memory[start:stop], shape, start, stop, stride=whole.stride())
    for box, tensor in zip(part.boxes, part.tensors, strict=True):
        assert torch.equal(tensor, within(whole, whole_box(shape), box))
    assert sum(numel(box) for box in part.boxes) == stop - start


@given(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 6)), st.integers(1, 40))
def test_cutting_a_box_keeps_every_element_once(shape: tuple[int, ...], most: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    for piece in cut(whole_box(shape), most):
        within(seen, whole_box(shape), piece).add_(1)
        assert numel(piece) <= max(most, 1) or piece[-1][1] - piece[-1][0] > most
    assert bool((seen == 1).all())


@pytest.mark.parametrize(("held", "wanted"), SPLITS)
@pytest.mark.parametrize("shape", [(-1,), (-1, 2)], ids=["1d", "2d"])
def test_uneven_and_empty_splits_go_into_each_other(
    held: tuple[int, ...], wanted: tuple[int, ...], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Bit-equal, there and back."""
    size = math.prod(dim for dim in shape if dim > 0)
    total = sum(held) * size
    whole = torch.randn(total, generator=torch.Generator().manual_seed(1)).view(shape)
    wanted = (*wanted[:-1], sum(held) - sum(wanted[:-1]))

    def parts(sizes: Sequence[int], source: Tensor) -> list[dict[str, Part]]:
        flat = source.reshape(-1)
        cuts = [(a * size, b * size) for a, b in spans(sizes)]
        return [{"w": Part.span(flat[a:b], whole.shape, a, b, dtype=whole.dtype)} for a, b in cuts]

    first = save(tmp_path / "a", parts(held, whole))
    empty = torch.full_like(whole, math.nan)
    there = parts(wanted, empty)
    for rank in there:
        first.read_into("w", rank["w"])
    assert torch.equal(empty, whole)
    back = save(tmp_path / "b", there)
    assert torch.equal(back.whole("w"), whole)


def test_equal_copies_share_the_work_and_write_each_element_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "CHUNK_BYTES", 4096)
    state = {f"w{n}": torch.randn(n * 37 + 1, 5) for n in range(20)}
    ranks = [{name: Part.whole(each, copy=rank, num_copies=3) for name, each in state.items()} for rank in range(3)]
    loads = [sum(choice.num_bytes for choice in choose(parts)) for parts in ranks]
    assert sum(loads) == sum(each.numel() * 4 for each in state.values())
    assert max(loads) - min(loads) <= 2 * 4096
    reader = save(tmp_path / "a", ranks)
    assert all(torch.equal(reader.whole(name), each) for name, each in state.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_scalars_empty_tensors_and_views(dtype: torch.dtype, tmp_path: Path) -> None:
    big = torch.arange(1000).to(dtype)
    state = {"view": big[3:10], "step": big[5], "empty": big[:0].view(0, 3), "transposed": big.view(10, 100).t()}
    reader = save(tmp_path / "a", [{name: Part.whole(each) for name, each in state.items()}])
    for name, each in state.items():
        assert torch.equal(reader.whole(name), each), name
        assert reader.whole(name).dtype == dtype
    assert reader.manifest.files["rank-00000.bin"].num_bytes < 2 * 1100 * big.element_size() + 8000  # not all of `big`


def test_what_is_staged_does_not_change_with_the_training(tmp_path: Path) -> None:
    weight = torch.randn(4, 5)
    kept, stage = weight.clone(), Stage()
    choices = stage.take(choose({"w": Part.whole(weight)}))
    weight.add_(1.0)
    memory = choices[0].tensor.data_ptr()
    draft = Draft(tmp_path / "a")
    draft.commit(Manifest.join([write(draft.folder, 0, choices)], {}, {}))
    assert torch.equal(Reader(tmp_path / "a").whole("w"), kept)
    assert stage.take(choose({"w": Part.whole(weight)}))[0].tensor.data_ptr() == memory, "the buffer is used again"


def test_changing_what_was_read_does_not_change_the_checkpoint(tmp_path: Path) -> None:
    reader = save(tmp_path / "a", [{"w": Part.whole(torch.ones(3))}])
    reader.whole("w").zero_()
    assert Reader(tmp_path / "a").whole("w").tolist() == [1.0, 1.0, 1.0]


def test_elements_that_nobody_writes_are_an_error(tmp_path: Path) -> None:
    part = Part.span(torch.zeros(3), (2, 3), 0, 3)
    with pytest.raises(CheckpointError, match="3 of the 6 elements of 'w'"):
        save(tmp_path / "a", [{"w": part}])


def test_ranks_that_disagree_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ranks disagree about 'w'"):
        save(tmp_path / "a", [{"w": Part.whole(torch.zeros(2))}, {"w": Part.whole(torch.zeros(3))}])


def test_torchs_own_checkpoint_tools_read_it(tmp_path: Path) -> None:
    """With a tied name, tensors cut over ranks, and the objects."""
    weight, bias = torch.randn(6, 4), torch.randn(5).bfloat16()
    draft = Draft(tmp_path / "a")
    written = [
        write(draft.folder, r, choose({"w": Part.span(weight.view(-1)[a:b], (6, 4), a, b)}))
        for r, (a, b) in enumerate([(0, 7), (7, 24)])
    ]
    written.append(write(draft.folder, 2, choose({"b": Part.whole(bias)})))
    objects = write_object(draft.folder / OBJECTS, {"epoch": 3})
    manifest = Manifest.join([*written, Written({}, {OBJECTS: objects})], {"tied": "w"}, {})
    dcp.write_metadata(draft.folder, manifest)
    draft.commit(manifest)
    found = {"w": torch.zeros(6, 4), "tied": torch.zeros(6, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
    torch_dcp.load(found, storage_reader=torch_dcp.FileSystemReader(tmp_path / "a"), no_dist=True)
    assert torch.equal(found["w"], weight)
    assert torch.equal(found["tied"], weight)
    assert torch.equal(found["b"], bias)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(one["w"], weight)
    assert one[dcp.OBJECTS_KEY] == {"epoch": 3}


def test_a_parameter_may_be_called_as_torchs_tools_find_the_rest(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "a")
    written = write(draft.folder, 0, choose({dcp.OBJECTS_KEY: Part.whole(torch.ones(3))}))
    objects = write_object(draft.folder / OBJECTS, {"epoch": 3})
    manifest = Manifest.join([Written(written.entries, {**written.files, OBJECTS: objects})], {}, {})
    dcp.write_metadata(draft.folder, manifest)
    draft.commit(manifest)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(one[dcp.OBJECTS_KEY], torch.ones(3))
    assert one[f"{dcp.OBJECTS_KEY}_"] == {"epoch": 3}


def test_views_that_say_conjugate_or_negate_are_written_as_they_read(tmp_path: Path) -> None:
    turned = (torch.ones(3, dtype=torch.complex64) * 1j).conj()
    reader = save(tmp_path / "a", [{"conjugate": Part.whole(turned), "negative": Part.whole(turned.imag)}])
    assert torch.equal(reader.whole("conjugate"), torch.full((3,), -1j))
    assert torch.equal(reader.whole("negative"), torch.full((3,), -1.0))


def test_a_manifest_with_a_bit_flipped_is_refused_wherever_it_is(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": Part.whole(torch.arange(6.0).view(2, 3))}])
    text = (tmp_path / "a" / MANIFEST).read_bytes()
    for place in range(text.index(b"format") - 2, len(text)):
        flipped = bytearray(text)
        flipped[place] ^= 1
        (tmp_path / "a" / MANIFEST).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            Reader(tmp_path / "a")


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("files", "../secret"), [64, 0]),
        (("files", "/etc/passwd"), [64, 0]),
        (("tensors", "w", "chunks", 0, 1), "../secret"),
        (("tensors", "w", "chunks", 0, 4), -16),
        (("tensors", "w", "chunks", 0, 4), 10**6),
        (("tensors", "w", "chunks", 0, 0), [[0, 3], [0, 2]]),
        (("tensors", "w", "chunks"), []),
        (("tensors", "w", "dtype"), "load"),
        (("aliases", "v"), "u"),
        (("about",), [1]),
        (("about", "global_step"), None),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused_and_troubles_no_neighbour(
    way: Sequence[str | int], value: object, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, [{"w": Part.whole(torch.zeros(2, 3))}])
    content = json.loads((tmp_path / "a" / MANIFEST).read_text())
    del content["checksum"]  # whoever means harm would leave it out
    (tmp_path / "a" / MANIFEST).write_text(json.dumps(content))
    Reader(tmp_path / "a")
    node = content
    for step in way[:-1]:
        node = node[step]
    node[way[-1]] = value
    (tmp_path / "a" / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="this is no manifest"):
        Reader(tmp_path / "a")
    assert candidates(tmp_path)[0] == tmp_path / "b"
    assert sweep(tmp_path) == []


def test_a_manifest_of_the_future_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": Part.whole(torch.zeros(2))}])
    text = (tmp_path / "a" / MANIFEST).read_text().replace('"format": 1', '"format": 2')
    (tmp_path / "a" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="it has format 2"):
        Reader(tmp_path / "a")
