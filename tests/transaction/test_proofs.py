"""Manifests and the files of records prove themselves: none that was changed is used."""

from __future__ import annotations

import errno
import json
import os
from hashlib import sha256
from pathlib import Path

import pytest

from ckpttool.problems import FormatError
from ckpttool.transaction.sealed_files import ManifestFile
from tests.support.commands import message, run, run_well
from tests.support.manifests import LOG, MANIFEST, PLAN, RECORD, STAMPS
from tests.support.small_sets import SmallSet, in_parts

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def small(tmp_path):
    return SmallSet(tmp_path)


def damaged(data, step):
    for at in range(0, len(data), step):
        flipped = data[at] ^ (1 << at % 8)
        yield data[:at] + bytes([flipped]) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]
        yield data[:at]
    for more in (b" ", b"\n", b"\0", b"{}", b"]}\n", data):
        yield data + more


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_a_byte_more_or_less_or_another_makes_a_listing_damaged(small, step):
    in_parts(small)
    plan = small.out / PLAN
    contents = {plan: plan.read_bytes()}
    run_well("finalize", small.out)
    contents |= {path: path.read_bytes() for path in (small.out / MANIFEST, small.out / STAMPS)}
    for path, data in contents.items():
        assert json.loads(data)["schema"] == 1
        for changed in damaged(data, step):
            path.write_bytes(changed)
            with pytest.raises(FormatError, match=r"changed since it was|no checksum at its end"):
                ManifestFile.read(path)


def test_a_part_is_not_gone_on_from_beside_a_damaged_manifest_of_the_set(small):
    in_parts(small)
    run_well("finalize", small.out)
    small.run_well("--part", "1/2", "--resume")
    small.manifest.write_bytes(small.manifest.read_bytes().replace(b"Int8", b"Int9"))
    printed = message(small.run("--part", "1/2", "--resume"))
    assert "ckpttool.json: changed since it was written" in printed
    assert "--overwrite" in printed


def test_a_commit_is_done_again_if_its_manifest_is_gone_and_the_parts_are_not(small):
    def is_refused():
        result = run("finalize", small.out)
        return result.exit_code == 3 and "put a copy of it back, or write" in message(result)

    in_parts(small)
    record = {path: path.read_bytes() for path in (small.out / RECORD).iterdir()}
    run_well("finalize", small.out)
    good = small.manifest.read_bytes()
    small.manifest.write_bytes(good[:-9])
    (small.out / LOG).touch()  # and no plan
    assert is_refused()
    (small.out / LOG).unlink(missing_ok=True)
    for path, data in record.items():
        path.write_bytes(data)
    assert is_refused()
    for path, data in record.items():
        path.write_bytes(data)
    small.manifest.unlink()
    run_well("finalize", small.out)
    assert small.manifest.read_bytes() == good


def test_the_checksum_is_that_of_the_lines_before_it(small):
    small.run_well()
    *lines, last = small.manifest.read_bytes().splitlines(keepends=True)
    digest = sha256(b"".join(lines)).hexdigest()
    assert last == f'], "sha256": "{digest}"}}\n'.encode()


def test_a_file_of_another_name_in_the_record_is_left_alone(small):
    path = small.out / RECORD / "notes.log"
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    small.run_well()
    small.run_well("--overwrite")
    run_well("verify", small.out, "-s", small.strategy)
    assert path.read_text() == "theirs"


@pytest.mark.parametrize("write", [SmallSet.run_well, in_parts])
def test_a_plan_that_cannot_be_removed_makes_no_finished_set_unfinished(small, write, monkeypatch):
    unlink = Path.unlink

    def fail(path, **how):
        if path.name == "plan.json":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        write(small)
        for _ in range(2):
            run_well("finalize", small.out)
    run_well("verify", small.out, "-s", small.strategy)
    assert (small.out / PLAN).exists()
    small.run_well("--resume")
    assert not (small.out / PLAN).exists()
