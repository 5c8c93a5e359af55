"""The functions of ``import ckpttool``: what they take, what they warn of, and how they look."""

from __future__ import annotations

import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
import warnings
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool import api
from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.cli.main import main as cli
from ckpttool.discovery.scan import SourceOptions
from ckpttool.execution.executors import RunOptions
from ckpttool.keywords import AllKeywords, AuditKeywords, VerifyKeywords, declared, names_of
from ckpttool.model.choices import TensorOptions
from ckpttool.model.layout import Layout
from ckpttool.operations.audit import AuditOptions
from ckpttool.operations.strategy_check import Candidates
from ckpttool.operations.values import Values
from ckpttool.secret import Secret
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import Brief
from tests.support.checkpoints import cut, noise, strategy_of, write_file, write_ranks
from tests.support.commands import run
from tests.support.corpus import GOLDEN
from tests.support.readers import entry_of
from tests.support.snapshots import UPDATE

CASE = GOLDEN / "reshard_8_to_4"
SRC, STRATEGY, TARGET = (CASE / name for name in ("src", "src_strategy.ckpt", "dst_strategy.ckpt"))


class OnlyAPath(os.PathLike):
    """A path that is no string and no ``pathlib.Path``."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.fixture
def without_rank_3(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    case = GOLDEN / "tutorial_8_to_8_retrain"
    for rank in (0, 1, 2, 4, 5, 6, 7):
        (source / f"rank_{rank}").symlink_to(case / "src" / f"rank_{rank}")
    return source, case / "src_strategy.ckpt"


@pytest.mark.parametrize("form", [str, Path, OnlyAPath])
def test_paths_may_be_of_any_type(form, tmp_path):
    src, strategy, target = map(form, (SRC, STRATEGY, TARGET))
    out = form(tmp_path / "m.h5")
    assert len(ckpttool.merge(src, strategy, out).outputs) == 1
    assert len(ckpttool.split(out, target, form(tmp_path / "s")).outputs) == 4
    written = form(tmp_path / "t.ckpt")
    ckpttool.reshard(src, [strategy], target, form(tmp_path / "r"), strategy_path=written)
    assert len(ckpttool.read_strategy(written).layouts)
    assert ckpttool.diff(src, out, strategy).equal
    assert ckpttool.verify(out).findings == ()
    assert len(ckpttool.inspect(src, strategy).tensors) == 38
    assert ckpttool.finalize(form(tmp_path / "r"))
    assert ckpttool.read_index(out).tensors
    assert ckpttool.open(src, strategy).keys() == ckpttool.open(out).keys()


# What each public function makes of a checkpoint and of strategies, in whatever form they come.
TAKERS = {
    "open": lambda src, s, t, out: ckpttool.open(src, s, target=t, rank=1).keys(),
    "merge": lambda src, s, t, out: ckpttool.merge(src, s, out).outputs[0].nbytes,
    "split": lambda src, s, t, out: (
        ckpttool.split(
            *(src, t, out), include="model.norm_out.weight", replicated=True, progress=False
        )
        .outputs[0]
        .nbytes
    ),
    "reshard": lambda src, s, t, out: len(ckpttool.reshard(src, s, t, out).outputs),
    "convert": lambda src, s, t, out: len(ckpttool.convert(src, out, format="ckpt").outputs),
    "average": lambda src, s, t, out: len(
        ckpttool.average([(src, 0.5, s), (src, 0.5)], out, strategy=s, target=t).outputs
    ),
    "inspect": lambda src, s, t, out: len(ckpttool.inspect(src, s).tensors),
    "verify": lambda src, s, t, out: ckpttool.verify(src, s).findings,
    "diff": lambda src, s, t, out: ckpttool.diff(src, src, s, s).equal,
    "explain": lambda src, s, t, out: len(ckpttool.explain(src, s, target=t).tensors),
    "steps": lambda src, s, t, out: ckpttool.steps(SRC, s).steps,  # of a folder
    "scan": lambda src, s, t, out: ckpttool.scan(src, strategy=s).files.keys(),
    "read_strategy": lambda src, s, t, out: ckpttool.read_strategy(s).layouts,
    "resolve": lambda src, s, t, out: len(ckpttool.resolve(src, s).tensors),
    "read_values": lambda src, s, t, out: ckpttool.read_values(src, s, ["lm_head.*"]).values[0],
    "find_needs": lambda src, s, t, out: ckpttool.find_needs(s, t).together.fetch,
    "check_strategies": lambda src, s, t, out: len(ckpttool.check_strategies(src, [s])[0].findings),
    "diff_strategies": lambda src, s, t, out: ckpttool.diff_strategies(s, t).counts,
    "convert_strategy": lambda src, s, t, out: ckpttool.convert_strategy(s, f"{out}.ckpt").nbytes,
    "write_strategy": lambda src, s, t, out: ckpttool.write_strategy(s, f"{out}.ckpt"),
}
TAKEN = re.compile(r"\b(Averaged|Checkpoint|CheckpointFiles|Layouts|StrategySource)\b")
RANK_FILES = sorted(SRC.glob("rank_*/*.ckpt"))
FORMS = {
    "read": (lambda: ckpttool.scan(SRC), ckpttool.read_strategy),
    "text": (lambda: str(SRC), str),
    "path": (lambda: OnlyAPath(SRC), OnlyAPath),
    "files": (lambda: RANK_FILES, lambda path: [path]),
    "dict": (lambda: [*map(OnlyAPath, RANK_FILES)], lambda path: dict_of(path)),
}


def dict_of(path):
    """Return a strategy as `net.parameter_layout_dict` has it."""
    return {
        name: [
            *(of.device_matrix, [*(axes[0] if axes else -1 for axes in of.tensor_map)]),
            *(replace(of, optimizer_shard=1).slice_shape(0, shape), 0, True),
            *("" if of.optimizer_shard == 1 else f"{of.optimizer_shard}-1", shape),
        ]
        for name, (of,) in ckpttool.read_strategy(path).layouts.items()
        for shape in [next(it.meta.shape for it in TENSORS() if it.name == name)]
    }


TENSORS = cache(lambda: ckpttool.resolve(SRC, STRATEGY).tensors)


def test_every_function_that_takes_a_checkpoint_or_a_strategy_is_in_the_table():
    public = {name: getattr(ckpttool, name) for name in ckpttool.__all__ if name.islower()}
    takers = {
        name
        for name, function in public.items()
        if isinstance(function, FunctionType)
        and any(TAKEN.search(str(it.annotation)) for it in signature(function).parameters.values())
    }
    assert takers == TAKERS.keys()


@pytest.mark.parametrize("name", TAKERS)
def test_paths_are_taken_wherever_what_they_hold_is(name, tmp_path):
    made = {}
    for form, (src, strategy) in FORMS.items():
        try:
            made[form] = TAKERS[name](src(), strategy(STRATEGY), strategy(TARGET), tmp_path / form)
        except ckpttool.CkptToolError as error:
            made[form] = type(error)
    assert all(answer == made["read"] for answer in made.values()), made


LISTED = {  # files in the order of the ranks, and what is wrong with them
    "several steps": (["a/n-1_10.ckpt", "b/n-1_20.ckpt"], "of several steps"),
    "twice": (["a/n-1_10.ckpt", "a/n-1_10.ckpt"], "listed twice"),
    "in another order": (["rank_1/n-1_10.ckpt", "rank_0/n-1_10.ckpt"], "listed after rank 1"),
    "not there": (["a/n-1_10.ckpt", "c/n-1_10.ckpt"], "No such file"),
}


@pytest.mark.parametrize(("names", "said"), LISTED.values(), ids=LISTED)
def test_listed_files_are_the_ranks_in_this_order(tmp_path, names, said):
    src, listed, layouts = (tmp_path / name for name in ("src", "list.txt", "layouts.json"))
    for rank, step in ((0, "10"), (1, "10"), (1, "20")):
        tensor = entry_of(np.full((2, 2), rank, np.float32))
        for folder in ("ab"[rank], f"rank_{rank}"):
            write_file(src / folder / f"n-1_{step}.ckpt", {"w": tensor}, "ckpt")
    right = ["b/n-1_10.ckpt", "a/n-1_10.ckpt"]
    listed.write_text("\n".join(right))
    rows = {"w": [[2], [0, -1], [2, 2], 0, True, "", [4, 2]]}
    layouts.write_text(json.dumps(rows))
    merged = ckpttool.open([src / name for name in right], rows)["w"][:, 0].tolist()
    assert merged == [1, 1, 0, 0]
    assert ckpttool.open(src, rows, files=listed)["w"][0, 0] == 1
    run("merge", src, "-s", layouts, "--files", listed, "-o", tmp_path / "m.h5")
    assert ckpttool.open(tmp_path / "m.h5")["w"][:, 0].tolist() == merged
    with pytest.raises(ckpttool.CkptToolError, match=said):
        ckpttool.open([src / name for name in names], rows)


def test_a_call_does_what_the_command_does(tmp_path):
    command = ["merge", SRC, "-s", STRATEGY, "--json", "-o", tmp_path / "a.ckpt", "--crc"]
    printed = json.loads(run(*command).stdout)
    returned = ckpttool.merge(SRC, STRATEGY, tmp_path / "b.ckpt", crc=True)
    returned = ckpttool.to_dict(returned)
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()
    returned["outputs"][0]["path"] = printed["outputs"][0]["path"]
    differing = {"seconds", "manifest", "command", "plan"}
    assert {k: v for k, v in returned.items() if k not in differing} == {
        k: v for k, v in printed.items() if k not in differing
    }


def test_a_warning_of_the_command_line_is_one_of_python_at_the_line_of_the_caller(
    without_rank_3, tmp_path
):
    source, strategy = without_rank_3
    calls = [
        lambda: ckpttool.open(source, strategy),
        lambda: ckpttool.merge(source, strategy, tmp_path / "m.h5"),
        lambda: ckpttool.reshard(source, strategy, strategy, tmp_path / "r"),
        lambda: ckpttool.inspect(source, strategy),
        lambda: ckpttool.diff(source, source, strategy),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert {(warning.filename, warning.category) for warning in caught} == {
            (__file__, ckpttool.CkptToolWarning)
        }
        assert any("rank 3: no checkpoint file" in str(warning.message) for warning in caught)
    verification = ckpttool.verify(source, strategy)
    assert [finding.code for finding in verification.findings] == ["missing_replica"]


def test_warnings_as_errors_are_strict_before_anything_is_written(without_rank_3, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ckpttool.CkptToolWarning)
        with pytest.raises(ckpttool.CkptToolWarning, match="rank 3"):
            ckpttool.merge(*without_rank_3, tmp_path / "new" / "m.h5")
    assert not (tmp_path / "new").exists()


def test_all_that_is_wrong_is_one_error(tmp_path):
    (tmp_path / "damaged.ckpt").write_bytes(b"\x0a\xff")
    for call, said in [
        (lambda: ckpttool.merge(SRC, None, tmp_path / "m.h5"), "no strategy for 8 ranks"),
        (lambda: ckpttool.split(SRC, TARGET, tmp_path / "s"), "--replicated if every rank"),
        (lambda: ckpttool.merge(SRC, STRATEGY, tmp_path / "m.pth"), "or --format"),
    ]:
        with pytest.raises(ckpttool.PlanError) as caught:
            call()
        assert said in str(caught.value)
    with pytest.raises(ckpttool.CkptToolError) as caught:
        ckpttool.reshard(SRC, tmp_path / "damaged.ckpt", tmp_path / "damaged.ckpt", tmp_path / "o")
    assert len(caught.value.diagnostics) == 2


def reshard(**options):
    return ckpttool.reshard(SRC, STRATEGY, TARGET, "out", **options)


def open_rank(**options):
    return ckpttool.open(SRC, STRATEGY, target=TARGET, **options)


def open_source(**options):
    return ckpttool.open(SRC, STRATEGY, **options)


def merge_scanned(**options):
    return ckpttool.merge(ckpttool.scan(SRC), STRATEGY, "m.h5", **options)


OF_SCAN = "step=, pattern=, files= and key= are for a path"
NO_RANK = "expected the number of a rank"
REFUSED = [  # a call, its keywords, the error, what it says
    (partial(ckpttool.merge, SRC, STRATEGY, "m.h5"), {"overwrit": 1}, "overwrit'; near: overwrite"),
    (partial(ckpttool.verify, SRC, STRATEGY), {"ranks": [0]}, "'ranks'"),
    (partial(ckpttool.split, SRC, None, "out"), {}, "split needs target="),
    (partial(ckpttool.reshard, SRC, STRATEGY, None, "out"), {}, "reshard needs target="),
    *((merge_scanned, words, OF_SCAN) for words in ({"step": "2_10"}, {"pattern": "*"})),
    (merge_scanned, {"key": b"k" * 16}, OF_SCAN),
    *((reshard, {"ranks": ranks}, "ranks=.*expected") for ranks in ((0.5,), 1, ["0"], [])),
    *((open_rank, {"rank": rank}, NO_RANK) for rank in ("3", 1.0, True, [2])),
    (partial(ckpttool.explain, SRC, STRATEGY), {"recipe": "llama"}, "unexpected keyword"),
    (partial(ckpttool.explain, SRC, STRATEGY), {"rank": "3"}, f"^rank='3', {NO_RANK}"),
    (reshard, {"ranks": "0-"}, "^ranks: '0-' is not a rank or a range of ranks; example: 0,3-7"),
    (reshard, {"part": "3/2"}, "^part: '3/2' is not a part K/N"),
    (reshard, {"max_memory_bytes": "5"}, "^max_memory_bytes: '5' is not a size"),
    (reshard, {"max_memory_bytes": 0}, "^max_memory_bytes=0, expected 1 or more"),
    (reshard, {"max_memory_bytes": 0.5}, "^max_memory_bytes=0.5, expected a whole number"),
    (reshard, {"optimizer_shard": "x"}, "^optimizer_shard='x', expected a whole number"),
    (reshard, {"unlisted": "all"}, "^unlisted='all', expected one of"),
    (reshard, {"manifest": "x"}, "^manifest='x', expected one of"),
    (reshard, {"step": 0.5}, "^step=0.5, expected a text"),
    (reshard, {"dtype": float}, "^dtype=<class 'float'>, expected texts such as 'bf16'"),
    (reshard, {"include": ["a", 3]}, r"^include=\['a', 3\], expected texts such as 'lm_head"),
    (reshard, {"key": 5}, "^key= is a int, expected the bytes of the key"),
    (open_source, {"dtypes": "bf16"}, "dtypes='bf16', expected one of"),
    (open_source, {"rename_file": 3}, "rename_file=3, expected paths of YAML files"),
    (
        open_source,
        {"rename": {"a": "b"}, "reverse": True},
        "and rename_file= names no file of rules",
    ),
    (
        partial(ckpttool.verify, SRC, STRATEGY),
        {"ignore": ["nan", "misding"]},
        "^ignore='misding' is no code .*; expected missing$",
    ),
    (
        partial(ckpttool.diff, SRC, SRC, STRATEGY),
        {"tolerance": 0.1},
        "^tolerance=0.1, expected a Tolerance",
    ),
    (
        partial(ckpttool.read_values, SRC, STRATEGY, ["*"]),
        {"rows": (0, 2)},
        r"^rows=\(0, 2\), expected a slice, such as slice\(0, 4\) or '0:4'",
    ),
    (partial(ckpttool.read_values, SRC, STRATEGY, ["*"]), {"rows": "2"}, "'2' is not a slice"),
    (
        partial(ckpttool.merge, SRC, STRATEGY, "m.h5"),
        {"ranks": [0]},
        "ranks: not an option of these outputs",
    ),
    (
        partial(ckpttool.convert, SRC, "out"),
        {"replicated": True, "unlisted": "first"},
        "replicated, unlisted: not an option of convert",
    ),
    (partial(ckpttool.convert, SRC, "out"), {"prefix": "n"}, "prefix: not an option of these"),
    *(
        (
            partial(look, SRC, STRATEGY),
            {word: "to-pytorch"},
            f"unexpected keyword argument '{word}'",
        )
        for look in (ckpttool.inspect, ckpttool.verify)
        for word in ("rename", "rename_file", "reverse", "lora", "on_overflow")
    ),
]


@pytest.mark.parametrize(("call", "words", "said"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_wrong_keyword_or_value_is_refused_with_what_is_expected(
    call, words, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError), match=said):
        call(**words)
    assert not [*tmp_path.iterdir()]


def test_what_a_run_would_refuse_is_an_error_in_words_of_python(tmp_path):
    ckpttool.merge(SRC, STRATEGY, tmp_path / "m.h5")
    for call, error, said in (
        (lambda: open_source(step=7), "PlanError", r"no file of step 7[^-]*Try: --step 2_10"),
        (
            lambda: ckpttool.explain(SRC, STRATEGY, rank=9),
            "PlanError",
            "there is no rank 9.*one of 0-7$",
        ),
        (
            lambda: ckpttool.merge(SRC, STRATEGY, tmp_path / "m.h5", weights_only=True),
            "PlanError",
            "another run\n  the options differ\n",
        ),
        (
            lambda: ckpttool.merge(SRC, STRATEGY, tmp_path / "n.h5", on_overflow="inf"),
            "PlanError",
            "no cast was requested, so no number overflows",
        ),
        (lambda: open_source(rename_file=STRATEGY), "StrategyError", "not UTF-8"),
        *(
            (
                partial(call, replicated=True),
                "PlanError",
                "--replicated and -s exclude each other",
            )
            for call in (
                partial(ckpttool.merge, SRC, STRATEGY, tmp_path / "n.h5"),
                partial(ckpttool.verify, SRC, STRATEGY),
            )
        ),
    ):
        with pytest.raises(getattr(ckpttool, error), match=f"(?s){said}"):
            call()


def test_ranks_may_be_numbers_of_numpy(tmp_path):
    ckpttool.reshard(SRC, STRATEGY, TARGET, tmp_path / "out", ranks=np.array([1, 3]))
    assert sorted(ckpttool.scan(tmp_path / "out").files) == [1, 3]
    assert ckpttool.explain(SRC, STRATEGY, rank=np.int16(5)).rank.rank == 5
    opened = ckpttool.open(SRC, STRATEGY, target=TARGET, rank=np.uint8(3))
    written = ckpttool.open(SRC, STRATEGY, target=TARGET, rank=3)
    assert all(np.array_equal(opened[name], written[name]) for name in written)


def test_strategies_are_taken_as_paths_and_as_read(tmp_path):
    src, dst = map(ckpttool.read_strategy, (STRATEGY, TARGET))
    hand = tmp_path / "hand.yaml"
    ckpttool.convert_strategy(TARGET, hand)
    expected = ckpttool.find_needs(src, dst, np.array([1]))
    assert ckpttool.find_needs(Path(STRATEGY), [str(hand)], [1]) == expected
    assert ckpttool.find_needs(str(STRATEGY), None) == ckpttool.find_needs(src, None)
    assert ckpttool.diff_strategies(Path(TARGET), str(hand)).equal
    (left, right) = (
        ckpttool.check_strategies(source, [STRATEGY]) for source in (SRC, ckpttool.scan(SRC))
    )
    assert [answer.verdict for answer in left] == [answer.verdict for answer in right]
    with pytest.raises(TypeError, match=r"^ranks='1', expected the number of a rank"):
        ckpttool.find_needs(src, dst, "1")


def test_the_files_to_fetch_take_a_path_with_a_place_for_the_rank(tmp_path):
    needs = ckpttool.find_needs(STRATEGY, TARGET, [0])
    pattern, texts = tmp_path / "rank_{rank}" / "a.ckpt", f"{tmp_path}/rank_{{rank}}/a.ckpt"
    files = ckpttool.files_to_fetch(needs, pattern, tmp_path)
    assert files == ckpttool.files_to_fetch(needs, texts, str(tmp_path))
    assert files[0] == "rank_0/a.ckpt"
    for wrong in ("rank_0/a.ckpt", tmp_path / "{RANK}.ckpt"):
        with pytest.raises(ValueError, match=r"does not have \{rank\} in it; example: ckpt/rank_"):
            ckpttool.files_to_fetch(needs, wrong)
    with pytest.raises(ckpttool.PlanError, match="--relative-to with the folder above them"):
        ckpttool.files_to_fetch(needs, pattern, tmp_path / "other")


def test_a_keyword_takes_the_text_of_the_command_line(tmp_path):
    done = ckpttool.reshard(SRC, STRATEGY, TARGET, tmp_path / "a", ranks="0,2-3", part="1/2")
    assert (*done.assignment.whole.values(),) == (0, 2, 3)
    assert str(done.assignment.part) == "1/2"
    done = ckpttool.merge(
        *(SRC, STRATEGY, tmp_path / "b"), max_shard_bytes="20kB", max_memory_bytes="16GiB"
    )
    assert len(done.outputs) > 2
    (tmp_path / "key").write_text("hex:" + "5a" * 16, encoding="ascii")
    taken = api._Keywords("open", {"key": tmp_path / "key", "step": 7}).take(SourceOptions)
    assert taken == SourceOptions(key=Secret(b"Z" * 16), step="7")


def test_no_error_repeats_a_key_in_the_place_of_its_file():
    with pytest.raises(ValueError, match=r"^key: the file cannot be read \(No such file") as caught:
        ckpttool.open(SRC, STRATEGY, key="0123456789abcdef")
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("how", ["follow", "full", "drop"])
def test_a_rank_is_opened_as_reshard_writes_it_also_what_the_target_omits(how, tmp_path):
    case = GOLDEN / "params_outside_strategy"
    src, dst = case / "src_strategy.ckpt", case / "dst_strategy.ckpt"
    words = {"unlisted": "first", "not_in_target": how}
    ckpttool.reshard(case / "src", src, dst, tmp_path / "out", **words)
    opened = ckpttool.open(case / "src", src, target=dst, rank=1, **words)
    written = ckpttool.open(tmp_path / "out" / "rank_1" / "checkpoint_1.h5", replicated=True)
    assert opened.keys() == written.keys()
    for name in written:
        np.testing.assert_array_equal(opened[name], written[name])
    with pytest.raises(ValueError, match="not_in_target= is about a target"):
        ckpttool.open(case / "src", src, unlisted="first", not_in_target="drop")


def test_a_conversion_names_the_shapes_to_check(tmp_path):
    done = ckpttool.merge(SRC, STRATEGY, tmp_path / "m.h5", trust_strategy=True)
    words = ["merge", SRC, "-s", STRATEGY, "-o", tmp_path / "n.h5", "--trust-strategy"]
    said = f"Check the full shapes, which only the strategy shows: {done.shapes_to_check}"
    assert said in " ".join(run(*words).stdout.split())
    assert f"check the full shapes: {done.shapes_to_check}>" in repr(done)


def test_one_rank_that_holds_everything_is_split_for_a_rank(tmp_path):
    (tmp_path / "rank_0").mkdir()
    ckpttool.merge(SRC, STRATEGY, tmp_path / "rank_0" / "checkpoint_0.ckpt")
    opened = ckpttool.open(tmp_path, target=TARGET, rank=1)
    expected = ckpttool.open(SRC, STRATEGY, target=TARGET, rank=1)
    for name in ("lm_head.weight", "model.layers.0.attention.wo.weight"):
        np.testing.assert_array_equal(opened[name][...], expected[name][...])


def test_chosen_states_follow_parameters_that_are_not_chosen():
    case = GOLDEN / "dst_without_optimizer"
    source = case / "src", case / "src_strategy.ckpt"
    target = case / "dst_strategy.ckpt"
    every = ckpttool.open(*source, target=target, rank=1)
    chosen = ckpttool.open(*source, target=target, rank=1, include=["adam_m.*"])
    assert {*chosen} == {name for name in every if name.startswith("adam_m.")}
    for name, tensor in chosen.items():
        np.testing.assert_array_equal(tensor[...], every[name][...])


def test_rules_of_files_come_after_those_of_rename(tmp_path):
    file = tmp_path / "names.yaml"
    file.write_text('"model.*": "net.*"\n"lm_head.*": "head.*"\n')
    rules = {"rename": {"lm_head.*": "first.*"}, "rename_file": file}
    opened = ckpttool.open(SRC, STRATEGY, weights_only=True, **rules)
    assert {name.split(".")[0] for name in opened} == {"net", "first"}
    only_file = ckpttool.open(SRC, STRATEGY, weights_only=True, rename_file=[str(file)])
    assert {name.split(".")[0] for name in only_file} == {"net", "head"}


def test_files_of_rules_are_used_the_other_way(tmp_path):
    file = tmp_path / "names.yaml"
    file.write_text('"net.*": "model.*"\n"head.*": "lm_head.*"\n')
    rules = {"rename": {"lm_head.*": "first.*"}, "rename_file": file, "reverse": True}
    opened = ckpttool.open(SRC, STRATEGY, weights_only=True, **rules)
    assert {name.split(".")[0] for name in opened} == {"net", "first"}
    back = ckpttool.open(SRC, STRATEGY, weights_only=True, rename_file=[file], reverse=True)
    assert {name.split(".")[0] for name in back} == {"net", "head"}
    with pytest.raises(ValueError, match="reverse=True, and rename_file= names no file of rules"):
        ckpttool.open(SRC, STRATEGY, rename={"a": "b"}, reverse=True)


def test_keywords_are_the_fields_of_the_options():
    def names(*classes):
        fields = {name for cls in classes for name in cls.__struct_fields__}
        return fields - {"command", "tensors", "shown_by", "is_shared", "called", "fixed"}

    reading = names(SourceOptions, ResolveOptions, TensorOptions)
    reading |= {"rename_file", "reverse", "hf_config"}
    assert {*names_of(api.ReadKeywords)} == reading
    of_outputs = {"rename", "rename_file", "reverse", "on_overflow"}
    of_outputs |= {"fused", "pad_vocab", "cut_vocab", "pad_with", "vocab", "lora"}
    assert {*names_of(VerifyKeywords)} == reading - of_outputs
    assert {*names_of(AuditKeywords), "overwrite"} == names(AuditOptions)
    assert {*names_of(api.SourceKeywords)} == names(SourceOptions)
    writing = {*names_of(api.MergeKeywords)}
    writing |= {*names_of(api.ReshardKeywords)}
    assert writing == reading | names(OutputOptions, RunOptions)
    of_strategies = {"replicated", "unlisted", "trust_strategy", "optimizer_shard", "prefix"}
    of_strategies |= {"check_replicas", "not_in_target", "strategy_path", "virtual"}
    assert {*names_of(api.ConvertKeywords)} == writing - of_strategies


def test_progress_is_what_the_caller_wants(tmp_path, capfd):
    seen = []
    ckpttool.merge(SRC, STRATEGY, tmp_path / "m.h5", progress=lambda *one: seen.append(one))
    phases = [*dict.fromkeys(phase for phase, _, _ in seen)]
    assert phases == ["reading headers", "sampling", "planning", "writing"]
    assert seen[-1] == ("writing", 43_592, 43_592)
    ckpttool.merge(SRC, STRATEGY, tmp_path / "n.h5", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_drawn(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(api, "BAR_SECONDS", 0)
    ckpttool.merge(SRC, STRATEGY, tmp_path / "m.h5", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "writing: 100%" in err


def test_answers_are_one_line_and_a_table(tmp_path):
    catalog, strategy = ckpttool.scan(SRC), ckpttool.read_strategy(STRATEGY)
    done = ckpttool.merge(catalog, strategy, tmp_path / "m.h5")
    for answer in (
        *(catalog, strategy, done, done.planned, done.assignment),
        ckpttool.resolve(catalog, strategy),
        ckpttool.inspect(catalog, strategy),
        ckpttool.inspect(STRATEGY),
        ckpttool.verify(tmp_path / "m.h5"),
        ckpttool.diff(catalog, tmp_path / "m.h5", strategy),
        ckpttool.open(catalog, strategy),
        ckpttool.explain(catalog, strategy),
        ckpttool.steps(SRC, strategy),
        ckpttool.merge(catalog, strategy, tmp_path / "n.h5", dry_run=True),
        ckpttool.read_values(catalog, strategy, ["*"]),
        ckpttool.diff_strategies(strategy, ckpttool.read_strategy(TARGET)),
        ckpttool.check_strategies(SRC, [STRATEGY, TARGET]),
    ):
        rows = [" ".join(row).split() for row in answer._rows()]
        rows = rows if rows[1:] else []  # no head alone
        printed = [line.split() for line in str(answer).splitlines()]
        more = [[str(len(rows) - 21), "more"]] if len(rows) > 21 else []
        assert "\\n" not in str(answer)
        has_lines = isinstance(answer, Values | Candidates)  # arrays, doubts
        assert printed[1:] == rows[:21] + more or has_lines
        page = answer._repr_html_()
        assert page.count("<td") == sum(map(len, [*answer._rows()][1:21]))
        assert page.count("text-align:left") == sum(map(len, [*answer._rows()][: len(rows)][:21]))
        assert "\n" not in repr(answer)
        assert len(repr(answer)) < 200 + 2 * len(str(tmp_path))
    assert repr(ckpttool.inspect(catalog, strategy)).endswith(
        "8 ranks, step 2_10, 38 tensors, 42.6 KiB, complete>"
    )
    assert ">lm_head.weight</td>" in ckpttool.inspect(catalog, strategy)._repr_html_()
    for show in (str, Brief._repr_html_):
        assert "the strategy is for 4 ranks" in show(ckpttool.inspect(catalog, TARGET))


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_the_document_of_an_answer_is_what_json_prints(command):
    words = [SRC, SRC] if command == "diff" else [SRC]
    printed = json.loads(run(command, *words, "-s", STRATEGY, "--json").stdout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckpttool.CkptToolWarning)
        answer = getattr(ckpttool, command)(*words, STRATEGY)
    assert json.loads(json.dumps(ckpttool.to_dict(answer))) == printed


def test_what_a_command_shows_python_returns(tmp_path):
    source, target = ckpttool.read_strategy(STRATEGY), ckpttool.read_strategy(TARGET)
    catalog, s, d = ckpttool.scan(SRC), ["-s", STRATEGY], ["-d", TARGET]
    include = ["--tensor", "lm_head.*"]
    answers = {
        ("explain", SRC, *s, "--rank", 3): ckpttool.explain(SRC, STRATEGY, rank=3),
        ("explain", SRC, *s, *d, *include): ckpttool.explain(
            SRC, STRATEGY, target=TARGET, include="lm_head.*"
        ),
        ("inspect", SRC, *s, "--steps"): ckpttool.steps(SRC, STRATEGY),
        **{
            ("inspect", SRC, *s, "--values", "lm_head.*", "--rows", rows): ckpttool.read_values(
                catalog, source, ["lm_head.*"], given
            )
            for rows, given in (("0:2", slice(2)), (":2", ":2"))
        },
        ("strategy", "ranks", *s, *d, "--rank", 1): ckpttool.find_needs(source, target, [1]),
        ("strategy", "diff", STRATEGY, TARGET): ckpttool.diff_strategies(source, target),
    }
    for words, answer in answers.items():
        printed = json.loads(run(*words, "--json").stdout)
        document = json.loads(json.dumps(ckpttool.to_dict(answer)))
        assert document == printed, words
    ours = {
        answer.path: answer.verdict
        for answer in ckpttool.check_strategies(catalog, [STRATEGY, target])
    }
    printed = json.loads(run("strategy", "check", SRC, STRATEGY, TARGET, "--json").stdout)
    assert ours == {strategy["path"]: strategy["verdict"] for strategy in printed["strategies"]}
    for name in ("b.json", "c.yaml"):
        written = ckpttool.convert_strategy(STRATEGY, tmp_path / name)
        assert ckpttool.diff_strategies(source, ckpttool.read_strategy(written.path)).equal
        assert ckpttool.to_dict(written)["path"] == str(tmp_path / name)


def test_names_in_a_table_are_escaped():
    layouts = {"<script>": ckpttool.read_strategy(STRATEGY).layouts["lm_head.weight"]}
    strategy = replace(ckpttool.read_strategy(STRATEGY), layouts=layouts)
    assert "&lt;script&gt;" in strategy._repr_html_()
    assert "<script>" not in strategy._repr_html_()


OF_CALLS = {  # options whose keywords are arguments of a call, or those of another option
    "-s": "strategy",
    "-d": "target",
    "-o": "out",
    "--rank": "ranks",
    "--values": "patterns",
    "--tensor": "include",
    "--b-step": "step",
    "--b-pattern": "pattern",
}


def keyword_of(param):
    option, _ = declared(AllKeywords).get(param.name, (None, False))
    if param.opts[0] in OF_CALLS or option is None:
        return OF_CALLS.get(param.opts[0])
    return f"{param.name}={param.flag_value!r}" if option.value else param.name


PAGE = Path(__file__).parents[1] / "docs" / "reference" / "python.md"


@pytest.mark.source
def test_the_page_lists_the_options_whose_keywords_have_other_names():
    commands = ("merge", "split", "reshard", "inspect", "verify", "diff", "explain")
    params = [param for name in commands for param in cli.get_command(None, name).params]
    options = {
        param.opts[0]: keyword for param in params if (keyword := keyword_of(param)) is not None
    }
    rows = [
        f"| `{option}` | `{keyword}` |"
        for option, keyword in options.items()
        if keyword.partition("=")[0] != option.strip("-").replace("-", "_")
    ]
    head = "| option | keyword |\n|---|---|\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(head)
    table, _, after = rest.partition("\n\n")
    if os.environ.get(UPDATE):
        joined = "\n".join(rows)
        PAGE.write_text(f"{before}{head}{joined}\n\n{after.lstrip()}", encoding="utf-8")
    else:
        assert table.splitlines() == rows
    of_python = ("--tensor", "-s", "--max-shard-size", "--ignore-manifest")
    assert {*of_python} <= {row.split("`")[1] for row in rows}


def test_help_shows_the_calls_first():
    page = pydoc.render_doc(ckpttool, renderer=pydoc.plaintext)
    shown = page[: page.index("PACKAGE CONTENTS")]
    for name in ("open", "inspect", "merge", "split", "reshard", "convert", "verify", "diff"):
        assert f"ckpttool.{name}(" in shown


@pytest.mark.slow
def test_the_notebook_of_the_tutorial_runs(tmp_path):
    docs = Path(__file__).parent.parent / "docs"
    (tmp_path / "tests").symlink_to(docs.parent / "tests")
    (tmp_path / "docs").mkdir()
    notebook = shutil.copy(docs / "tutorial.ipynb", tmp_path / "docs")
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", notebook]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    shown = [
        "".join(output["data"]["text/plain"])
        for cell in cells
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    assert "complete>" in shown[0]
    assert "files are whole" in shown[1]
    assert shown[-1] == "((8, 16), dtype('<f4'))"
    assert any(output.startswith("<Estimate ") for output in shown)
    assert any(output.startswith("<Difference ") and "equal" in output for output in shown)


def test_a_tensor_is_an_array_of_dask(tmp_path):
    dask_array = pytest.importorskip("dask.array")
    with ckpttool.open(SRC, STRATEGY) as model:
        weight = model["lm_head.weight"]
        lazy = dask_array.from_array(weight)
        assert lazy.chunks == ((32,), (16,))
        np.testing.assert_array_equal(lazy[3:5].sum(0).compute(), weight[3:5].sum(0))


STATES = ("a", "adam_m.a", "adam_v.a")
REPLICAS, SHARD = (Layout((4,), ((), ()), shard) for shard in (1, 4))


@pytest.mark.parametrize("how", ["trusted", "marked", "old manifest"])
def test_nothing_hides_that_one_rank_may_hold_a_hidden_shard(how, tmp_path):
    full = {name: noise(name, "Float32", (8, 8)) for name in STATES}
    ckpttool.write_strategy(
        replace(strategy_of(dict.fromkeys(STATES, REPLICAS)), files=()), tmp_path / "s.ckpt"
    )
    said = ckpttool.read_strategy(tmp_path / "s.ckpt")
    alone = cut(full, strategy_of(dict.fromkeys(STATES, SHARD)))[0]
    source, options = tmp_path / "src", {}
    if how == "trusted":
        options = {"trust_strategy": True}
    if how == "old manifest":  # of a set in the folder where training goes on
        write_ranks(tmp_path / "before", cut(full, said), "ckpt")
        words = {"prefix": "net-1_", "format": "ckpt"}
        ckpttool.reshard(tmp_path / "before", said, said, source, **words)
        for rank in range(1, 4):
            shutil.rmtree(source / f"rank_{rank}")
    format, attrs = "ckpt", {}
    if how == "marked":
        format, attrs = "safetensors", {"remove_redundancy": "True"}
    write_file(source / "rank_0" / f"net-5_10.{format}", alone, format, attrs)
    with pytest.warns(ckpttool.CkptToolWarning) as caught:
        ckpttool.open(source, said, target=said, rank=0, **options)
    assert any("may hide an optimizer shard; one more rank would show it: 1" in str(warning.message)
               for warning in caught)  # fmt: skip
    codes = {finding.code for finding in ckpttool.verify(source, said).findings}
    assert ("strategy" if how == "old manifest" else "hidden_shard") in codes  # ranks are missing
