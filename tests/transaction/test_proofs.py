"""Manifests and the files of records prove themselves: none that was changed is used."""

from __future__ import annotations

import errno
import json
import os
from hashlib import sha256
from pathlib import Path

import pytest

import ckpttool
from ckpttool.operations.verification import verify as find_problems
from ckpttool.problems import CkptToolError, FormatError, PlanError
from ckpttool.transaction.sealed_files import ManifestFile
from tests.support.checkpoints import noise, write_file
from tests.support.commands import run_well
from tests.support.executors import reshard_words
from tests.support.manifests import LOG, MANIFEST, PLAN, RECORD, STAMPS

PART_LOG = f"{RECORD}/1-of-2.log"
PARTS = ((1, 2), (2, 2))
IN_THE_WAY = "in the way of the record of the run"


class Small:
    """A split of four bytes for two ranks, whole or in two parts, and what is done with it."""

    def __init__(self, folder):
        self.out = folder / "out"
        layout = {"dev_matrix": [2], "tensor_map": [0]}
        (folder / "s.json").write_text(json.dumps({"parallel_layout_item": {"w": layout}}))
        write_file(folder / "m.ckpt", {"w": noise("w", "Int8", (4,))}, "ckpt")
        self.strategy = ckpttool.read_strategy([str(folder / "s.json")])
        self.catalog = ckpttool.scan(str(folder / "m.ckpt"))

    def write(self, *parts, **how):
        for part in parts or (None,):
            options = ckpttool.OutputOptions("ckpt", part=part, **how)
            ckpttool.execute(
                *ckpttool.plan_split(
                    self.catalog, self.strategy, str(self.out), output_options=options
                )
            )

    def resume(self):
        self.write(resume=True)

    def resume_part(self):
        self.write((1, 2), resume=True)

    def commit(self):
        ckpttool.finalize(str(self.out))

    def verify(self, deep=False):
        report = find_problems(ckpttool.scan(str(self.out)), self.strategy, deep=deep)
        if report.findings:
            raise PlanError(report.findings)

    def verify_deep(self):
        self.verify(deep=True)


@pytest.fixture
def small(tmp_path):
    return Small(tmp_path)


def damaged(data, step=1):
    for at in range(0, len(data), step):
        flipped = data[at] ^ (1 << at % 8)
        yield data[:at] + bytes([flipped]) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]
        yield data[:at]
    for more in (b" ", b"\n", b"\0", b"{}", b"]}\n", data):
        yield data + more


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [(MANIFEST, ()), (STAMPS, ()), (PLAN, PARTS)])
def test_a_byte_more_or_less_or_another_makes_a_listing_damaged(small, name, parts):
    small.write(*parts)
    path = small.out / name
    data = path.read_bytes()
    assert json.loads(data)["schema"] == 1
    for one in damaged(data):
        path.write_bytes(one)
        with pytest.raises(
            FormatError, match=r"changed since it was written|no checksum at its end"
        ):
            ManifestFile.read(path)


@pytest.mark.parametrize(
    ("name", "parts", "act"),
    [
        (MANIFEST, (), Small.verify),
        (MANIFEST, (), Small.verify_deep),
        (MANIFEST, (), Small.commit),
        (MANIFEST, (), Small.resume),
        (STAMPS, (), Small.resume),
        (PLAN, PARTS, Small.commit),
        (PLAN, PARTS, Small.resume),
        (PLAN, PARTS, Small.resume_part),
    ],
)
def test_nothing_goes_on_from_a_damaged_listing(small, name, parts, act):
    small.write(*parts)
    path = small.out / name
    data = path.read_bytes()
    before = [one.stat() for one in small.out.rglob("*")]
    for one in damaged(data, step=31):
        with path.open("r+b") as file:
            file.write(one)
            file.truncate()
        with pytest.raises(CkptToolError) as caught:
            act(small)
        assert f"{path}: " in str(caught.value)
        assert path.read_bytes() == one
    assert [one.stat().st_ino for one in small.out.rglob("*")] == [one.st_ino for one in before]
    path.write_bytes(data)
    act(small)


@pytest.mark.parametrize("act", [Small.commit, Small.resume, Small.resume_part])
def test_nothing_goes_on_from_a_damaged_log(small, act):
    small.write(*PARTS)
    path = small.out / PART_LOG
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1)
    for at in range(0, last, 31):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        path.write_bytes(changed)
        with pytest.raises(CkptToolError) as caught:
            act(small)
        assert f"{path}: " in str(caught.value)
        assert "a line has changed since it was written" in str(caught.value)
        assert path.read_bytes() == changed
    path.write_bytes(data)
    act(small)


def test_a_part_is_not_gone_on_from_beside_a_damaged_manifest_of_the_set(small):
    small.write(*PARTS)
    small.commit()
    small.resume_part()
    path = small.out / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"Int8", b"Int9"))
    with pytest.raises(
        CkptToolError, match=r"(?s)ckpttool\.json: changed since it was written.*--overwrite"
    ):
        small.resume_part()


def test_a_commit_that_was_killed_does_not_end_with_a_damaged_manifest(small):
    small.write(*PARTS)
    small.commit()
    (small.out / LOG).touch()
    path = small.out / MANIFEST
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FormatError, match=r"ckpttool\.json: .*; put a copy of it back, or write"):
        small.commit()


def test_a_commit_is_done_again_if_its_manifest_is_gone_and_the_parts_are_not(small):
    small.write(*PARTS)
    names = (PLAN, PART_LOG, f"{RECORD}/2-of-2.log")
    kept = {name: (small.out / name).read_bytes() for name in names}
    small.commit()
    path = small.out / MANIFEST
    good = path.read_bytes()
    for name, data in kept.items():
        (small.out / name).write_bytes(data)
    path.write_bytes(good[:-9])
    with pytest.raises(FormatError, match=r"ckpttool\.json: .*; put a copy of it back, or write"):
        small.commit()
    for name, data in kept.items():
        (small.out / name).write_bytes(data)
    path.unlink()
    small.commit()
    assert path.read_bytes() == good


def test_the_checksum_is_that_of_the_lines_before_it(tmp_path):
    run_well(*reshard_words(tmp_path, "ckpt"))
    *lines, last = (tmp_path / MANIFEST).read_bytes().splitlines(keepends=True)
    digest = sha256(b"".join(lines)).hexdigest()
    assert last == f'], "sha256": "{digest}"}}\n'.encode()


@pytest.mark.parametrize(
    ("name", "parts", "act", "said"),
    [
        (MANIFEST, (), Small.commit, ": a pipe or a device, not a file"),
        (MANIFEST, (), Small.resume, " is a device or a pipe\n  Try: move it away, or -o with"),
        (LOG, (), Small.resume, f": {IN_THE_WAY}"),
        (STAMPS, (), Small.resume, f": {IN_THE_WAY}"),
        (PLAN, PARTS, Small.commit, f": {IN_THE_WAY}"),
        (PLAN, PARTS, Small.resume_part, f": {IN_THE_WAY}"),
        (PART_LOG, PARTS, Small.commit, f": {IN_THE_WAY}"),
        (PART_LOG, PARTS, Small.resume, f": {IN_THE_WAY}"),
        (PART_LOG, PARTS, Small.resume_part, f": {IN_THE_WAY}"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_of_ours_is_not_waited_for(small, name, parts, act, said):
    small.write(*parts)
    path = small.out / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CkptToolError) as caught:
        act(small)
    assert f"{path}{said}" in str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "link"])
@pytest.mark.parametrize(
    "name", ["1-of-2.log", "lock", "plan.json", "plan.json.partial", "stamps.json.partial"]
)
def test_what_is_no_file_in_the_record_is_named_before_the_first_byte(small, name, kind):
    path = small.out / RECORD / name
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else path.symlink_to("elsewhere")
    for overwrite in (False, True):
        with pytest.raises(PlanError, match=IN_THE_WAY) as caught:
            small.write(overwrite=overwrite)
        assert f"{path}: {IN_THE_WAY}\n  Try: move it away" in str(caught.value)
    assert [one.name for one in small.out.iterdir()] == [RECORD]


def test_a_file_of_another_name_in_the_record_is_left_alone(small):
    path = small.out / RECORD / "notes.log"
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    small.write()
    small.write(overwrite=True)
    small.verify()
    assert path.read_text() == "theirs"


@pytest.mark.parametrize("parts", [(), PARTS])
def test_a_plan_that_cannot_be_removed_makes_no_finished_set_unfinished(small, parts, monkeypatch):
    unlink = Path.unlink

    def fail(path, **how):
        if path.name == "plan.json":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        small.write(*parts)
        if parts:
            small.commit()
        small.commit()
    small.verify()
    assert (small.out / PLAN).exists()
    small.resume()
    assert not (small.out / PLAN).exists()
