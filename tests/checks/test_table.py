"""The table of checks: where each line fires, and the nearest checkpoint where it rests."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.contents import ComparedCopies
from ckpttool.checkpoint.scrambled_slices import ScrambledTensor
from ckpttool.checks import CHECKS, run_checks
from ckpttool.model.choices import TensorOptions
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic, FormatError, UnreadableError
from tests.support.checkpoints import (
    ONE_STAGE,
    ROWS,
    SHARDED,
    WHOLE,
    catalog_of,
    stored,
    strategy_of,
    with_names,
)
from tests.support.in_memory import resolve_in_memory

SLICE = (400, 30)  # so large that equal slices are no chance


def held(strategy=ONE_STAGE, ranks=range(4), *, contents=None, **shapes):
    """A checkpoint of four ranks that hold tensors of the same shapes; see `resolved`.

    Two underscores stand for the dot in a name.
    """
    shapes = {name.replace("__", "."): shape for name, shape in ({"w": SLICE} | shapes).items()}
    return resolved(with_names(shapes, ranks), strategy, contents)


def resolved(catalog, strategy=ONE_STAGE, contents=None, **options):
    """A checkpoint without files: of each tensor every rank holds what its letter says.

    A capital stands for equal elements.  All ranks hold the same, but ``w`` is sharded as `ROWS`.
    """
    letters = {"w": "aabbaabb"} | (contents or {})
    return resolve_in_memory(catalog, strategy, letters, **options)


def changed(resolved, **fields):
    """A checkpoint and its contents with other fields."""
    of_checkpoint = {
        name: fields.pop(name) for name in {*fields} & {"catalog", "files", "counting"}
    }
    checkpoint, contents = resolved
    return replace(checkpoint, **of_checkpoint), replace(contents, **fields)


def choosing(**choice):
    """A checkpoint of `w` and its state, of which only some tensors are wanted."""
    catalog = with_names({"w": SLICE, "adam_m.w": SLICE})
    return resolved(catalog, STATES, tensors=TensorOptions(**choice))


def mixed(*dtype):
    """A checkpoint of a large tensor in BFloat16 and a small one in Float32, to cast."""
    held = {"w": ("BFloat16", SLICE), "b": (5,)}
    catalog = catalog_of(dict.fromkeys(range(4), held))
    return resolved(catalog, tensors=TensorOptions(dtype=dtype))


def scaled(*shape, dtype=("bf16",)):
    """A checkpoint of a Float8 weight with a scale of a shape, to cast."""
    held = {"w": ("Float8E4M3FN", SLICE), "w_scale": shape}
    catalog = catalog_of(dict.fromkeys(range(4), held))
    return resolved(catalog, tensors=TensorOptions(dtype=dtype))


def ranks(strategy=ONE_STAGE, **held):
    """A checkpoint whose ranks hold different names: ``r0="wv"``."""
    named = {int(rank[1:]): dict.fromkeys(names, SLICE) for rank, names in held.items()}
    return resolved(catalog_of(named), strategy)


def merged(name="x", is_named=False, **more):
    """A merged checkpoint with a tensor that goes to every rank, and whether an index names it."""
    catalog = replace(catalog_of({0: {name: SLICE}}), is_merged=True, **more)
    return resolved(replace(catalog, common_tensors={name: is_named}), None)


def kept(catalog):
    """A checkpoint whose files are written again, each by itself."""
    return changed(resolved(catalog, None), files="kept")


def noted(code):
    return replace(with_names({"w": SLICE}), diagnostics=(Diagnostic(code, "found", ranks=(3,)),))


def damaged(*ranks):
    errors = {rank: FormatError(f"rank_{rank}/net.ckpt", 7, "cut short") for rank in ranks}
    whole = [rank for rank in range(4) if rank not in ranks]
    return replace(with_names({"w": SLICE}, whole), damaged=errors)


def with_copies(**copies):
    tensor = stored(TensorMeta("x", "Float32", SLICE))
    found = {kind: {path: [tensor]} for kind, path in copies.items()}
    return changed(merged(is_named=True), copies=ComparedCopies(**found))


def with_index(shape):
    return changed(held(), indexes={"map.json": {"w": TensorMeta("w", "Float32", shape)}})


BARE = Strategy.without_layouts(4)
BOTH = strategy_of({"w": ROWS, "v": ROWS})
STATES = strategy_of({"w": ROWS, "adam_m.w": ROWS})
UNLIKE = strategy_of({"w": ROWS, "adam_m.w": WHOLE})
BY_HAND = {"w": "s.yaml, line 3", "adam_m.w": "s.yaml, line 4"}
STAGES = strategy_of({"w": ROWS, "x": ROWS}, {"v": ROWS})
NO_FILE = Diagnostic("missing_rank", "not there", ranks=(3,))
NOTED = replace(ONE_STAGE, notes=(Diagnostic("no_pattern", "read"),))
RNG = with_names({"w": SLICE, "rng": (2,)})
OWN = {"rng": "abcd"}

# The name of a check to the code of what it finds, where it fires, and where it rests.
CASES = {
    "check_scan": (
        "older_step",
        resolved(noted("older_step")),
        resolved(noted("missing_rank")),  # the strategy tells more
    ),
    "check_strategy": ("no_pattern", held(NOTED), held()),
    "check_copies": ("overlay", with_copies(differing="a.ckpt"), with_copies()),
    "check_ignored_copies": ("skipped", with_copies(equal="a.ckpt"), with_copies()),
    "check_options": (
        "options",
        resolved(with_names({"w": SLICE}), BARE, optimizer_shard=1),
        resolved(with_names({"w": SLICE}), optimizer_shard=1),
    ),
    "check_choice": ("options", choosing(include=["v"]), choosing(include=["w"])),
    "check_casts": ("options", choosing(dtype=["bf16:v"]), choosing(dtype=["bf16", "fp16:w"])),
    "check_left_out": ("dropped", choosing(weights_only=True), choosing(include=["*w"])),
    "check_lost_evidence": (
        "doubt",
        changed(choosing(weights_only=True), files="kept"),
        changed(choosing(include=["adam*"]), files="kept"),
    ),
    "check_counters": (
        "counter",
        changed(choosing(dtype=["bf16"]), counting=frozenset("w")),
        changed(choosing(include=["w"]), counting=frozenset("w")),
    ),
    "check_scales": ("scale", scaled(7, 7), scaled(7, 7, dtype=())),
    "check_narrowed": ("narrowed", mixed("bf16"), mixed("bf16", "fp32:b")),
    "check_renamed": ("new_names", choosing(rename={"w": "v"}), choosing(rename={"w": "w"})),
    "check_ranks": ("strategy", held(ranks=range(5)), held()),
    "check_fit": (
        "shape",
        resolved(catalog_of({2: {"w": SLICE}, 3: {"w": (401, 30)}})),
        resolved(catalog_of({0: {"w": SLICE}, 2: {"w": SLICE}})),
    ),
    "check_odd_states": ("unlisted", held(accu_grads__w=(200, 30)), held(accu_grads__w=(800, 30))),
    "check_rank_slices": ("unlisted", merged(), merged(is_named=True)),
    "check_perhaps_slices": ("doubt", merged(), merged(is_named=True)),
    "check_differing": ("unlisted", resolved(RNG, contents=OWN), resolved(RNG)),
    "check_handwritten": (
        "shape",
        held(replace(UNLIKE, handwritten=BY_HAND), adam_m__w=SLICE),
        held(UNLIKE, adam_m__w=SLICE),
    ),
    "check_odd_shapes": (
        "odd_shape",
        # (800, 30) by the layout; cut along the other axis (400, 60), as w2
        *(
            held(replace(ONE_STAGE, handwritten=BY_HAND), w2=shape)
            for shape in ((400, 60), (30, 60))
        ),
    ),
    "check_missing": ("missing", held(ranks=(2, 3)), held(ranks=(0, 3))),
    "check_own_values": (
        "missing_own",
        *(
            resolved(with_names({"w": SLICE, "rng": (2,)}, held), contents=OWN, unlisted="rank")
            for held in (range(3), range(4))
        ),
    ),
    "check_single_file": ("one_of_several", merged(one_of_several="rank_1 is there"), merged()),
    "check_unsaved": ("unsaved", held(BOTH), held(BOTH, v=SLICE)),
    "check_partly_held": (
        "partly_held",
        ranks(r0="ws", r1="ws", r2="ws", r3="w"),
        ranks(r0="ws", r1="ws", r2="ws", r3="ws"),
    ),
    "check_replaced": ("missing_replica", held(ranks=(0, 1, 3)), held()),
    "check_followed": ("follows", held(adam_m__w=SLICE), held(STATES, adam_m__w=SLICE)),
    "check_guessed": (
        "guessed",
        *(
            held(
                strategy_of(dict.fromkeys("wvu", ROWS)),
                **dict.fromkeys(("v", "u", state), SLICE),
                contents={"mine.w": "aabb"},
            )
            for state in ("mine__w", "adam_m__w")
        ),
    ),
    "check_stages": (
        "skipped",
        ranks(STAGES, r0="wx", r1="wx", r2="wx", r3="wx", r4="vw", r5="v", r6="v", r7="v"),
        ranks(STAGES, r0="wx", r1="wx", r2="wx", r3="wx", r4="v", r5="v", r6="v", r7="v"),
    ),
    "check_redundancy": (
        "deduplicated",
        ranks(r0="w", r1="", r2="w", r3=""),
        ranks(r0="w", r1="w", r2="w", r3="w"),
    ),
    "check_empty": ("empty", ranks(None, r0="w", r1=""), ranks(None, r0="w", r1="w")),
    "check_constant": ("doubt", held(b=(5,), contents={"b": "AAAA"}), held(b=(5,))),
    "check_trusted": (
        "doubt",
        resolved(with_names({"w": SLICE}), trust_strategy=True),
        resolved(with_names({"w": SLICE})),
    ),
    "check_states": (
        "contradicted",
        held(UNLIKE, adam_m__w=SLICE),
        held(STATES, adam_m__w=SLICE, contents={"adam_m.w": "aabb"}),
    ),
    "check_misplaced": (
        "contradicted",
        ranks(STAGES, r0="wx", r1="wx", r2="wx", r3="wx", r4="vwx", r5="v", r6="v", r7="v"),
        ranks(STAGES, r0="wx", r1="wx", r2="wx", r3="wx", r4="vw", r5="v", r6="v", r7="v"),
    ),
    "check_index": ("contradicted", with_index(SLICE), with_index((800, 30))),
    "check_no_evidence": (
        "doubt",
        changed(held(), no_evidence={"adam_m.w": UnreadableError("rank_1/net.ckpt", None, "EIO")}),
        held(),
    ),
    "check_hidden_shard": ("hidden_shard", held(ranks=(0, 2)), held(ranks=(0, 1, 2))),
    "check_corrections": (
        "undecided_shard",
        held(STATES, adam_m__w=SLICE, contents=dict.fromkeys(("w", "adam_m.w"), "abcd")),
        held(STATES, adam_m__w=SLICE, contents={"adam_m.w": "aabb"}),
    ),
    "check_scrambled": (
        "scrambled_slices",
        changed(held(), scrambled=tuple(ScrambledTensor(one, (0, 1)) for one in held()[0].tensors)),
        held(),
    ),
    "check_replicas": ("replica", held(contents={"w": "abcc"}), held()),
    "check_files": (
        "mixed_steps",
        changed(held(), catalog=noted("mixed_steps")),
        changed(held(), catalog=noted("mixed_times")),
    ),
    "check_damage": (
        "damaged",
        changed(held(ranks=(0, 1)), catalog=damaged(2, 3)),
        changed(held(ranks=(0, 1, 2)), catalog=damaged(3)),
    ),
    **{
        f"check_{name}": (
            code,
            changed(held(), read={what: [Diagnostic(code, "differs")]}),
            changed(held(), read={what: []}),
        )
        for name, what, code in (
            ("checksums", "checksums", "checksum"),
            ("contents", "contents", "replica"),
            ("unlisted_samples", "unlisted", "unlisted"),
            ("manifest", "manifest", "manifest"),
        )
    },
    "check_missing_files": ("missing_rank", merged(diagnostics=(NO_FILE,)), merged()),
    "check_kept_files": (
        "missing",
        kept(noted("missing_rank")),
        kept(replace(noted("missing_rank"), expected_ranks=frozenset(range(3)))),  # --rank 0-2
    ),
    "check_kept": (
        "lacking",
        *(
            kept(catalog_of({0: {"w": SLICE, "v": SLICE}, 1: dict.fromkeys(names, SLICE)}))
            for names in ("w", "wv")
        ),
    ),
    "check_nothing": ("nothing", changed(merged(), catalog=catalog_of({})), held()),
    "check_shards": (
        "contradicted",
        held(strategy_of({"w": SHARDED})),
        held(strategy_of({"w": SHARDED}), contents={"w": "abcd"}),
    ),
    "check_slices": ("contradicted", held(contents={"w": "aaaa"}), held()),
    "check_not_full": ("strategy", merged(one_of_several="rank_1 is there"), merged()),
    "check_unjoined": ("doubt", ranks(None, r0="w", r1="w"), merged()),
    "check_unlisted": (
        "dtype",
        *(
            resolved(
                catalog_of({0: {"w": SLICE, "b": (5,)}, 3: {"w": SLICE, "b": (dtype, (5,))}}),
                unlisted="first",
            )
            for dtype in ("Float16", "Float32")
        ),
    ),
    "check_lacking": (
        "lacking",
        ranks(BOTH, r0="wv", r1="wv", r2="wv", r3="w"),
        ranks(BOTH, r0="w", r1="v", r2="w", r3="v"),  # saved without redundancy
    ),
    "check_lacking_names": (
        "lacking",
        ranks(r0="ws", r1="ws", r2="ws", r3="w"),
        ranks(r0="ws", r1="ws", r2="ws", r3="ws"),
    ),
}


def test_every_line_of_the_table_has_a_case_and_no_check_has_two_lines():
    assert sorted(CASES) == sorted(check.find.__name__ for check in CHECKS)


@pytest.mark.parametrize("name", CASES)
def test_a_check_fires_where_it_should_and_rests_next_to_it(name):
    code, fires, rests = CASES[name]
    (check,) = (one for one in CHECKS if one.find.__name__ == name)
    found = [*check.run(*fires)]
    assert {one.code for one in found} == {code}
    assert not [*check.run(*rests)]
    for command in check.commands:
        of_command = [*run_checks(*fires, command)]
        assert [one for one in found if one not in of_command] == []


PAGE = Path(ckpttool.__file__).parents[1] / "docs" / "concepts" / "safety.md"
HEADING = "## Every check of a source, in order"


def test_the_page_on_safety_lists_the_checks_of_the_table_in_their_order():
    rows = ["| it finds | why here | in |", "|---|---|---|"]
    for check in CHECKS:
        what = inspect.getdoc(check.find).split(".\n")[0].rstrip(".").removeprefix("Yield ")
        what = what.replace("\n", " ").replace("``", "`")
        who = "all" if len(check.commands) == 4 else ", ".join(check.commands)
        rows.append(f"| {what} | {check.why} | {who.replace('convert', 'conversions')} |")
    page = PAGE.read_text(encoding="utf-8")
    text = page[: page.index("| it finds")]
    assert HEADING in text
    wanted = text + "\n".join(rows) + "\n"
    if os.environ.get("SNAPSHOT_UPDATE"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted
