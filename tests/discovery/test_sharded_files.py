"""Undivided checkpoints in several files: found by their index, and held against it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ckpttool
from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.problems import FormatError, PlanError
from tests.support.checkpoints import noise, write_file, write_indexed
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read, read_indexed, read_ranks
from tests.support.scans import notes_of, problems_of

MODEL = {
    "part0.safetensors": {"w": noise("w", "Float32", (8, 4)), "b": noise("b", "Float16", (4,))},
    "part1.safetensors": {"v": noise("v", "BFloat16", (4, 4))},
}
REST = {"global_step": noise("s", "Int32", (1,)), "scale": noise("t", "Float32", ())}
ALL = {name: entry for file in (*MODEL.values(), REST) for name, entry in file.items()}
DST = GOLDEN / "safetensors_crc" / "dst_strategy.ckpt"


@pytest.fixture
def model(tmp_path):
    """A folder as MindSpore writes it."""
    return write_indexed(tmp_path / "model", MODEL, rest=REST)


def rewrite(folder, change, index="param_name_map.json"):
    """Change what an index says."""
    path = folder / index
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


# ------------------------------------------------------------------------------------ found


def test_files_are_numbered_in_order_and_what_goes_to_every_rank_is_last(tmp_path):
    files = {f"part{i}.safetensors": {f"w{i}": noise("w", "Int8", (2,))} for i in (10, 9, 0)}
    folder = write_indexed(tmp_path, files, rest=REST)
    catalog = scan(str(folder))
    assert catalog.is_merged
    assert [file.path.rsplit("/")[-1] for file in catalog.files.values()] == [
        "part0.safetensors",
        "part9.safetensors",
        "part10.safetensors",
        "hyper_param.safetensors",
    ]
    assert list(catalog.files) == [0, 1, 2, 3]
    assert catalog.common_tensors == dict.fromkeys(REST, False)
    assert not catalog.diagnostics


def test_numbers_in_an_index_may_have_any_number_of_digits(model):
    names = [f"part{'1' * 5000}.safetensors", f"a/{'0' * 4999}2.h5", f"b/{'3' * 100}/x.h5"]
    rewrite(model, lambda document: document["weight_map"].update(zip("xyz", names, strict=True)))
    result = run("inspect", model)
    assert result.exit_code != 0
    assert "internal error" not in message(result)
    assert not mentions(message(result), "File name too long|the file is missing")


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
def test_merge_makes_one_file_of_it(model, tmp_path, format):
    out = tmp_path / f"full.{'h5' if format == 'hdf5' else format}"
    run_well("merge", model, "-o", out)
    assert read(out) == ALL


def test_merge_takes_the_index_as_well_as_the_folder(model, tmp_path):
    run_well("merge", model / "param_name_map.json", "-o", tmp_path / "full.ckpt")
    assert read(tmp_path / "full.ckpt") == ALL


@pytest.mark.parametrize(
    "index", ["model.safetensors.index.json", "ms-model.safetensors.index.json"]
)
def test_a_folder_of_hugging_face_is_read(tmp_path, index):
    files = {f"model-0000{i + 1}-of-00002.safetensors": e for i, e in enumerate(MODEL.values())}
    folder = write_indexed(tmp_path / "model", files, index)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    for src in (folder, folder / index):
        run_well("merge", src, "-o", tmp_path / "full.ckpt", "--overwrite")
        assert read(tmp_path / "full.ckpt").keys() == ALL.keys() - REST.keys()


def test_files_in_folders_below_are_found(tmp_path):
    folder = write_indexed(tmp_path, {"sub/a.ckpt": {"w": noise("w", "Int8", (2,))}})
    assert list(scan(str(folder)).files[0].tensors) == ["w"]


def test_a_folder_with_one_model_safetensors_is_that_file(tmp_path):
    write_file(tmp_path / "model.safetensors", MODEL["part0.safetensors"], "safetensors")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    catalog = scan(str(tmp_path))
    assert catalog.is_merged
    assert list(catalog.files[0].tensors) == ["w", "b"]
    document = json.loads(run_well("inspect", tmp_path, "--json").stdout)
    assert document["path"] == str(tmp_path / "model.safetensors")
    write_file(tmp_path / "other.safetensors", MODEL["part1.safetensors"], "safetensors")
    with pytest.raises(PlanError, match="no rank folders"):
        scan(str(tmp_path))


def test_two_indexes_that_say_the_same_are_one(model):
    shutil.copy(model / "param_name_map.json", model / "model.safetensors.index.json")
    assert len(scan(str(model)).indexes) == 2
    rewrite(model, lambda index: index["weight_map"].pop("v"))
    (problem,) = problems_of(model)
    assert (
        "index files that contradict each other\n  model.safetensors.index.json, param" in problem
    )
    assert len(scan(str(model / "model.safetensors.index.json")).indexes) == 1


def test_rank_folders_beside_an_index_are_one_checkpoint_too_many(model):
    write_file(model / "rank_0" / "net.ckpt", REST, "ckpt")
    (problem,) = problems_of(model)
    assert "two checkpoints: an index and rank folders\n  param_name_map.json; rank_0\n" in problem
    assert problem.endswith("param_name_map.json as SRC, or --pattern 'rank_{rank}/*'")
    assert len(scan(str(model / "param_name_map.json")).files) == 3
    assert list(scan(str(model), SourceOptions(pattern="rank_{rank}/*")).files[0].tensors) == list(
        REST
    )


def test_without_an_index_nobody_knows_whether_all_parts_are_there(model):
    (model / "param_name_map.json").unlink()
    (problem,) = problems_of(model)
    assert "parts of a checkpoint without their index" in problem
    assert "hyper_param.safetensors, part0.safetensors, part1.safetensors; expected" in problem
    assert "param_name_map.json" in problem


def test_without_hyper_param_there_is_nothing_but_the_parameters(model, tmp_path):
    (model / "hyper_param.safetensors").unlink()
    run_well("merge", model, "-o", tmp_path / "full.ckpt")
    assert read(tmp_path / "full.ckpt").keys() == ALL.keys() - REST.keys()


def test_a_single_part_is_taken_for_the_whole_with_a_note(model):
    path = model / "part0.safetensors"
    assert list(scan(str(path)).files[0].tensors) == ["w", "b"]
    (text,) = notes_of(path)
    assert text.startswith(
        f"{path}: read as a checkpoint of one file\n  param_name_map.json beside"
    )
    assert text.endswith(f"Try: {model}/param_name_map.json as SRC, to read them all")


# --------------------------------------------------------------------------------- held against


def test_everything_that_does_not_fit_is_told_at_once(model):
    write_file(
        model / "part1.safetensors",
        {"b": noise("b", "Float16", (4,)), "x": noise("x", "Int8", (3,))},
        "safetensors",
    )
    write_file(model / "hyper_param.safetensors", {"w": noise("w", "Int8", ())}, "safetensors")

    def change(index):
        index["weight_map"] |= {
            "gone": "part7.safetensors",
            "out": "../part0.safetensors",
            "root": "/etc/passwd",
        }

    rewrite(model, change)
    index = f"{model}/param_name_map.json"
    one = f"{model}/part1.safetensors"
    found = [problem.split("\n")[:2] for problem in problems_of(model)]
    assert found == [
        [
            f"{index}: '../part0.safetensors' is not below the folder of the index",
        ],
        [
            f"{index}: '/etc/passwd' is not below the folder of the index",
        ],
        [
            f"{model}/part7.safetensors: the file is missing",
            f"  {index} lists 1 tensor (gone) in it",
        ],
        [f"{one}: the file lacks tensors", f"  1 tensor (v); listed in {index}"],
        [
            f"{one}: the file holds tensors that are not in the index",
            f"  1 tensor (x); the index is {index}",
        ],
    ]
    result = run("merge", model, "-o", model / "full.ckpt")
    assert result.exit_code == 5
    assert result.stderr.count("error[") == 5


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_the_index_decides_which_of_two_copies_is_read(tmp_path, format):
    """Two overlays: one with other bytes and one of another shape; and a copy of equal bytes."""
    src, out = tmp_path / "model", tmp_path / f"out.{format}"
    old = {name: noise(name, "Float32", (8, 4)) for name in ("a", "b", "c", "kept")}
    new = {"a": noise("A", "Float32", (8, 4)), "b": noise("B", "Float16", (3,)), "c": old["c"]}
    base, over = f"base-1.{format}", f"over-1.{format}"
    write_indexed(src, {base: old})
    write_file(src / over, new, format)
    rewrite(src, lambda index: index["weight_map"].update(dict.fromkeys(new, over)))
    result = run_well("merge", src, "-o", out)
    assert read(out) == {**old, **new}
    said = message(result)
    assert f"warning[overlay]: {src}/{base}: other copies of tensors" in said
    assert f"2 tensors (a, b), read from {src}/{over}" in said
    assert f"note: {src}/{base}: equal copies" in said
    assert f"1 tensor (c), read from {src}/{over}" in said
    assert run("merge", src, "-o", tmp_path / f"x.{format}", "--strict").exit_code == 5
    for words in (("inspect", src), ("verify", src), ("verify", src, "--deep")):
        said = message(run(*words))
        assert "warning[overlay]" in said
        assert f"Try: ckpttool merge {src} -o NEW --max-shard-size 10GB" in said
    run_well("merge", src, "-o", tmp_path / "NEW", "--max-shard-size", "10GB")
    assert "overlay" not in message(run_well("verify", tmp_path / "NEW", "--deep"))
    assert len(json.loads(run_well("inspect", src, "--json").stdout)["tensors"]) == 4


def test_equal_copies_are_no_contradiction(model):
    write_file(model / "part2.safetensors", {"w": MODEL["part0.safetensors"]["w"]}, "safetensors")
    rewrite(model, lambda index: index["weight_map"].update(w="part2.safetensors"))
    (model / "model.safetensors.index.json").unlink(missing_ok=True)
    run_well("verify", model, "--deep")
    run_well("merge", model, "-o", model / "full.ckpt", "--strict")


def test_damaged_parts_are_told_with_what_else_is_wrong(model):
    (model / "part1.safetensors").write_bytes(b"\xff" * 20)
    catalog = scan(str(model))
    assert list(catalog.damaged) == [1]
    assert not catalog.diagnostics  # the total size cannot be told
    result = run("merge", model, "-o", model / "full.ckpt")
    assert result.exit_code == 3
    assert "part1.safetensors" in message(result)
    rewrite(model, lambda index: index["weight_map"].update(gone="part7.safetensors"))
    assert [problem.split(": ")[0].rsplit("/")[-1] for problem in problems_of(model)] == [
        "part1.safetensors",
        "part7.safetensors",
    ]


def test_a_damaged_index_is_the_error(model):
    (model / "param_name_map.json").write_bytes(b"{")
    with pytest.raises(FormatError, match=r"param_name_map\.json: not valid JSON"):
        scan(str(model))


def test_a_wrong_total_size_is_doubtful_and_no_more(model, tmp_path):
    rewrite(model, lambda index: index["metadata"].update(total_size=5))
    (note,) = scan(str(model)).diagnostics
    assert note.code == "doubt"
    assert note.message == "total_size is wrong"
    assert note.facts == "expected 168 bytes, found 5; every tensor is complete"
    run_well("merge", model, "-o", tmp_path / "full.ckpt")


def test_other_checkpoint_files_are_passed_over_with_a_note(model):
    write_file(model / "part2.safetensors", REST, "safetensors")
    assert notes_of(model) == [f"{model}: 1 file not in the index: ignored\n  part2.safetensors"]


# ---------------------------------------------------------------- one rank's slices in hyper_param


def with_rest(tmp_path, **entries):
    return write_indexed(tmp_path / "model", MODEL, rest=REST | entries)


SLICES = {
    "accu_grads.w": noise("g", "Float32", (4, 4)),
    "accu_grads.b": noise("h", "Float16", (1,)),  # b is cut into single elements
    "moments.dropped": noise("m", "Float32", (2, 2)),
    "dropped": noise("d", "Float32", (2, 2)),  # a slice like its state
}
WHOLE = {
    "accu_grads.v": noise("n", "BFloat16", (4, 4)),
    "moments.scale": noise("n", "Float32", ()),
    "moments.other": noise("n", "Float32", (1, 1)),
}


def test_what_may_be_one_ranks_slice_is_a_question(tmp_path):
    folder = with_rest(tmp_path, **SLICES, **WHOLE)
    for words in (["merge", folder, "-o"], ["split", folder, "-d", DST, "-o"]):
        for how in ([], ["--unlisted", "rank"]):
            result = run(*words, tmp_path / "out", *how)
            assert result.exit_code == 5
            told = message(result)
            assert "accu_grads.w (4, 4), of w (8, 4)" in told
            assert "and 1 more" in told
            assert "moments.dropped (2, 2)" in told
            assert ", dropped (2, 2)" in told
            assert "--unlisted drop" in told
            assert not [name for name in WHOLE if name in told]
    assert files_below(tmp_path) == [
        f"model/{name}"
        for name in (
            "hyper_param.safetensors",
            "param_name_map.json",
            "part0.safetensors",
            "part1.safetensors",
        )
    ]


def test_the_user_decides_about_what_may_be_a_slice(tmp_path):
    folder = with_rest(tmp_path, **SLICES, **WHOLE)
    out = tmp_path / "full.ckpt"
    result = run_well("merge", folder, "-o", out, "--unlisted", "drop")
    assert read(out) == ALL | WHOLE
    assert "an entry in the index are dropped" in message(result)
    result = run_well("merge", folder, "-o", out, "--overwrite", "--unlisted", "first")
    assert read(out) == ALL | WHOLE | SLICES
    assert "an entry in the index are taken in full" in message(result)


def test_inspect_points_out_what_may_be_a_slice(tmp_path):
    folder = with_rest(tmp_path, **SLICES, **WHOLE)
    document = json.loads(run_well("inspect", folder, "--json").stdout)
    (note,) = document["notes"]
    assert note["code"] == "doubt"
    assert "accu_grads.w (4, 4), of w (8, 4)" in note["text"]
    assert {tensor["name"] for tensor in document["tensors"]} == {*ALL, *WHOLE, *SLICES}


def test_what_an_index_names_is_whole(tmp_path):
    files = MODEL | {"hyper_param.safetensors": REST | SLICES}
    folder = write_indexed(tmp_path / "model", files, "model.safetensors.index.json")
    run_well("merge", folder, "-o", tmp_path / "full.ckpt")
    assert read(tmp_path / "full.ckpt") == ALL | SLICES


# ------------------------------------------------------------------------------------ commands


def test_inspect_lists_every_tensor_with_its_file(model):
    document = json.loads(run_well("inspect", model, "--json").stdout)
    assert document["schema"] == 1
    assert document["path"] == str(model)
    assert document["format"] == "safetensors"
    assert document["indexes"] == [str(model / "param_name_map.json")]
    assert document["nbytes"] == sum(p.stat().st_size for p in model.glob("*.safetensors"))
    assert [(f["path"], f["tensors"]) for f in document["files"]] == [
        (str(model / "part0.safetensors"), 2),
        (str(model / "part1.safetensors"), 1),
        (str(model / "hyper_param.safetensors"), 2),
    ]
    assert document["tensors"][0] == {
        "name": "w",
        "dtype": "Float32",
        "shape": [8, 4],
        "nbytes": 128,
        "file": str(model / "part0.safetensors"),
    }
    assert (document["notes"], document["problems"]) == ([], [])
    text = run_well("inspect", model, "--all").stdout
    assert all(name in text for name in (*ALL, "part1.safetensors", "3 files"))


def test_inspect_shows_what_can_be_read_of_a_damaged_one(model):
    (model / "part1.safetensors").write_bytes(b"\xff" * 20)
    result = run("inspect", model, "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert {tensor["name"] for tensor in document["tensors"]} == {*ALL} - {"v"}
    assert "part1.safetensors" in document["problems"][0]["text"]


def gone(model):
    (model / "part1.safetensors").unlink()
    return "missing", f"{model}/part1.safetensors: the file is missing"


def moved(model):
    rewrite(model, lambda index: index["weight_map"].update(w="part1.safetensors"))
    return "damaged", f"{model}/part0.safetensors: the file holds tensors that the index lists in"


def without_index(model):
    (model / "param_name_map.json").unlink()
    return (
        "missing",
        f"{model}: parts of a checkpoint without their index",
    )


@pytest.mark.parametrize("harm", [gone, moved, without_index])
def test_what_does_not_fit_is_found_by_verify_and_inspect_shows_the_rest(model, harm):
    kind, said = harm(model)
    for more in ([], ["--deep"]):
        result = run("verify", model, "--json", *more)
        assert result.exit_code == 1
        findings = json.loads(result.stdout)["findings"]
        assert (kind, True) in [(one["code"], said in one["text"]) for one in findings]
    result = run("inspect", model, "--json")
    assert result.exit_code == 5
    document = json.loads(result.stdout)
    assert {*ALL} - {"v"} <= {tensor["name"] for tensor in document["tensors"]}
    assert any(said in problem["text"] for problem in document["problems"])
    result = run("inspect", model, "--ranks")
    assert "part0.safetensors" in result.stdout
    assert said in message(result)


def test_verify_tells_of_an_index_of_which_no_file_is_there(model):
    for file in model.glob("*.safetensors"):
        file.unlink()
    result = run("verify", model, "--json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert {one["code"] for one in findings} == {"missing"}
    assert [Path(one["path"]).name for one in findings] == [
        "part0.safetensors",
        "part1.safetensors",
    ]
    assert " and 1 more: the file is missing" in run("verify", model).stdout


@pytest.mark.parametrize(
    "words", [["inspect"], ["merge", "-o", "out"], ["reshard", "-d", DST, "-o", "out"]]
)
def test_a_source_strategy_has_nothing_to_say_of_it(model, words, tmp_path):
    command, *others = [tmp_path / word if word == "out" else word for word in words]
    result = run(command, model, *others, "-s", DST)
    assert result.exit_code == 5
    assert "already merged, but" in message(result)
    assert "split" in message(result)
    assert not (tmp_path / "out").exists()


def test_replicated_says_of_it_what_its_index_says(model, tmp_path):
    run_well("merge", model, "-o", tmp_path / "a.ckpt")
    run_well("merge", model, "--replicated", "-o", tmp_path / "b.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()


def test_reshard_without_a_source_strategy_says_that_it_is_split(model, tmp_path):
    result = run("reshard", model, "-d", DST, "-o", tmp_path / "out")
    assert result.exit_code != 0
    assert "split" in message(result)


def test_an_index_is_never_overwritten(model, tmp_path):
    (tmp_path / "link.ckpt").symlink_to(model / "param_name_map.json")
    result = run("merge", model, "-o", tmp_path / "link.ckpt", "--overwrite")
    assert result.exit_code == 5
    assert "is an input of this run" in message(result)


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*/golden/unified")), ids=lambda p: p.parts[-3])
def test_mindspores_own_is_written_in_parts_and_read_again(case, tmp_path):
    run_well("merge", case, "-o", tmp_path / "parts", "--max-shard-size", "4KB")
    run_well("merge", tmp_path / "parts", "-o", tmp_path / "full.safetensors")
    want = read(case / "part0.safetensors") | read(case / "hyper_param.safetensors")
    assert read_indexed(tmp_path / "parts") == read(tmp_path / "full.safetensors") == want
    assert not ckpttool.scan(str(tmp_path / "parts")).diagnostics


def test_a_checksum_that_mindspore_carried_over_is_not_spoken_of(tmp_path):
    folder = GOLDEN / "safetensors_crc" / "golden" / "unified"
    result = run_well("merge", folder, "-o", tmp_path / "full.h5")
    assert "checksum" not in result.stderr
    told = run_well("inspect", folder, "--crc").stderr  # it is not that of the part
    assert "hyper_param.safetensors: saved without a checksum" in told


def test_split_of_a_folder_is_split_of_the_file(model, tmp_path):
    folder = GOLDEN / "safetensors_pipeline"
    unified = folder / "golden" / "unified"
    words = ["-d", folder / "dst_strategy.ckpt", "--format", "ckpt", "-o"]
    run_well("merge", unified, "-o", tmp_path / "full.ckpt")
    run_well("split", unified, *words, tmp_path / "one")
    run_well("split", tmp_path / "full.ckpt", *words, tmp_path / "two")
    assert read_ranks(tmp_path / "one") == read_ranks(tmp_path / "two")


# --------------------------------------------------------------------- an index for every rank


def test_ranks_in_several_files_each_are_refused_with_the_way_round(tmp_path):
    case = GOLDEN / "safetensors_reshard"
    whole = read_ranks(case / "src")
    for rank, entries in whole.items():
        files = {"part0.safetensors": dict(list(entries.items())[::2])}
        files["part1.safetensors"] = dict(list(entries.items())[1::2])
        write_indexed(tmp_path / "src" / f"rank_{rank}", files)
    text = message(run("inspect", tmp_path / "src"))
    assert "a rank has several files and an index; expected one file for each rank" in text
    for rank in whole:
        words = ["merge", tmp_path / "src" / f"rank_{rank}", "--replicated"]
        assert rank or " ".join(map(str, words)) in text
        run_well(*words, "-o", tmp_path / "ONE" / f"rank_{rank}" / "net.safetensors")
    assert read_ranks(tmp_path / "ONE") == whole
    run_well("verify", tmp_path / "ONE", "-s", case / "src_strategy.ckpt")


def test_an_index_of_a_ranks_one_file_does_no_harm(tmp_path):
    for rank in (0, 1):
        write_indexed(tmp_path / "src" / f"rank_{rank}", {"part0.safetensors": REST})
    run_well("merge", tmp_path / "src", "--replicated", "-o", tmp_path / "out.safetensors")
    assert read(tmp_path / "out.safetensors") == REST
