"""Optimizer shards that the strategy hides: found by proof, never by guess."""

import json

import numpy as np
import pytest

import ckpttool
from ckpttool.checkpoint.hidden_shards import infer_shard
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from ckpttool.storage.sampling import Sample, digest, sample
from tests.support.checkpoints import catalog_on_disk, noise
from tests.support.commands import mentions, message, run, run_well
from tests.support.errors import texts_of
from tests.support.readers import Entry, entry_of, read, read_ranks, zeros

SIX = Layout((2, 3), ((), ()))  # six replicas
TWO_BY_TWO = Layout((2, 2), ((1,), ()))  # two slices, two replicas of each


def contents(text):
    """A content for each rank; capitals are constant."""
    return {rank: Sample(c.encode(), c.isupper()) for rank, c in enumerate(text)}


@pytest.mark.parametrize(
    ("layout", "held", "shard"),
    [
        (SIX, "aaaaaa", 1),
        (SIX, "ababab", 2),
        (SIX, "abcabc", 3),
        (SIX, "abcdef", 6),
        (SIX, "AAAAAA", None),  # all elements equal: whole, or any shard
        (SIX, "AbAbAb", 2),
        (SIX, "AAbAAb", 3),  # two constant slices may be equal
        (SIX, "aaaaab", 0),  # one stale replica is no slice
        (SIX, "abaabb", 0),
        (TWO_BY_TWO, "abcd", 2),
        (TWO_BY_TWO, "aabb", 1),
        (TWO_BY_TWO, "aabc", 0),  # of the first slice both parts are equal, and not constant
        (TWO_BY_TWO, "AAAA", None),
    ],
)
def test_the_shard_is_the_smallest_that_explains_all_ranks(layout, held, shard):
    assert infer_shard(layout, contents(held)) == shard


def test_ranks_that_are_missing_do_not_hide_the_shard():
    held = contents("abcabc")
    del held[0], held[4]
    assert infer_shard(SIX, held) == 3


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
    plan, destination = ckpttool.plan_merge(
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


@pytest.mark.parametrize("prefix", ["moments", "linear"])  # FTRL's is not only an optimizer's
def test_a_state_of_zeros_has_the_shard_of_its_parameter(tmp_path, prefix):
    w = noise("w", "Float32", (8, 3))
    tensors = {"w": (w, 4), f"{prefix}.w": (zeros((8, 3)), 4)}
    merged, _ = merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
    assert merged[f"{prefix}.w"].shape == (8, 3)


def test_what_nothing_tells_is_a_question_that_lists_the_ways(tmp_path):
    w = noise("w", "Float32", (8, 3))
    tensors = {"w": (w, 4), "bias": (zeros((8, 1)), 4)}
    catalog = checkpoint(tmp_path, 4, tensors)
    problem = refused(tmp_path, catalog, tensors)
    assert "it may become (2, 1) or (4, 1) or (8, 1)" in problem
    assert "--optimizer-shard" in problem
    merged, _ = merge(tmp_path, catalog, tensors, optimizer_shard=4)
    assert merged["bias"].shape == (8, 1)


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


def test_two_ranks_that_differ_are_no_proof(tmp_path):
    """One may be stale; only the user knows."""
    w = noise("w", "Float32", (8, 3))
    catalog = checkpoint(tmp_path, 2, {"w": (w, 2)})
    problem = refused(tmp_path, catalog, ["w"])
    assert problem == (
        "1 parameter: diverged replicas, or slices of an optimizer shard\n"
        "  w: ranks 0, 1 differ (two replicas only); w: it may become (4, 3) or (8, 3)\n"
        "  Try: --trust-strategy if replicas, --optimizer-shard 2 if slices; "
        "`ckpttool help undecided_shard` explains"
    )
    merged, _ = merge(tmp_path, catalog, ["w"], optimizer_shard=2)
    assert merged["w"] == w
    merged, _ = merge(tmp_path, catalog, ["w"], trust_strategy=True, overwrite=True)
    assert merged["w"].shape == (4, 3)


@pytest.mark.parametrize("hidden", ["w", "adam_m.v"])
def test_a_hidden_shard_is_found_below_the_largest_tensors(tmp_path, hidden):
    """Three of the largest are looked at closely; here they do not divide, and hide nothing."""
    tensors = {name: (noise(name, "Float32", (17, 64)), 1) for name in ("a", "b", "c")}
    tensors[hidden] = (noise(hidden, "Float32", (16, 8)), 4)
    merged, kinds = merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
    assert merged[hidden] == tensors[hidden][0]
    assert "inferred" in kinds


@pytest.mark.parametrize("absent", [0, 3])
def test_a_hidden_shard_is_found_below_the_largest_tensors_with_ranks_missing(tmp_path, absent):
    """Ranks 0 and 2 hold the same then, and they are the first and the last that are there."""
    tensors = {name: (noise(name, "Float32", (17, 64)), 1) for name in ("a", "b", "c")}
    tensors["w"] = (noise("w", "Float32", (16, 8)), 2)
    checkpoint(tmp_path, 4, tensors)
    (tmp_path / "src" / f"rank_{absent}" / "net.ckpt").unlink()
    layout = Layout((4,), ((), ()))
    catalog = ckpttool.scan(str(tmp_path / "src"))
    strategy = training(dict.fromkeys(tensors, layout))
    plan, destination = ckpttool.plan_merge(
        catalog, strategy, str(tmp_path / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
    )
    ckpttool.execute(plan, destination)
    assert read(tmp_path / "m.ckpt")["w"] == tensors["w"][0]


def test_gradients_that_each_rank_sums_up_for_itself_are_no_doubt(tmp_path):
    full = {name: noise(name, "Float32", (17, 64)) for name in ("a", "b", "c")}
    held = {r: {**full, "accu_grads.a": noise(f"g{r}", "Float32", (17, 64))} for r in range(4)}
    catalog = catalog_on_disk(tmp_path / "src", held)
    merged, kinds = merge(tmp_path, catalog, held[0])
    assert merged == held[0]
    assert "inferred" not in kinds


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


def test_replicas_that_drifted_apart_are_no_slices(tmp_path):
    """Four that all differ would be a shard of four; but w is as large as v then was, and whole."""
    problem = refused(tmp_path, drifted(tmp_path, 1), ["w", "v"])
    assert "1 parameter: diverged replicas, or slices" in problem
    assert "v: ranks 0-3 differ (w, as large as v, equal on these ranks)" in problem
    assert "--optimizer-shard 4" in problem
    assert "--trust-strategy" in problem


@pytest.mark.parametrize("by", [1e-7, 1e-3])
def test_slices_of_nearly_the_same_numbers_are_a_question(tmp_path, by):
    catalog = drifted(tmp_path, by)
    problem = refused(tmp_path, catalog, ["v"], unlisted="drop")
    assert "v: ranks 0-3 differ (most numbers nearly equal)" in problem
    merged, _ = merge(tmp_path, catalog, ["v"], unlisted="drop", optimizer_shard=4)
    assert merged["v"].shape == (64, 8)


def test_a_small_tensor_that_is_whole_does_not_speak_against_a_shard(tmp_path):
    """MindSpore leaves whole what is below a size, and what does not divide."""
    w, small, odd = (noise("w", "Float32", (16, 8)), noise("b", "Float32", (4, 1)), None)
    odd = noise("o", "Float32", (18, 16))
    tensors = {"w": (w, 4), "small": (small, 1), "odd": (odd, 1)}
    merged, _ = merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
    assert merged["w"] == w


def test_what_speaks_for_drift_is_a_finding_and_a_proven_shard_is_a_warning(tmp_path):
    drifted(tmp_path, 1e-3)
    strategy = training(dict.fromkeys(("w", "v"), Layout((4,), ((), ()))))
    found = ckpttool.verify(ckpttool.scan(str(tmp_path / "src")), strategy, deep=True).findings
    assert {"replica", "undecided_shard"} == {finding.code for finding in found}
    w = noise("w", "Float32", (8, 3))
    catalog = checkpoint(tmp_path / "cut", 4, {"w": (w, 4)})
    strategy = training({"w": Layout((4,), ((), ()))})
    for deep in (False, True):
        (found,) = ckpttool.verify(catalog, strategy, deep=deep).findings
        assert found.code == "inferred"


@pytest.mark.parametrize(
    ("ranks", "shard", "said", "problem"),
    [
        (2, 2, 1, "w: different between ranks that should hold the same rank"),
        (
            2,
            2,
            3,
            "does not divide the 2 replicas w Try: --optimizer-shard with one of 1, 2",
        ),
        (
            6,
            2,
            4,
            "does not divide the 6 replicas w Try: --optimizer-shard with one of 1, 2, 3, 6",
        ),
        (6, 2, 3, "--optimizer-shard 3, but files hold slices of another optimizer shard w (2)"),
        (6, 6, 3, "--optimizer-shard 3, but files hold slices of another optimizer shard w (6)"),
    ],
)
def test_a_shard_that_the_user_names_is_held_against_the_contents(
    tmp_path, ranks, shard, said, problem
):
    catalog = checkpoint(tmp_path, ranks, {"w": (noise("w", "Float32", (12, 3)), shard)})
    text = " ".join(refused(tmp_path, catalog, ["w"], optimizer_shard=said).split())
    assert problem in text


def test_a_shard_that_the_user_names_cuts_what_nothing_tells(tmp_path):
    """Even where no replicas differ; what is the same on all ranks stays whole."""
    w = noise("w", "Float32", (8, 3))
    catalog = checkpoint(tmp_path, 4, {"w": (w, 1), "bias": (zeros((8, 1)), 4)})
    merged, _ = merge(tmp_path, catalog, ["w", "bias"], optimizer_shard=4)
    assert (merged["w"], merged["bias"].shape) == (w, (8, 1))


def test_a_shard_above_the_replicas_of_a_tensor_is_all_of_them(tmp_path):
    """As by default: every parameter is cut by all of its replicas."""
    w, b = noise("w", "Float32", (8, 3)), noise("b", "Float32", (8, 3))
    rows = {"w": np.split(w.array(), 8), "b": np.split(b.array(), 4)}
    held = {rank: {"w": entry_of(rows["w"][rank])} for rank in range(8)}
    for rank in held:  # columns of b: cut in two by the inner axis, in four by the shard
        part = np.ascontiguousarray(rows["b"][rank // 2])
        held[rank]["b"] = entry_of(part)
        held[rank]["z"] = zeros((2, 2))
    catalog = catalog_on_disk(tmp_path / "src", held)
    whole, half = Layout((8,), ((), ())), Layout((4, 2), ((), (0,)))
    strategy = join_stages({0: {"w": whole, "b": half, "z": half}})
    out = str(tmp_path / "m.ckpt")
    plan, destination = ckpttool.plan_merge(
        catalog,
        strategy,
        out,
        resolve_options=ckpttool.ResolveOptions(optimizer_shard=8),
        output_options=ckpttool.OutputOptions("ckpt"),
    )
    ckpttool.execute(plan, destination)
    merged = read(tmp_path / "m.ckpt")
    assert (merged["w"].shape, merged["z"].shape) == ((8, 3), (8, 4))


@pytest.mark.parametrize("said", [3, 4])
def test_a_shard_above_the_replicas_of_every_tensor_is_all_of_them(tmp_path, said):
    w = noise("w", "Float32", (8, 3))
    rows = np.split(w.array(), 4)
    held = {r: {"w": entry_of(rows[r]), "zero": zeros((2, 1))} for r in range(4)}
    catalog = catalog_on_disk(tmp_path / "src", held)
    halves = Layout((2, 2), ((1,), ()))  # two replicas on four ranks
    strategy = join_stages({0: {"w": halves, "zero": halves}})
    told = f"--optimizer-shard {said}: no parameter has more than 2 replicas\n  each is sharded"
    for shard in (said, 2):
        out = str(tmp_path / f"{shard}.ckpt")
        plan, destination = ckpttool.plan_merge(
            catalog,
            strategy,
            out,
            resolve_options=ckpttool.ResolveOptions(optimizer_shard=shard),
            output_options=ckpttool.OutputOptions("ckpt"),
        )
        ckpttool.execute(plan, destination)
        merged = read(tmp_path / f"{shard}.ckpt")
        assert (merged["w"], merged["zero"].shape) == (w, (8, 1))
        assert any(told in note.text for note in plan.notes) == (shard == said)


def test_a_tensor_whose_replicas_the_shard_does_not_divide_is_whole(tmp_path):
    """MindSpore leaves such a tensor whole; those of equal elements are told."""
    w, b = noise("w", "Float32", (8, 3)), noise("b", "Float32", (2, 6))
    rows, columns = np.split(w.array(), 4), np.split(b.array(), 2, axis=1)
    held = {
        rank: {
            "w": entry_of(rows[rank % 4]),
            "b": entry_of(np.ascontiguousarray(columns[rank % 2])),
            "z": zeros((2, 3)),
            "o": zeros((2, 3)),
        }
        for rank in range(12)
    }
    catalog = catalog_on_disk(tmp_path / "src", held)
    whole, half = Layout((12,), ((), ())), Layout((6, 2), ((), (0,)))  # of half six replicas
    strategy = join_stages({0: {"w": whole, "b": half, "z": half, "o": whole}})
    out = str(tmp_path / "m.ckpt")
    plan, destination = ckpttool.plan_merge(
        catalog,
        strategy,
        out,
        resolve_options=ckpttool.ResolveOptions(optimizer_shard=4),
        output_options=ckpttool.OutputOptions("ckpt"),
    )
    ckpttool.execute(plan, destination)
    merged = read(tmp_path / "m.ckpt")
    assert (merged["w"], merged["b"]) == (w, b)
    assert (merged["z"].shape, merged["o"].shape) == ((2, 6), (8, 3))
    proven, decided = (note.text for note in plan.notes if note.code == "inferred")
    assert proven.startswith("1 parameter has an optimizer shard (4) that the strategy does not")
    assert "\n  w; or the strategy is of another run, and they are wrong\n" in proven
    assert decided.startswith("2 parameters decided by --optimizer-shard alone\n")
    assert "  sharded: o; in full: z\n  Try: `replicated` in a hand-written" in decided


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--trust-strategy"], "--optimizer-shard 2: --trust-strategy excludes it"),
        (["--replicated"], "--optimizer-shard 2: it corrects a strategy, and none"),
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


def test_a_stale_rank_is_not_taken_for_a_slice(tmp_path):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    held = {rank: {"w": w, "moments.w": m} for rank in range(4)}
    held[2] = {"w": noise("v", "Float32", (8, 3)), "moments.w": m}
    catalog = catalog_on_disk(tmp_path / "src", held)
    with pytest.raises(ckpttool.PlanError, match="rank 2 differs from ranks 0, 1, 3"):
        merge(tmp_path, catalog, ["w", "moments.w"])


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


def test_a_parameter_and_its_state_of_different_rows_explain_nothing(tmp_path):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (2, 3))
    tensors = {"w": (w, 4), "moments.w": (m, 1)}
    with pytest.raises(
        ckpttool.PlanError, match="w: different between ranks that should hold the same"
    ):
        merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)


@pytest.mark.parametrize("full", [noise("w", "Float32", (8, 3)), zeros((8, 3))])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_all_rows_prove_a_shard_whatever_the_contents_are(tmp_path, full, ranks):
    """No shard cuts what accumulates gradients; two ranks that differ alone prove nothing."""
    tensors = {"w": (full, ranks), "adam_m.w": (zeros((8, 3)), ranks)}
    tensors["accu_grads.w"] = noise("g", "Float32", (8, 3)), 1
    merged, kinds = merge(tmp_path, checkpoint(tmp_path, ranks, tensors), tensors)
    assert merged == {name: entry for name, (entry, _) in tensors.items()}
    assert "inferred" in kinds


def test_what_gradients_prove_of_one_tensor_is_asked_of_others_that_tell_nothing(tmp_path):
    tensors = {"w": (zeros((8, 3)), 4), "accu_grads.w": (noise("g", "Float32", (8, 3)), 1)}
    tensors["v"] = zeros((8, 3)), 4
    catalog = checkpoint(tmp_path, 4, tensors)
    assert "v: it may have an optimizer shard: all elements are equal\n  " in refused(
        tmp_path, catalog, tensors
    )


def partial(folder, ranks, tensors, lost):
    """The same as `checkpoint`, without the files of some ranks."""
    checkpoint(folder, ranks, tensors)
    for rank in lost:
        (file,) = (folder / "src" / f"rank_{rank}").iterdir()
        file.unlink()
    return ckpttool.scan(str(folder / "src"))


def merge_of(folder, catalog, names, count, **more):
    strategy = training(dict.fromkeys(names, Layout((count,), ((), ()))))
    plan, destination = ckpttool.plan_merge(
        catalog,
        strategy,
        str(folder / "m.ckpt"),
        ckpttool.ResolveOptions(**more),
        ckpttool.OutputOptions("ckpt"),
    )
    ckpttool.execute(plan, destination)
    return read(folder / "m.ckpt")


def test_what_missing_files_leave_open_is_asked_not_taken_for_the_smallest_shard(tmp_path):
    """Ranks 0 and 1 of four hold halves, or the first two quarters."""
    w = noise("w", "Float32", (8, 3))
    catalog = partial(tmp_path, 4, {"w": (w, 4)}, [2, 3])
    with pytest.raises(ckpttool.PlanError) as caught:
        merge_of(tmp_path, catalog, ["w"], 4)
    (problem,) = texts_of(caught.value)
    ways = r"ranks 2, 3 not there\n  it may become \(4, 3\) or \(8, 3\)\n.* --optimizer-shard N"
    assert not mentions(problem, ways)
    with pytest.raises(ckpttool.PlanError, match="ranks 2, 3: no checkpoint file"):
        merge_of(tmp_path, catalog, ["w"], 4, optimizer_shard=4)


def test_files_that_were_cut_short_leave_the_same_open(tmp_path):
    """Cut between two records a file is as good as any, and lacks what came then."""
    halves = np.split(noise("w", "Float32", (8, 3)).array(), 4)
    held = {rank: {"v": zeros((2, 3)), "w": entry_of(halves[rank])} for rank in range(4)}
    del held[2]["w"], held[3]["w"]
    catalog = catalog_on_disk(tmp_path / "src", held)
    assert "w: it may have an optimizer shard: ranks 2, 3 not there\n  " in refused_all(
        tmp_path, catalog, ["v", "w"]
    )


def test_the_shard_that_is_named_decides_what_missing_files_leave_open(tmp_path):
    w = noise("w", "Float32", (8, 3))
    catalog = partial(tmp_path, 4, {"w": (w, 2)}, [2, 3])
    assert merge_of(tmp_path, catalog, ["w"], 4, optimizer_shard=2) == {"w": w}


def test_replicas_that_are_left_tell_the_shard_where_files_are_missing(tmp_path):
    w, v = noise("w", "Float32", (8, 3)), noise("v", "Float32", (4, 3))
    catalog = partial(tmp_path, 4, {"w": (w, 2), "v": (v, 2)}, [3])
    assert merge_of(tmp_path, catalog, ["w", "v"], 4) == {"w": w, "v": v}


def test_gradients_tell_the_shard_where_files_are_missing(tmp_path):
    tensors = {"w": (noise("w", "Float32", (8, 3)), 2)}
    tensors["accu_grads.w"] = noise("g", "Float32", (8, 3)), 1
    catalog = partial(tmp_path, 4, tensors, [2, 3])
    merged = merge_of(tmp_path, catalog, tensors, 4)
    assert merged == {name: entry for name, (entry, _) in tensors.items()}


def of_inference(folder, names, shard, full_shape=None):
    """Write slices of a shard, and the strategy of a network that has no optimizer."""
    tensors = {name: (noise(name, "Float32", (16, 3)), shard) for name in names}
    checkpoint(folder, 4, tensors)
    layout = Layout((4,), ((), ()), full_shape=full_shape)
    weights = [name for name in names if not name.startswith("adam_m.")]
    return tensors, join_stages({0: dict.fromkeys(weights, layout)})


@pytest.mark.parametrize("shard", [2, 4])
@pytest.mark.parametrize(
    ("names", "full_shape"),
    [(["w", "v"], None), (["w", "v", "adam_m.w"], None), (["w", "v"], (16, 3))],  # as in JSON
)
def test_a_strategy_without_states_hides_no_shard(tmp_path, names, full_shape, shard):
    tensors, strategy = of_inference(tmp_path, names, shard, full_shape)
    catalog = ckpttool.scan(str(tmp_path / "src"))
    with pytest.raises(ckpttool.PlanError) as caught:
        ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
    (problem,) = caught.value.diagnostics
    said = f"slices of an optimizer shard ({shard}), and the strategy lists no optimizer state"
    assert (problem.code, problem.message) == ("contradicted", said)
    assert ("the files hold optimizer state: adam_m.w" in problem.facts) == (len(names) == 3)
    assert problem.options == ("--optimizer-shard",)
    for deep in (False, True):
        report = ckpttool.verify(catalog, strategy, deep=deep)
        assert problem.code in [found.code for found in report.findings]
    options = ckpttool.ResolveOptions(optimizer_shard=shard)
    plan, destination = ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"), options)
    ckpttool.execute(plan, destination)
    assert read(tmp_path / "m.ckpt") == {name: full for name, (full, _) in tensors.items()}


def test_replicas_that_differ_under_a_strategy_without_states_are_replicas(tmp_path):
    _, strategy = of_inference(tmp_path, ["w"], 1)
    catalog = catalog_on_disk(
        tmp_path / "src",
        {rank: {"w": noise(f"w{rank // 3}", "Float32", (16, 3))} for rank in range(4)},
    )
    with pytest.raises(ckpttool.PlanError, match="rank 3 differs from ranks 0-2"):
        ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))


@pytest.mark.parametrize(("replicas", "shard"), [(2, 2), (4, 4)])
def test_a_question_about_a_shard_refuses_a_strategy_without_states(tmp_path, replicas, shard):
    """Of two replicas nothing shows it; of four, a large tensor that is whole speaks against it."""
    tensors = {name: (noise(name, "Float32", (16, 3)), shard) for name in ("w", "adam_m.w")}
    tensors["c"] = (noise("c", "Float32", (16, 3)), 1)
    catalog = checkpoint(tmp_path, replicas, tensors)
    strategy = join_stages({0: dict.fromkeys("wc", Layout((replicas,), ((), ())))})
    with pytest.raises(ckpttool.PlanError) as caught:
        ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
    (problem,) = caught.value.diagnostics
    assert problem.code == "contradicted"
    assert problem.message.endswith("and the strategy lists no optimizer state")
    assert f"w: it may become ({16 // shard}, 3) or (16, 3)" in problem.facts
    assert "the files hold optimizer state: adam_m.w" in problem.facts
    assert f"--optimizer-shard {shard} if slices" in problem.hint
    findings = ckpttool.verify(catalog, strategy, deep=True).findings
    assert {one.code for one in findings} == {"contradicted", "replica"}
    assert not any("damaged rank" in one.hint for one in findings)
    options = ckpttool.ResolveOptions(optimizer_shard=shard)
    plan, destination = ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"), options)
    ckpttool.execute(plan, destination)
    assert read(tmp_path / "m.ckpt") == {name: full for name, (full, _) in tensors.items()}
