"""What ``verify`` finds in headers: damaged files, types, shapes, and what some ranks lack."""

import os

from ckpttool.model.layout import Layout
from tests.support.checkpoints import ROWS, cut, strategy_of, write_file, write_ranks
from tests.support.corpus import GOLDEN
from tests.support.damage import cut_short
from tests.support.diagnostics import graded
from tests.support.readers import Entry, rank_file
from tests.support.reports import STATES, check, kinds, plain, ranks_of, the_finding, verify, whole


def test_a_damaged_file_is_found_and_its_replicas_are_named(tmp_path):
    write_ranks(tmp_path, ranks_of(whole()), "ckpt")
    path = cut_short(rank_file(tmp_path, 1))
    found = the_finding(verify(tmp_path, STATES), "damaged_replica")
    assert str(path) in found.text
    assert found.facts.endswith("all slices are read from replicas: rank 0")
    assert found.ranks == (1,)


def test_a_damaged_file_that_nobody_replaces_takes_slices_with_it(tmp_path):
    write_ranks(tmp_path, ranks_of(whole()), "ckpt")
    for rank in (0, 1):
        cut_short(rank_file(tmp_path, rank))
    found = verify(tmp_path, STATES).findings
    lost = [(one.tensor, one.ranks) for one in found if one.code == "missing"]
    assert lost == [("w", (0, 1)), ("adam_m.w", (0, 1)), ("bias", (0, 1))]
    assert [one.ranks for one in found if one.code == "damaged"] == [(0,), (1,)]


def test_a_single_damaged_file_is_a_finding_and_no_error(tmp_path):
    write_file(tmp_path / "m.ckpt", whole(), "ckpt")
    (tmp_path / "m.ckpt").write_bytes((tmp_path / "m.ckpt").read_bytes()[:-1])
    found = the_finding(verify(str(tmp_path / "m.ckpt")), "damaged")
    assert found.text.startswith(f"{tmp_path}/m.ckpt: the file is cut short or damaged\n  byte ")


def test_files_that_cannot_be_read_are_found(tmp_path, monkeypatch):
    import ckpttool.formats as module

    def fail(path):
        if "rank_2" in path:
            raise PermissionError(13, os.strerror(13), path)
        return find(path)

    find = module.format_of_content
    monkeypatch.setattr(module, "format_of_content", fail)
    found = the_finding(check(tmp_path, ranks_of(whole())), "damaged_replica")
    assert "rank_2/net.ckpt: Permission denied" in found.text


def test_files_of_a_kind_that_is_not_read_are_found():
    report = verify(str(GOLDEN / "encrypted_gcm" / "src"))
    assert {kind for _, kind in kinds(report)} == {"unsupported"}
    assert all("AES-GCM" in finding.text for finding in report.findings)


def test_a_file_that_lacks_what_its_replica_holds_was_cut_short(tmp_path):
    ranks = ranks_of(whole())
    del ranks[1]["bias"], ranks[1]["global_step"]
    listed, unlisted = check(tmp_path, ranks).findings
    assert {(one.code, one.ranks) for one in (listed, unlisted)} == {("lacking", (1,))}
    assert listed.fact == "bias: not on rank 1, but on others"
    assert listed.facts.endswith("rank_1/net.ckpt; on rank 0")
    assert unlisted.text.startswith("global_step: not in the strategy, and not on rank 1\n")


def test_types_and_shapes_that_do_not_agree_are_errors(tmp_path):
    ranks = ranks_of(whole())
    ranks[1]["w"] = ranks[1]["w"]._replace(dtype="Int32")
    ranks[2]["bias"] = plain("b", 2)
    ranks[3]["global_step"] = Entry("Int64", (), bytes(8))
    report = check(tmp_path, ranks)
    assert sorted((f.code, f.tensor) for f in report.findings) == [
        ("dtype", "global_step"),
        ("dtype", "w"),
        ("shape", "bias"),
    ]
    assert {severity for severity, _ in kinds(report)} == {"error"}


def test_shapes_and_texts_of_parameters_without_a_layout_should_agree(tmp_path):
    ranks = ranks_of({**whole(), "rng": plain("r", 3)})
    ranks[0]["rng"] = plain("r", 4)
    found = the_finding(check(tmp_path, ranks), "unlisted", "warning")
    assert (found.tensor, found.ranks) == ("rng", (0, 1, 2, 3))
    assert "differs between ranks\n  rank 0 (" in found.text


def test_a_state_of_an_odd_shape_is_pointed_out(tmp_path):
    strategy = strategy_of({"w": ROWS, "bias": Layout((2, 2), ((1,),))})
    entries = {"w": plain("w", 8, 3), "bias": plain("b", 8), "moments.w": plain("m", 5, 3)}
    found = the_finding(check(tmp_path, cut(entries, strategy), strategy), "unlisted", "warning")
    assert "moments.w: not in the strategy, and neither a slice nor" in found.text
    assert "shapes: moments.w (5, 3), w (8, 3) in slices (4, 3)" in found.text


def test_without_a_strategy_types_gaps_and_files_cut_short_are_found(tmp_path):
    ranks = ranks_of(whole())
    ranks[0]["bias"] = Entry("Int32", (4,), bytes(16))
    ranks[3]["w"] = plain("w", 12)
    ranks[5] = {"w": ranks[1]["w"]}
    report = check(tmp_path, ranks, None)
    assert [(*graded(f), f.ranks) for f in report.findings] == [
        ("error", "shape", (0, 1, 2, 3, 5)),
        ("error", "dtype", (0, 1, 2, 3)),
        ("warning", "missing_rank", (4,)),
        ("warning", "lacking", (5,)),
    ]
