"""What is checked at the destination: the places of outputs and their room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ckpttool.formats import get_format
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning import preflight
from tests.support.checkpoints import create_file
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "safetensors_pipeline"
SRC = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]
BLOCK = 512


# --------------------------------------------------------------------------------- room on the disk


@pytest.fixture
def free(monkeypatch):
    def has(nbytes):
        disk = SimpleNamespace(f_bavail=nbytes // BLOCK, f_frsize=BLOCK, f_flag=0)
        monkeypatch.setattr(preflight.os, "statvfs", lambda folder: disk)

    return has


def test_a_half_written_file_needs_no_room_that_it_has(tmp_path):
    (tmp_path / "a.ckpt.partial").write_bytes(bytes(3 * BLOCK))
    sizes = {str(tmp_path / "a.ckpt"): 2 * BLOCK + 1, str(tmp_path / "b.ckpt"): BLOCK}
    assert [space.need for space in preflight.find_space(sizes)] == [BLOCK]


@pytest.mark.big
@pytest.mark.parametrize("engine", ["inline", "threads:2", "processes:2"])
def test_a_real_disk_is_too_small_for_what_is_all_holes(tmp_path, engine):
    meta = TensorMeta("w", "Float32", (1 << 10, 1 << 30))  # 4 TiB, of which nothing is on disk
    source = tmp_path / "src.ckpt"
    create_file(get_format("ckpt"), str(source), [meta], {})
    assert source.stat().st_size > 1 << 42
    result = run("merge", source, "-o", tmp_path / "out" / "m.h5", "--engine", engine)
    assert result.exit_code == 5
    assert not mentions(message(result), str(tmp_path), "too little space: 4.0 TiB needed")
    assert files_below(tmp_path) == ["src.ckpt"]


METAS = [
    TensorMeta("layers/w", "Float32", (3, 2)),
    TensorMeta("scalar", "Int64", ()),
    TensorMeta("empty", "BFloat16", (0, 3)),
]
WITH_TEXT = [*METAS, TensorMeta("note", "str", (), "zwölf Ränge")]
WITH_MANY = [TensorMeta(f"layers.{i}.w", "Int8", (i,)) for i in range(300)]


@pytest.mark.parametrize(
    "attrs", [{}, {"crc_num": ""}, {"format": "pt", "ckpttool.source": "Ränge"}]
)
@pytest.mark.parametrize("metas", [METAS, WITH_TEXT, WITH_MANY, []])
@pytest.mark.parametrize("name", ["ckpt", "safetensors", "hdf5"])
def test_the_size_of_a_file_is_known_before_it_is_made(tmp_path, name, metas, attrs):
    output_format, path = get_format(name), tmp_path / "a.x"
    if not list(output_format.refusals(metas, attrs)):
        create_file(output_format, str(path), metas, attrs)
        size, known = path.stat().st_size, output_format.file_bytes(metas, attrs)
        assert known <= size <= (1.5 * known + 1500 if name == "hdf5" else known)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors", ".h5"])
def test_headers_count(tmp_path, free, suffix):
    metas = [TensorMeta(f"w{i}", "Int8", (1,)) for i in range(100)]
    source = tmp_path / "src.ckpt"
    create_file(get_format("ckpt"), str(source), metas, {})
    free(1024)
    result = run("merge", source, "-o", tmp_path / f"m{suffix}")
    assert result.exit_code == 5
    assert not mentions(message(result), "1.0 KiB free")


@pytest.mark.parametrize(
    "words", [["merge"], ["merge", "--max-shard-size", "10KB"], ["reshard", "-d", SRC[2]]]
)
def test_all_outputs_count_together(tmp_path, free, words):
    out = tmp_path / ("m.ckpt" if words == ["merge"] else "out")
    run_well(words[0], *SRC, "-o", out, *words[1:])
    old = files_below(tmp_path)
    nbytes = sum((tmp_path / name).stat().st_size for name in old)
    free(nbytes // 2)
    again = [words[0], *SRC, "-o", out, *words[1:]]
    result = run(*again, "--overwrite")
    assert result.exit_code == 5
    assert not mentions(message(result), " free", "replaced outputs stay until")
    assert files_below(tmp_path) == old
    free(nbytes + BLOCK)
    run_well(*again, "--overwrite")


def test_what_is_new_replaces_nothing(tmp_path, free):
    free(BLOCK)
    result = run("merge", *SRC, "-o", tmp_path / "m.ckpt")
    assert result.exit_code == 5
    assert "too little space" in message(result)
    assert "what is replaced" not in message(result)
    assert not files_below(tmp_path)
