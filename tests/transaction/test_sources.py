"""The sources of a run that is resumed: the same files, though not all of them could be read."""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager

import pytest

from ckpttool.formats.local import ReadFile
from tests.oracle import OracleLayout
from tests.support.checkpoint2 import Save
from tests.support.checkpoints import noise, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.manifests import MANIFEST, RECORD
from tests.support.small_sets import while_filling

pytestmark = pytest.mark.usefixtures("quick")

FILES = {"ranks": "rank_3/net.ckpt", "described": "model-0000001-0000004.safetensors"}


@contextmanager
def unread(name):
    """Let the disk fail whenever a file of this name is opened to be read."""
    begin = ReadFile.__init__

    def refuse(self, path, *how):
        if str(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        begin(self, path, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadFile, "__init__", refuse)
        yield


@pytest.fixture(params=FILES)
def case(tmp_path, request):
    """Return a command that reads slices with replicas, and the name of a file that has some."""
    entries = {f"w{n}": noise(f"w{n}", "Float32", (8, 40)) for n in range(4)}
    words = ["--max-shard-size", "1400B", "-o", tmp_path / "out", "-j", "1"]
    if request.param == "ranks":
        layout = {"dev_matrix": [2, 2], "tensor_map": [0, -1]}
        layouts = dict.fromkeys(entries, layout)
        (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": layouts}))
        rows = [slice(0, 4), slice(4, 8)] * 2
        ranks = [{name: entry.excerpt(part) for name, entry in entries.items()} for part in rows]
        write_ranks(tmp_path / "src", dict(enumerate(ranks)), "ckpt")
        words = ["-s", tmp_path / "s.json", *words]
    else:
        layout = OracleLayout((2, 2), ((0,), ()))
        Save(entries, dict.fromkeys(entries, (layout,)), 4).write_root(tmp_path / "src")
    return ["merge", tmp_path / "src", *words], FILES[request.param]


def stop(tmp_path, words):
    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with while_filling(tmp_path / "out" / "model-00003-of-00004.safetensors", fail):
        assert run(*words).exit_code == 6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_goes_on_after_a_read_error_with_a_note(tmp_path, case, is_first):
    words, name = case
    run_well(*words)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    (tmp_path / "out").rename(tmp_path / "wanted")
    if is_first:
        with unread(name):
            stop(tmp_path, words)
        result = run_well(*words, "--resume")
    else:
        stop(tmp_path, words)
        with unread(name):
            result = run_well(*words, "--resume")
    assert "2 kept, 2 written" in message(result)
    note = f"{name} could {'not ' if is_first else ''}be read before"
    assert "the run that is resumed read other replicas" in message(result)
    assert note in message(result)
    outputs = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    assert outputs == wanted
    with unread(name):
        assert "4 kept, 0 written" in message(run_well(*words, "--resume"))
    inputs = json.loads((tmp_path / "out" / MANIFEST).read_text())["inputs"]
    assert any(file["path"].endswith(name) for file in inputs) is is_first


def test_a_file_that_was_not_read_and_has_changed_since_is_another_source(tmp_path, case):
    words, name = case
    with unread(name):
        stop(tmp_path, words)
    (path,) = (tmp_path / "src").rglob(name)
    path.write_bytes(path.read_bytes())
    result = run(*words, "--resume")
    assert result.exit_code == 5
    assert f"files that differ: src/{path.relative_to(tmp_path / 'src')}" in message(result)


def test_the_record_names_what_could_not_be_read(tmp_path, case):
    words, name = case
    with unread(name):
        run_well(*words)
    stamps = json.loads((tmp_path / "out" / RECORD / "stamps.json").read_text())
    assert [file["path"].endswith(name) for file in stamps["inputs"] if not file["is_read"]] == [
        True
    ]
