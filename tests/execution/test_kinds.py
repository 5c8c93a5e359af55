"""Many small tensors: what tensors of a kind take is planned once, and each of them is checked."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

import ckpttool
from ckpttool import concurrency
from ckpttool.execution import copy, execute
from ckpttool.formats import ckpt, get_format
from ckpttool.formats.base import HeaderDigest
from ckpttool.model.manifest import UnitHashes
from ckpttool.storage import files as storage_files
from ckpttool.storage import region_io, sampling
from tests.support.plans import plan_merge, plan_reshard

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benchmark.files import strategy_path, write_checkpoint, write_strategy
from benchmark.model import Mesh, mixed_tensors

TENSORS = 400
MODEL = mixed_tensors(TENSORS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "src"
    write_checkpoint(folder, MODEL, Mesh(4, data=2))
    write_strategy(folder.with_name("target.ckpt"), MODEL, Mesh(3, data=2, axis="last"))
    return folder


def plan_of(source, out, output_format, *, reshard=False):
    catalog = ckpttool.scan(str(source))
    strategy = ckpttool.read_strategy([str(strategy_path(source))])
    options = ckpttool.OutputOptions(output_format)
    if not reshard:
        return plan_merge(catalog, strategy, str(out), output_options=options)
    target = ckpttool.read_strategy([str(source.with_name("target.ckpt"))])
    return plan_reshard(catalog, strategy, target, str(out), output_options=options)


def count_calls(monkeypatch, owner, name, calls):
    real = getattr(owner, name)

    def spy(*args, **kwargs):
        calls[name] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors", "hdf5"])
def test_units_of_a_kind_are_planned_once_and_each_is_read_hashed_and_written(
    source, tmp_path, monkeypatch, output_format
):
    calls = Counter()
    for owner, name in (
        (copy, "plan_band"),
        (copy, "is_there"),
        (region_io, "check_cancelled"),
        (region_io, "open_descriptor"),
    ):
        count_calls(monkeypatch, owner, name, calls)
    for name in ("write_bytes", "read_piece"):
        count_calls(monkeypatch, region_io.FlatFiles, name, calls)
    count_calls(monkeypatch, UnitHashes, "add", calls)
    count_calls(monkeypatch, storage_files, "verify_header", calls)
    plan, assignment = plan_of(source, tmp_path / "out", output_format)
    kinds = {tensor.kind for output in plan for tensor in output.tensors}
    pieces = sum(
        len([*tensor.pieces(tensor.region)]) for output in plan for tensor in output.tensors
    )
    calls.clear()  # those of samples
    execute.execute(plan, assignment)
    assert len(kinds) < TENSORS
    assert calls == {
        "plan_band": len(kinds),
        "is_there": 1,  # whether the run has ended
        "check_cancelled": pieces,
        "open_descriptor": len(plan.inputs[0].files) + 1,  # which compares the stamps of sources
        "read_piece": pieces,
        "write_bytes": TENSORS,
        "add": TENSORS,
        "verify_header": 1,
    }


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("band_bytes", [1 << 10, copy.CopyOptions().band_bytes])
def test_outputs_are_those_of_tensors_that_are_planned_one_by_one(
    source, tmp_path, monkeypatch, reshard, band_bytes
):
    written = []
    for name, bands, pieces_per_move in (
        ("alone", 0, copy.PIECES_PER_MOVE),
        ("known", copy.KNOWN_BANDS, copy.PIECES_PER_MOVE),
        ("known in part", copy.KNOWN_BANDS, copy.CopyOptions().task_pieces // 5),
    ):
        monkeypatch.setattr(copy, "KNOWN_BANDS", bands)
        monkeypatch.setattr(copy, "PIECES_PER_MOVE", pieces_per_move)
        (tmp_path / name).mkdir()
        plan, assignment = plan_of(source, tmp_path / name / "out", "ckpt", reshard=reshard)
        with ckpttool.open_engine("threads:2") as executor:
            options = copy.CopyOptions(band_bytes)
            execute.execute(plan, assignment, executor, options=options)
        folder = tmp_path / name
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append(
            {p.relative_to(folder): p.read_bytes() for p in paths if ".ckpttool" not in str(p)}
        )
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("bound", [1, concurrency.SMALL_BYTES])
def test_threads_take_turns_with_small_tensors(source, tmp_path, monkeypatch, bound):
    monkeypatch.setattr(concurrency, "SMALL_BYTES", bound)
    turns = Counter()
    for owner, name in ((copy, "read_bands"), (sampling, "_neighbours")):
        real = getattr(owner, name)

        def spy(*args, name=name, real=real):
            turns[name, concurrency._TURN.locked()] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, spy)
    execute.execute(*plan_of(source, tmp_path / "out", "ckpt"))
    assert turns == {("read_bands", bound > 1): 1, ("_neighbours", bound > 1): 8}


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors", "hdf5"])
def test_headers_of_outputs_are_read_back_and_compared_with_the_planned_ones(
    source, tmp_path, monkeypatch, output_format
):
    plan, assignment = plan_of(source, tmp_path / "out", output_format, reshard=True)
    assert [len(ranks) for ranks in plan.headers] == [6]
    calls = Counter()
    is_ckpt = output_format == "ckpt"  # which parses what is before its trailer
    parser = (ckpt, "_read_tensors") if is_ckpt else (type(get_format(output_format)), "read_index")
    count_calls(monkeypatch, *parser, calls)
    count_calls(monkeypatch, HeaderDigest, "is_in", calls)
    execute.execute(plan, assignment)
    assert calls == {"is_in": 6}


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors", "hdf5"])
def test_damage_to_a_header_that_equals_another_is_found(
    source, tmp_path, monkeypatch, output_format
):
    plan, assignment = plan_of(source, tmp_path / "out", output_format, reshard=True)
    name = plan.transfers[TENSORS // 2].name.encode()
    if output_format == "hdf5":
        name = b"BTHD"  # of the index of names; libhdf5 1.14.2 ends with a damaged name
    checked = []

    def damage(file, *given):
        if len(checked) == 3:
            data = Path(file.path).read_bytes()
            Path(file.path).write_bytes(data.replace(name, name[:-1] + b"_", 1))
        checked.append(file.path)
        return real(file, *given)

    real = storage_files.verify_header
    monkeypatch.setattr(storage_files, "verify_header", damage)
    with pytest.raises(ckpttool.CkptToolError):
        execute.execute(plan, assignment)
    assert len(checked) == 4
