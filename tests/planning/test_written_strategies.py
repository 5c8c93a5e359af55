"""``--write-strategy`` and runs that fail; what it says is in ``e2e/sessions/written.txt``."""

from __future__ import annotations

import errno
import os

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.storage.files import write_document
from ckpttool.strategy_files.reader import read_strategy
from tests.support.commands import files_below, run, run_well
from tests.support.executors import CASE, contents, ordered_words
from tests.support.manifests import MANIFEST
from tests.support.plans import plan_reshard


def words_of(folder, *more):
    return [*ordered_words(folder), "--write-strategy", folder / "s.ckpt", *more]


def test_it_is_not_there_if_the_run_fails_and_an_old_one_is_gone(tmp_path, failing):
    run_well(*words_of(tmp_path))
    whole = contents(tmp_path)
    failing("rank_2")
    assert run(*words_of(tmp_path), "--overwrite").exit_code == 6
    assert "s.ckpt" not in files_below(tmp_path)
    failing(None)
    run_well(*words_of(tmp_path), "--resume", "--overwrite")
    assert contents(tmp_path) == whole


def test_a_run_that_ended_between_it_and_the_manifest_is_continued(tmp_path, monkeypatch):
    run_well(*words_of(tmp_path / "whole"))

    def refuse(path, content):
        if path.endswith(MANIFEST):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write_document(path, content)

    with monkeypatch.context() as patch:
        patch.setattr("ckpttool.transaction.record.write_document", refuse)
        assert run(*words_of(tmp_path / "out")).exit_code == 6
    assert "s.ckpt" in files_below(tmp_path / "out")
    run_well(*words_of(tmp_path / "out"), "--resume")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    run_well(*words_of(tmp_path / "out"), "--resume")
    (tmp_path / "out" / "s.ckpt").write_bytes(b"of somebody")
    assert run(*words_of(tmp_path / "out"), "--resume").exit_code == 5


def test_that_of_a_hand_written_target_is_that_of_the_outputs(tmp_path):
    target, written = tmp_path / "four.yaml", tmp_path / "s.json"
    lines = '"*.wq.weight": {axis: 1}\n  "adam_*": {axis: 0}\notherwise: replicated\n'
    target.write_text(f"ckpttool_strategy: 1\nranks: 4\nparameters:\n  {lines}")
    source = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]
    run_well("reshard", *source, "-d", target, "-o", tmp_path / "out", "--write-strategy", written)
    run_well("diff", source[0], tmp_path / "out", *source[1:], "--b-strategy", written)


def test_one_that_mindspore_could_not_read_is_an_error_before_the_first_byte(tmp_path):
    src, dst = (read_strategy(str(CASE / f"{side}_strategy.ckpt")) for side in ("src", "dst"))
    options = ckpttool.OutputOptions(strategy_path=str(tmp_path / "s.ckpt"))
    out, odd = str(tmp_path / "out"), replace(dst, stages=2)
    catalog = ckpttool.scan(str(CASE / "src"))
    with pytest.raises(ckpttool.StrategyError, match="no parameter of stage 1"):
        plan_reshard(catalog, src, odd, out, output_options=options)
    assert files_below(tmp_path) == []
