"""Every case of the golden corpus in one pass: the bytes that come out, and what is printed.

The bytes are compared with those of MindSpore and of the oracle, what is printed with a snapshot
for each case, ``snapshots/golden/CASE.txt``; see `tests.e2e.test_snapshots`.

The source of ``split_unified`` are the several files of MindSpore's ``unified_safetensors``.  What
``unified`` must hold is what ``merge`` must hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import corpus
from tests.support.commands import SUFFIXES, files_below
from tests.support.corpus import GOLDEN, WORDS
from tests.support.readers import ckpt_records, read, read_ranks, write_ckpt
from tests.support.snapshots import check_snapshot

MAX_CORPUS_BYTES = 10 * 2**20
CASES = corpus.case_names()
KINDS = ("merge", "reshard", "split", "unified", "split_unified")
UNIFIED = "golden/unified"

# What safetensors has no dtype for. Int4 goes as I8 with a note, as MindSpore does it.
NOT_IN_SAFETENSORS = {"str", "Complex128", "HiFloat8"}

# In their snapshots is each document too; together they have most of what a document can have.
IN_JSON = (
    "append_dict_string",
    "dst_without_optimizer",
    "dtypes_saved_not_loaded",
    "encrypted_gcm",
    "optshard_size2_adam_8_to_4",
    "params_outside_strategy",
    "pipeline_shared_embedding_both",
    "safetensors_crc",
    "several_files_per_rank",
    "uneven_manual_split",
)


def merged_by_mindspore(conversion):
    return next((conversion.folder / "golden" / conversion.kind / "rank_0").glob("*.ckpt"), None)


def formats_of(conversion):
    """The formats that can hold a conversion; the first one is that of the pass.

    What a plan makes of a conversion does not depend on the format of the output: the cases take
    them in turn.  Records of ``.ckpt`` are compared with MindSpore's where they can be.
    """
    narrow = {"safetensors"} if conversion.dtypes & NOT_IN_SAFETENSORS else set()
    formats = [name for name in SUFFIXES if name not in narrow]
    turn = CASES.index(conversion.case) + KINDS.index(conversion.kind)
    first = "ckpt" if merged_by_mindspore(conversion) else formats[turn % len(formats)]
    return [first, *(name for name in formats if name != first)]


def key_of(case):
    key = corpus.case_facts(case).get("enc_key")
    if key is None:
        return ""
    Path("key.bin").write_text(key, encoding="ascii")
    return " --dec-key-file key.bin"


def source_of(case):
    (strategy,) = (GOLDEN / case).glob("src_strategy.*")
    step = " --step 2_10" if "--step" in WORDS.get(case, ()) else ""
    return f"golden/{case}/src -s golden/{case}/{strategy.name}{step}{key_of(case)}"


def command_of(conversion, output_format, src=(), dst=()):
    """The command of a conversion into ``out``, with other strategies than those of the case."""
    case, kind = conversion.case, conversion.kind
    source = UNIFIED if kind == "unified" else conversion.source
    words = [{"unified": "merge", "split_unified": "split"}.get(kind, kind)]
    if (conversion.folder / source).is_dir():
        words += [f"golden/{case}/{source}"]
    else:  # not in the corpus; `test_oracle.py` compares what the oracle joins with MindSpore's
        write_ckpt(Path(f"{case}.ckpt"), corpus.merged_by_oracle(case))
        words += [f"{case}.ckpt"]  # else it is one of the ranks in the folders of all tests
    own = () if kind == "unified" else (conversion.src_strategy,)
    for option, strategies in (("-s", src or own), ("-d", dst or (conversion.dst_strategy,))):
        words += [f"{option} golden/{case}/{path}" for path in strategies if path]
    words += WORDS.get(case, []) if source == "src" else []
    if conversion.dst_strategy:
        return " ".join([*words, "-o out --format", output_format])
    return " ".join([*words, f"-o out/m{SUFFIXES[output_format]}"])


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


def check_output(conversion, output_format):
    """Compare what a conversion has written with what must come out."""
    suffix = SUFFIXES[output_format]
    if conversion.dst_strategy:
        files = {f"rank_{rank}/checkpoint_{rank}{suffix}" for rank in conversion.ranks}
        assert {*files_below(Path("out"))} >= files
        got = read_ranks(Path("out"))
    else:
        assert files_below(Path("out")) == [f"m{suffix}"]
        got = {0: read(Path("out", f"m{suffix}"))}
    assert not corpus.differences(prescribed(conversion), corpus.digests(got))
    golden = merged_by_mindspore(conversion)
    if golden and output_format == "ckpt":
        assert sorted(ckpt_records(Path("out/m.ckpt"))) == sorted(ckpt_records(golden))


def has_undefined(case):
    kinds = corpus.expected(case)["conversions"]
    return any(any(corpus.conversion(case, kind).undefined.values()) for kind in kinds)


def pass_conversion(conversion, output_format, run):
    """Run a conversion in every form that the case has for it, and check what comes out."""
    case, kind = conversion.case, conversion.kind
    full = " --not-in-target full" if conversion.dst_strategy and has_undefined(case) else ""
    if full:
        run(command_of(conversion, output_format))
    strategies = [{}]
    for side in {"merge": ["src"], "reshard": ["dst"]}.get(kind, ()):
        name = f"{side}_stage_strategies"
        if files := sorted((GOLDEN / case / name).glob("*")):
            strategies += [{side: [name]}, {side: [f"{name}/{path.name}" for path in files]}]
    for given in strategies:
        line = command_of(conversion, output_format, **given) + full  # full: see `prescribed`
        run(line, lambda: check_output(conversion, output_format))


@pytest.mark.parametrize("case", CASES)
def test_a_case_comes_out_as_from_mindspore_and_is_shown_as_was_agreed(case, shell):
    def run(line, check=None):
        for option in ("", " --json") if case in IN_JSON else ("",):
            result = shell.run(line + option)
            if check:
                assert result.exit_code == 0, result.stderr
                check()
            shell.clear("out")

    conversions = [corpus.conversion(case, kind) for kind in corpus.expected(case)["conversions"]]
    source, folder = source_of(case), f"golden/{case}/src"
    is_fourth = CASES.index(case) % 4 == 0
    run(f"inspect {source}")
    run(f"verify {source} --deep")
    if is_fourth:
        run(f"inspect {folder}{key_of(case)}")
        run(f"verify {source}")
        run(f"verify {folder} --crc{key_of(case)}")
    if (GOLDEN / case / UNIFIED).is_dir():
        run(f"inspect golden/{case}/{UNIFIED}")
    for conversion in conversions:
        formats = formats_of(conversion)
        pass_conversion(conversion, formats[0], run)
        if "safetensors" not in formats:
            run(command_of(conversion, "safetensors"))
            assert not Path("out").exists()
        if is_fourth and conversion.kind == "merge" and "--step" not in source:
            shell.quietly(command_of(conversion, "ckpt"))
            first, _, rest = source.partition(" ")
            run(f"diff {first} out/m.ckpt {rest}")
    if "encrypted" in case:
        strategy = f"golden/{case}/src_strategy.ckpt"
        for output_format in SUFFIXES:
            line = f"reshard {source} -d {strategy} -o out --format {output_format}"
            run(line, lambda: check_decrypted(case))
    check_snapshot(f"golden/{case}", shell.text())


def check_decrypted(case):
    want = corpus.unfold(corpus.expected(case)["after_decryption"], 2)
    assert not corpus.differences(want, corpus.digests(read_ranks(Path("out"))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_case_comes_out_the_same_in_the_other_formats(case, shell):
    def run(line, check=None):
        if check:
            shell.quietly(f"{line} --json")
            check()
            shell.clear("out")

    for kind in corpus.expected(case)["conversions"]:
        conversion = corpus.conversion(case, kind)
        for output_format in formats_of(conversion)[1:]:
            pass_conversion(conversion, output_format, run)


def test_corpus_holds_every_case_and_stays_small():
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert len(CASES) == 65
    assert (corpus.BROKEN / "case.json").is_file()
    assert len(corpus.conversions("merge")) == 63
    assert sum(path.stat().st_size for path in files) < MAX_CORPUS_BYTES
    assert {*IN_JSON} <= {*CASES}


def test_rank_writes_only_the_ranks_asked_for(shell):
    conversion = corpus.conversion("pipeline_2x4_to_4x2", "reshard")
    shell.quietly(f"{command_of(conversion, 'ckpt')} --rank 0,3-5 --prefix part")
    assert files_below(Path("out")) == [f"rank_{r}/part{r}.ckpt" for r in (0, 3, 4, 5)]
    got = corpus.digests(read_ranks(Path("out")))
    want = {rank: prescribed(conversion)[rank] for rank in (0, 3, 4, 5)}
    assert not corpus.differences(want, got)
