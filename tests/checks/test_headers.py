"""What ``verify`` finds in headers: damaged files, types, shapes, and what some ranks lack."""

import os

from tests.support.checkpoints import write_file
from tests.support.corpus import GOLDEN
from tests.support.reports import check, kinds, ranks_of, the_finding, verify, whole


def test_a_single_damaged_file_is_a_finding_and_no_error(tmp_path):
    write_file(tmp_path / "m.ckpt", whole(), "ckpt")
    (tmp_path / "m.ckpt").write_bytes((tmp_path / "m.ckpt").read_bytes()[:-1])
    found = the_finding(verify(str(tmp_path / "m.ckpt")), "damaged")
    assert found.text.startswith(f"{tmp_path}/m.ckpt: the file is cut short\n  byte ")


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
