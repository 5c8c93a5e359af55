"""Optimizer shards that the strategy hides: found by proof, never by guess."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

import ckpttool
from ckpttool.formats.ckpt import Ckpt
from ckpttool.model.choices import TensorOptions
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from ckpttool.storage.region_io import FlatFiles
from ckpttool.storage.sampling import digest, sample
from tests.support.checkpoints import catalog_on_disk, noise
from tests.support.commands import mentions, message, run, run_well
from tests.support.errors import texts_of
from tests.support.plans import plan_merge
from tests.support.readers import Entry, entry_of, rank_file, read, read_ranks, zeros


def checkpoint(folder, ranks, tensors):
    """Rank folders in which tensors are cut by rows over all ranks; a full tensor is cut evenly."""
    held = {rank: {} for rank in range(ranks)}
    for name, (full, shard) in tensors.items():
        rows = np.split(full.array(), shard)
        for rank in range(ranks):
            part = rows[rank % shard]
            held[rank][name] = Entry(full.dtype, part.shape, part.tobytes())
    return catalog_on_disk(folder / "src", held)


def training(layouts):
    """What a training run compiles: its strategy lists a state, which need not be in the files."""
    name, layout = next(iter(layouts.items()))
    return join_stages({0: {**layouts, f"moments.{name}": layout}})


def merge(folder, catalog, names, overwrite=False, **more):
    layout = Layout((len(catalog.files),), ((), ()))
    strategy = training(dict.fromkeys(names, layout))
    plan, destination = plan_merge(
        catalog,
        strategy,
        str(folder / "m.ckpt"),
        ckpttool.ResolveOptions(**more),
        ckpttool.OutputOptions("ckpt", overwrite=overwrite),
    )
    ckpttool.execute(plan, destination)
    return read(folder / "m.ckpt"), [note.code for note in plan.notes]


def refused(folder, catalog, names, **more):
    """The one problem that stops the merge."""
    with pytest.raises(ckpttool.PlanError) as caught:
        merge(folder, catalog, names, **more)
    (problem,) = texts_of(caught.value)
    return problem


def refused_all(folder, catalog, names, **more):
    """All that stops the merge."""
    with pytest.raises(ckpttool.PlanError) as caught:
        merge(folder, catalog, names, **more)
    return " ".join(texts_of(caught.value))


def test_a_hidden_shard_is_found_and_told(tmp_path):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    tensors = {"w": (w, 4), "moments.w": (m, 4)}
    merged, kinds = merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
    assert (merged["w"], merged["moments.w"]) == (w, m)
    assert "inferred" in kinds


@pytest.mark.parametrize("shape", [None, [8, 3]])
def test_a_target_may_need_all_rows_of_what_a_hidden_shard_cuts(shape, tmp_path):
    """Without the shard there seem to be two rows, which neither eight ranks nor JSON agree to."""
    w = noise("w", "Float32", (8, 3))
    checkpoint(tmp_path, 4, {"w": (w, 4)})
    entries = {"s": {"dev_matrix": [4], "tensor_map": [-1, -1]}}
    entries["d"] = {"dev_matrix": [8], "tensor_map": [0, -1]}
    entries["d"] |= {"tensor_shape": shape} if shape else {}
    for name, entry in entries.items():
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"parallel_layout_item": dict.fromkeys(("w", "moments.w"), entry)})
        )
    words = ["-s", tmp_path / "s.json", "-d", tmp_path / "d.json", "-o", tmp_path / "new"]
    result = run_well("reshard", tmp_path / "src", *words, "--format", "ckpt")
    assert "warning[inferred]: 1 parameter has an optimizer shard (4) that the" in message(result)
    rows = {rank: tensors["w"] for rank, tensors in read_ranks(tmp_path / "new").items()}
    assert rows == {rank: entry_of(row) for rank, row in enumerate(np.split(w.array(), 8))}


def test_a_target_that_does_not_fit_hides_no_doubt_of_the_source(tmp_path):
    checkpoint(tmp_path, 2, {"w": (noise("w", "Float32", (8, 3)), 2)})
    for name, matrix in {"s": [2], "d": [3]}.items():
        entry = {"dev_matrix": matrix, "tensor_map": [0 if name == "d" else -1, -1]}
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"parallel_layout_item": dict.fromkeys(("w", "moments.w"), entry)})
        )
    words = ["-s", tmp_path / "s.json", "-d", tmp_path / "d.json", "-o", tmp_path / "new"]
    result = run("reshard", tmp_path / "src", *words)
    assert result.exit_code == 5
    words = ("by 2 or 4, not by 3", "diverged replicas, or slices")
    assert not mentions(message(result), *words)


def test_what_is_whole_by_hand_is_no_question(tmp_path):
    w = noise("w", "Float32", (8, 3))
    checkpoint(tmp_path, 4, {"w": (w, 4), "bias": (zeros((8, 1)), 4)})
    items = {name: {"dev_matrix": [4], "tensor_map": [-1, -1]} for name in ("w", "bias")}
    items["moments.w"] = items["w"]
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": items}))
    (tmp_path / "more.yaml").write_text("ckpttool_strategy: 1\nparameters: {bias: replicated}\n")
    words = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.ckpt"]
    assert "it may become (2, 1) or" in message(run(*words))
    run_well(*words, "-s", tmp_path / "more.yaml")
    merged = read(tmp_path / "m.ckpt")
    assert (merged["w"].shape, merged["bias"].shape) == ((8, 3), (2, 1))


def drifted(folder, by):
    """Four replicas, of which ``v`` differs from rank to rank by a share of each number."""
    w, v = numbers("w", (64, 8)), numbers("v", (16, 8))
    held = {
        rank: {"w": w, "v": entry_of(v.array() * np.float32(1 + by * rank))} for rank in range(4)
    }
    return catalog_on_disk(folder / "src", held)


def numbers(name, shape):
    """Floats of ordinary size; `noise` has any bits."""
    return entry_of(np.random.default_rng(list(name.encode())).standard_normal(shape, np.float32))


@pytest.mark.parametrize("by", [1e-7, 1e-3])
def test_slices_of_nearly_the_same_numbers_are_a_question(tmp_path, by):
    catalog = drifted(tmp_path, by)
    problem = refused(tmp_path, catalog, ["v"], unlisted="drop")
    assert "v: ranks 0-3 differ (most numbers nearly equal)" in problem
    merged, _ = merge(tmp_path, catalog, ["v"], unlisted="drop", optimizer_shard=4)
    assert merged["v"].shape == (64, 8)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--trust-strategy"], "optimizer shard: a trusted strategy is not corrected"),
        (["--replicated"], "optimizer shard: it corrects a strategy, and none"),
    ],
)
def test_a_shard_that_would_not_be_looked_at_is_refused(tmp_path, words, problem):
    checkpoint(tmp_path, 2, {"w": (noise("w", "Float32", (8, 3)), 1)})
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1, -1]}}}'
    )
    words += [] if words == ["--replicated"] else ["-s", tmp_path / "s.json"]
    result = run(
        *["merge", tmp_path / "src", "-o", tmp_path / "m.h5", "--optimizer-shard", "2"], *words
    )
    assert result.exit_code == 5
    assert problem in message(result)


def test_a_correction_is_told_even_to_who_wants_no_notes(tmp_path):
    checkpoint(tmp_path, 4, {"w": (noise("w", "Float32", (8, 3)), 4)})
    items = {name: {"dev_matrix": [4], "tensor_map": [-1, -1]} for name in ("w", "moments.w")}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": items}))
    words = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5", "-q"]
    assert "warning[inferred]: 1 parameter has an optimizer" in message(run_well(*words))


def count_reads(monkeypatch):
    """The tensors that are read in full from now on."""
    read = []

    def look(tensor):
        read.append(tensor.meta.name)
        return digest(tensor)

    monkeypatch.setattr("ckpttool.storage.sampling.digest", look)
    return read


@pytest.mark.parametrize("large", [40_000, 8])
def test_of_stale_replicas_the_smallest_tensor_alone_is_read_in_full(tmp_path, monkeypatch, large):
    w, m = noise("w", "Float32", (large, 3)), noise("m", "Float32", (9, 3))
    held = {rank: {"w": w, "v": m, "u": w} for rank in range(4)}
    held[2] = {"w": noise("o", "Float32", (large, 3)), "v": noise("v", "Float32", (9, 3)), "u": w}
    catalog = catalog_on_disk(tmp_path / "src", held)
    read = count_reads(monkeypatch)
    assert "replicas that drifted" not in refused_all(tmp_path, catalog, ["w", "v", "u"])
    assert read == (["v"] * 4 if large > 9 else ["w"] * 4)


def test_what_samples_cannot_prove_is_a_question_before_all_is_read(tmp_path, monkeypatch):
    w, m = noise("w", "Float32", (40_000, 3)), noise("m", "Float32", (8, 3))
    catalog = checkpoint(tmp_path, 2, {"w": (w, 2), "v": (m, 2)})
    read = count_reads(monkeypatch)
    assert "(two replicas only)" in refused(tmp_path, catalog, ["w", "v"])
    assert not read


def test_slices_that_differ_between_their_samples_only_are_proven_all_the_same(tmp_path):
    """The pages that are looked at first are the same in two of four slices, and not constant."""
    rows = np.split(noise("w", "Float32", (6000, 3)).array().copy(), 4)
    other = noise("x", "Float32", (100, 3)).array()
    rows[1][:] = rows[0]
    rows[1][400:500] = other
    w, v = entry_of(np.concatenate(rows)), noise("v", "Float32", (12_000, 3))
    catalog = checkpoint(tmp_path, 4, {"w": (w, 4), "v": (v, 4)})
    assert sample(catalog.files[0].tensors["w"]) == sample(catalog.files[1].tensors["w"])
    merged, kinds = merge(tmp_path, catalog, ["w", "v"])
    assert (merged["w"], merged["v"]) == (w, v)
    assert "inferred" in kinds


# ------------------------------------------------------------------ states that cannot be read


@pytest.fixture
def unread(monkeypatch):
    """Let a disk fail where it holds tensors of these names, on one rank."""
    names = set()

    def fail(self, tensor, offset, out, original=FlatFiles.read_bytes):
        start = tensor.extents[0].offset + offset
        stored = Ckpt().read_index(tensor.file).tensors
        hit = any(start <= stored[name].extents[0].offset < start + out.nbytes for name in names)
        if hit and "rank_1" in tensor.file.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), tensor.file.path)
        original(self, tensor, offset, out)

    monkeypatch.setattr(FlatFiles, "read_bytes", fail)
    return names


ONLY_W = TensorOptions(weights_only=True)


def test_a_state_that_is_not_wanted_and_cannot_be_read_stops_nothing(tmp_path, unread):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    tensors = {"w": (w, 1), "moments.w": (m, 1)}
    catalog = checkpoint(tmp_path, 4, tensors)
    unread.add("moments.w")
    merged, kinds = merge(tmp_path, catalog, tensors, tensors=ONLY_W)
    assert merged == {"w": w}
    assert kinds.count("doubt") == 1
    with pytest.raises(ckpttool.CkptToolError, match="Input/output error") as caught:
        merge(tmp_path, catalog, tensors, overwrite=True)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("kind", ["differing", "constant"])
def test_states_that_cannot_be_read_are_a_question_where_they_decide(kind, tmp_path, unread):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    w = zeros((8, 3)) if kind == "constant" else w
    tensors = {"w": (w, 4), "moments.w": (m, 4)}
    catalog = checkpoint(tmp_path, 4, tensors)
    unread.add("moments.w")
    problem = refused(tmp_path, catalog, tensors, tensors=ONLY_W)
    assert "1 parameter: perhaps slices of an optimizer shard" in problem
    assert "cannot be read: moments.w" in problem
    assert "--optimizer-shard N, 1 for none" in problem
    merged, _ = merge(tmp_path, catalog, tensors, tensors=ONLY_W, optimizer_shard=4)
    assert merged == {"w": w}


def test_another_state_shows_what_one_that_cannot_be_read_would(tmp_path, unread):
    w, m = zeros((8, 3)), noise("m", "Float32", (8, 3))
    tensors = {"w": (w, 1), "moments.w": (m, 1), "adam_v.w": (m, 1)}
    catalog = checkpoint(tmp_path, 4, tensors)
    unread.add("moments.w")
    merged, kinds = merge(tmp_path, catalog, tensors, tensors=ONLY_W)
    assert merged == {"w": w}
    assert "doubt" in kinds


def test_a_wanted_tensor_that_cannot_be_read_is_an_error(tmp_path, unread):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    tensors = {"w": (w, 1), "moments.w": (m, 1)}
    catalog = checkpoint(tmp_path, 4, tensors)
    unread.update(("w", "moments.w"))
    with pytest.raises(ckpttool.CkptToolError, match="Input/output error") as caught:
        merge(tmp_path, catalog, tensors, tensors=ONLY_W)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("loss", ["missing", "damaged"])
@pytest.mark.parametrize("full", ["constant", "noise"])
def test_what_only_lost_ranks_would_show_is_a_warning(full, loss, tmp_path):
    """Ranks 0 and 2 hold the same half of a hidden shard of 2, as two replicas would."""
    w, m = zeros((8, 3)), noise("m", "Float32", (8, 3))
    w = w if full == "constant" else noise("w", "Float32", (8, 3))
    checkpoint(tmp_path, 4, {"w": (w, 2), "moments.w": (m, 2)})
    for rank in (1, 3):
        if loss == "missing":
            shutil.rmtree(tmp_path / "src" / f"rank_{rank}")
        else:
            rank_file(tmp_path / "src", rank).write_bytes(b"no checkpoint")
    tensors = {"w": (w, 2), "moments.w": (m, 2)}
    layout = Layout((4,), ((), ()))
    strategy = training(dict.fromkeys(tensors, layout))
    given = ckpttool.scan(str(tmp_path / "src")), strategy, str(tmp_path / "m.ckpt")
    plan, _ = plan_merge(*given, ckpttool.ResolveOptions(tensors=ONLY_W))
    assert "hidden_shard" in {one.code for one in plan.notes}
    with pytest.raises(ckpttool.CkptToolError, match="may hide an optimizer shard"):
        plan_merge(*given, ckpttool.ResolveOptions(tensors=ONLY_W, strict=True))
