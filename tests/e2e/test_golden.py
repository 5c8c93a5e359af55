"""Every conversion of the golden corpus, in every output format, byte for byte.

The source of ``split_unified`` are the several files of MindSpore's ``unified_safetensors``.  What
``unified`` must hold is what ``merge`` must hold.
"""

from __future__ import annotations

import pytest

from tests.support import corpus
from tests.support.commands import SUFFIXES, files_below, mentions, message, run, run_well
from tests.support.corpus import WORDS
from tests.support.readers import ckpt_records, read, read_ranks, write_ckpt

MAX_CORPUS_BYTES = 10 * 2**20

# What safetensors has no dtype for. Int4 goes as I8 with a note, as MindSpore does it.
NOT_IN_SAFETENSORS = {"str", "Complex128", "HiFloat8"}


def cases(*kinds, holdable=True):
    """Return conversion and output format, for every pair the format can hold (or cannot).

    What a plan makes of a conversion does not depend on the format of the output. The default run
    has one format for each conversion, in turn; the other pairs are exhaustive.
    """
    found = []
    for number, conversion in enumerate(corpus.conversions(*kinds)):
        narrow = {"safetensors"} if conversion.dtypes & NOT_IN_SAFETENSORS else set()
        formats = [one for one in SUFFIXES if (one in narrow) != holdable]
        for place, output_format in enumerate(formats):
            name = f"{conversion.case}-{conversion.kind}-{output_format}"
            marks = () if place == number % len(formats) else pytest.mark.exhaustive
            found.append(pytest.param(conversion, output_format, id=name, marks=marks))
    return found


@pytest.fixture(scope="session")
def full_checkpoint(tmp_path_factory):
    """The undivided checkpoint of a case: MindSpore's, or joined by the oracle where trimmed.

    ``test_oracle.py`` holds the joined one against MindSpore's hashes.
    """
    made = {}

    def find(conversion):
        stored = conversion.folder / conversion.source
        if stored.is_dir():
            return stored
        if conversion.case not in made:
            path = tmp_path_factory.mktemp("full") / f"{conversion.case}.ckpt"
            write_ckpt(path, corpus.merged_by_oracle(conversion.case))
            made[conversion.case] = path
        return made[conversion.case]

    return find


def arguments(conversion, output_format, out, source):
    """The command line of a conversion."""
    words = [conversion.kind.removesuffix("_unified"), source, "-o", out, "--format", output_format]
    if conversion.src_strategy:
        words += ["-s", conversion.folder / conversion.src_strategy]
    if conversion.dst_strategy:
        words += ["-d", conversion.folder / conversion.dst_strategy]
    if conversion.undefined and conversion.kind != "merge":
        words += ["--not-in-target", "full"]  # as nothing says what else; see `prescribed`
    if conversion.source == "src":
        words += WORDS.get(conversion.case, [])
    return words


def prescribed(conversion):
    """Everything that must come out, where MindSpore prescribes nothing too.

    A parameter that only the source strategy lists is written undivided to every rank (MindSpore
    writes one rank's slice under the full name). Of a parameter that no strategy lists every
    target rank gets what MindSpore gives it.
    """
    undefined = conversion.undefined
    if undefined and conversion.case != "params_outside_strategy":
        full = corpus.conversion(conversion.case, "merge").ranks[0]
        undefined = {
            rank: {name: full[name] for name in names} for rank, names in undefined.items()
        }
    return {rank: names | undefined.get(rank, {}) for rank, names in conversion.ranks.items()}


def test_corpus_holds_every_case_and_stays_small():
    files = [path for path in corpus.GOLDEN.rglob("*") if path.is_file()]
    assert len(corpus.case_names()) == 65
    assert (corpus.BROKEN / "case.json").is_file()
    assert len(corpus.conversions("merge")) == 63
    assert sum(path.stat().st_size for path in files) < MAX_CORPUS_BYTES


@pytest.mark.parametrize(("conversion", "output_format"), cases("merge"))
def test_merge_gives_what_mindspore_gives(conversion, output_format, tmp_path):
    out = tmp_path / f"full{SUFFIXES[output_format]}"
    source = conversion.folder / conversion.source
    run_well(*arguments(conversion, output_format, out, source))
    assert files_below(tmp_path) == [out.name]
    found = corpus.differences(prescribed(conversion), corpus.digests({0: read(out)}))
    assert not found


@pytest.mark.parametrize(
    ("conversion", "output_format"), cases("split", "reshard", "split_unified")
)
def test_split_and_reshard_give_what_mindspore_gives(
    conversion, output_format, tmp_path, full_checkpoint
):
    source = full_checkpoint(conversion)
    run_well(*arguments(conversion, output_format, tmp_path / "out", source))
    suffix = SUFFIXES[output_format]
    assert set(files_below(tmp_path / "out")) >= {
        f"rank_{rank}/checkpoint_{rank}{suffix}" for rank in conversion.ranks
    }
    got = corpus.digests(read_ranks(tmp_path / "out"))
    assert not corpus.differences(prescribed(conversion), got)


@pytest.mark.parametrize(("conversion", "output_format"), cases("unified"))
def test_merge_of_a_unified_folder_gives_what_mindspore_gives(conversion, output_format, tmp_path):
    out = tmp_path / f"full{SUFFIXES[output_format]}"
    folder = conversion.folder / "golden" / "unified"
    run_well("merge", folder, "-o", out)
    assert not corpus.differences(prescribed(conversion), corpus.digests({0: read(out)}))


@pytest.mark.parametrize(
    ("conversion", "output_format"), cases("merge", "split", "reshard", holdable=False)
)
def test_safetensors_refuses_a_dtype_it_has_no_name_for(
    conversion, output_format, tmp_path, full_checkpoint
):
    out = tmp_path / "out" if conversion.dst_strategy else tmp_path / "full.safetensors"
    source = full_checkpoint(conversion)
    result = run(*arguments(conversion, output_format, out, source))
    assert result.exit_code == 5, result.output
    lost = {
        (name, dtype)
        for tensors in conversion.ranks.values()
        for name, (dtype, _, _) in tensors.items()
        if dtype in NOT_IN_SAFETENSORS
    }
    for name, dtype in lost:
        assert not mentions(message(result), rf"{name}.*{dtype}|{dtype}.*{name}")
    assert not files_below(tmp_path)


@pytest.mark.parametrize("output_format", SUFFIXES)
@pytest.mark.parametrize("case", ["encrypted_cbc", "encrypted_gcm"])
def test_encrypted_ranks_hold_what_mindspore_encrypted(case, output_format, tmp_path):
    source = corpus.GOLDEN / case
    (tmp_path / "key").write_text(corpus.case_facts(case)["enc_key"], encoding="ascii")
    strategy = source / "src_strategy.ckpt"
    words = ["-s", strategy, "--dec-key-file", tmp_path / "key", "--format", output_format]
    run_well("reshard", source / "src", "-d", strategy, "-o", tmp_path / "out", *words)
    want = corpus.unfold(corpus.expected(case)["after_decryption"], 2)
    got = corpus.digests(read_ranks(tmp_path / "out"))
    assert set(got) == {0, 1}
    assert not corpus.differences(want, got)


@pytest.mark.parametrize("case", ["encrypted_cbc", "encrypted_gcm"])
def test_merge_says_that_the_checkpoint_is_encrypted(case, tmp_path):
    source = corpus.GOLDEN / case
    strategy = source / "src_strategy.ckpt"
    result = run("merge", source / "src", "-o", tmp_path / "full.h5", "-s", strategy)
    assert result.exit_code == 3, result.output
    assert not mentions(message(result), "rank_0", "encrypted")
    assert not files_below(tmp_path)


@pytest.mark.parametrize(
    "conversion",
    [
        conversion
        for conversion in corpus.conversions("merge")
        if (conversion.folder / "src_stage_strategies").is_dir()
    ],
    ids=lambda conversion: conversion.case,
)
def test_merge_takes_the_strategies_of_the_single_stages(conversion, tmp_path):
    stages = conversion.folder / "src_stage_strategies"
    files = [word for path in sorted(stages.iterdir()) for word in ("-s", path)]
    for name, strategy in {"folder": ["-s", stages], "files": files}.items():
        out = tmp_path / f"{name}.ckpt"
        run_well("merge", conversion.folder / "src", "-o", out, "--format", "ckpt", *strategy)
        got = corpus.digests({0: read(out)})
        assert not corpus.differences(prescribed(conversion), got)


@pytest.mark.parametrize(
    "conversion",
    [
        conversion
        for conversion in corpus.conversions("reshard")
        if (conversion.folder / "dst_stage_strategies").is_dir()
    ],
    ids=lambda conversion: conversion.case,
)
def test_reshard_takes_the_strategies_of_the_single_stages(conversion, tmp_path):
    run_well(
        *("reshard", conversion.folder / "src", "-o", tmp_path, "--format", "ckpt"),
        *("-s", conversion.folder / conversion.src_strategy),
        *("-d", conversion.folder / "dst_stage_strategies"),
    )
    got = corpus.digests(read_ranks(tmp_path))
    assert not corpus.differences(prescribed(conversion), got)


MERGED_BY_MINDSPORE = sorted(path for path in corpus.GOLDEN.glob("*/golden/merge/rank_0/*.ckpt"))


@pytest.mark.parametrize(
    "golden", MERGED_BY_MINDSPORE, ids=lambda path: path.relative_to(corpus.GOLDEN).parts[0]
)
def test_ckpt_records_are_byte_for_byte_mindspores(golden, tmp_path):
    conversion = corpus.conversion(golden.relative_to(corpus.GOLDEN).parts[0], "merge")
    out = tmp_path / "full.ckpt"
    run_well(*arguments(conversion, "ckpt", out, conversion.folder / "src"))
    assert sorted(ckpt_records(out)) == sorted(ckpt_records(golden))


def test_rank_writes_only_the_ranks_asked_for(tmp_path):
    conversion = corpus.conversion("pipeline_2x4_to_4x2", "reshard")
    words = arguments(conversion, "ckpt", tmp_path, conversion.folder / "src")
    run_well(*words, "--rank", "0,3-5", "--prefix", "part")
    assert set(files_below(tmp_path)) >= {f"rank_{r}/part{r}.ckpt" for r in (0, 3, 4, 5)}
    got = corpus.digests(read_ranks(tmp_path))
    want = {rank: prescribed(conversion)[rank] for rank in (0, 3, 4, 5)}
    assert not corpus.differences(want, got)


def test_newest_step_counts_if_none_is_named(tmp_path):
    folder = corpus.GOLDEN / "several_files_per_rank"
    words = ["merge", folder / "src", "-s", folder / "src_strategy.ckpt", "-o"]
    run_well(*words, tmp_path / "newest.ckpt", "--format", "ckpt")
    run_well(*words, tmp_path / "named.ckpt", "--format", "ckpt", "--step", "10_10")
    assert read(tmp_path / "newest.ckpt") == read(tmp_path / "named.ckpt")
    words = arguments(
        corpus.conversion("several_files_per_rank", "merge"),
        *("ckpt", tmp_path / "older.ckpt", folder / "src"),
    )
    run_well(*words)
    assert read(tmp_path / "newest.ckpt")["weight"] != read(tmp_path / "older.ckpt")["weight"]
