"""Only the chosen tensors: of every golden case, of damaged checkpoints, and of hidden shards."""

from __future__ import annotations

import json
import random
import re
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.e2e.test_golden import CASES, command_of, formats_of
from tests.support import corpus
from tests.support.commands import message, run, run_well
from tests.support.corpus import a_third
from tests.support.readers import read, read_ranks

CONVERSIONS = {
    f"{conversion.case}-{conversion.kind}": conversion
    for conversion in corpus.conversions("merge", "reshard")
    if conversion.case in CASES
}


# What the networks of the cases train: names, as their optimizers and callbacks give them.
TRAINING = re.compile(
    r"(adam_[mv]|moments|moment[12]|accu_grads|exp_avg|exp_avg_sq)\..*|exp_avg_.*|accum\..*|stat\..*"
    r"|global_step|learning_rate|momentum|beta[12]_power|epoch_num|step_num|loss_scale|state_step"
    r"|big_step|is_final|note|tokens_seen|step|afactor_step"
    r"|(scalar|one)_(u?int|bool).*"
    r"|ema\..*"  # copies of weights
)
STATE = re.compile(r"((?:adam_[mv]|moments|moment[12]|accu_grads|accum|stat|ema)\.)(.*)")
COPY = re.compile(r"ema\..*")


pytestmark = pytest.mark.usefixtures("golden")


def quoted(names):
    return {re.sub(r"([*?[])", r"[\1]", name) for name in names}


def made_up_choice(key, names):
    """Options for some of the names, and what they choose by a rule of its own."""
    chance = random.Random(key)
    names = sorted(names)
    globs = {f"*{name[len(name) // 2 :]}" for name in quoted(chance.sample(names, 1))}
    globs |= quoted(chance.sample(names, min(2, len(names))))
    prefix = re.escape(chance.choice(names)[:3])
    included = [pattern for pattern in globs if any(fnmatchcase(name, pattern) for name in names)]
    excluded = [f"re:^{prefix}"] if chance.random() < 0.5 else []
    words = [word for pattern in included for word in ("--include", pattern)]
    words += [word for pattern in excluded for word in ("--exclude", pattern)]
    chosen = {
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in included)
        and not any(re.search(pattern[3:], name) for pattern in excluded)
    }
    if not chance.randrange(3):  # what belongs to an excluded parameter goes with it
        words = [word for pattern in included for word in ("--exclude", pattern)]
        gone = {name for name in names if any(fnmatchcase(name, pattern) for pattern in included)}
        owners = {name: match[2] for name in names if (match := STATE.fullmatch(name))}
        chosen = {name for name in names if name not in gone and owners.get(name) not in gone}
    return words, chosen


def written(conversion, *words):
    command = command_of(conversion, formats_of(conversion)[0]).split()
    result = run(*command, *words, "--overwrite", "--json")
    if result.exit_code:
        return None, message(result)
    (first, *_) = json.loads(result.stdout)["outputs"]
    return read_ranks(Path("out")) if conversion.dst_strategy else {
        0: read(Path(first["path"]))
    }, ""


CAST = {"Float64": "<f8", "Float32": "<f4", "Float16": "<f2"}


def renamed(name):
    state = STATE.fullmatch(name)
    return f"net.{name}" if state is None else f"{state[1]}net.{state[2]}"


def rounded(name, entry):
    """A weight in bfloat16, rounded by another library; anything else as it is."""
    is_weight = COPY.fullmatch(name) or not TRAINING.fullmatch(name)
    if not is_weight or entry.dtype not in CAST:
        return entry
    numbers = np.frombuffer(entry.data, CAST[entry.dtype])
    if entry.dtype == "Float64":  # ml_dtypes rounds these twice
        return None
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        data = numbers.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()
    return entry._replace(dtype="BFloat16", data=data)


@pytest.mark.parametrize("key", a_third(CONVERSIONS, 2))
def test_choosing_renaming_and_casting_go_together(key):
    whole, _ = written(CONVERSIONS[key])
    words = ["--weights-only"] if CONVERSIONS[key].kind == "merge" else []
    words += ["--rename", "*=net.*", "--dtype", "bf16", "--on-overflow", "inf"]
    chosen, said = written(CONVERSIONS[key], *words)
    assert chosen is not None, said
    for rank, entries in whole.items():
        expected = {
            renamed(name): rounded(name, tensor)
            for name, tensor in entries.items()
            if "--weights-only" not in words or not TRAINING.fullmatch(name)
        }
        assert chosen.get(rank, {}).keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor is None or chosen[rank][name] == tensor, name


@pytest.mark.parametrize("case", ["reshard_8_to_4", "optshard_full_adamw"])
@pytest.mark.parametrize(
    "words",
    [
        "--include *norm*.weight --rename *.weight=out.*.w",
        "--exclude re:^adam_ --rename learning_rate=opt.lr --dtype bf16",
        "--weights-only --rename re:^=pre. --dtype bf16:*wq*",
        "--include *1.* --rename *=net.* --dtype fp16:adam_m.*",
    ],
)
def test_diff_with_the_options_of_a_run_finds_what_it_wrote(case, words):
    options = words.split()
    inf = ["--on-overflow", "inf"] if "--dtype" in options else []
    source = [f"golden/{case}/src", "-s", f"golden/{case}/src_strategy.ckpt"]
    run_well("merge", *source, "-o", "out.ckpt", *options, *inf)
    compared = run("diff", source[0], "out.ckpt", *source[1:], *options, "--json")
    document = json.loads(compared.stdout)
    assert (document["equal"], document["tensors"]) == (True, len(read(Path("out.ckpt"))))


COMMANDS = ("merge", "split", "reshard", "convert", "average")
OPTIONS = ("--include", "--weights-only", "--rename", "--dtype")
PAIRS = [f"{command}{''.join(pair)}" for command in COMMANDS for pair in combinations(OPTIONS, 2)]
OF_RANKS = [
    conversion
    for conversion in corpus.conversions("merge")
    if conversion.src_strategy is not None and "enc_key" not in corpus.case_facts(conversion.case)
]


def ranks_written(command, conversion, *words):
    """What a command writes of a golden case; None if it refuses the case, with what it says."""
    src = f"golden/{conversion.case}/src"
    strategy = f"golden/{conversion.case}/{conversion.src_strategy}"
    if command in ("split", "average") and not Path("whole.ckpt").exists():
        run("merge", src, "-s", strategy, "-o", "whole.ckpt")
    line = {
        "merge": ("merge", src, "-s", strategy, "-o", "out/whole.ckpt"),
        "split": ("split", "whole.ckpt", "-d", strategy, "-o", "out"),
        "reshard": ("reshard", src, "-s", strategy, "-d", strategy, "-o", "out"),
        "convert": ("convert", src, "-o", "out"),
        # both hold the same numbers, so the mean is exact and rounded once
        "average": ("average", src, "whole.ckpt", "-s", strategy, "-o", "out/whole.ckpt"),
    }[command]
    result = run(*line, "--format", "ckpt", *words, "--overwrite")
    if result.exit_code:
        return None, message(result)
    is_one = command in ("merge", "average")
    return {0: read(Path("out/whole.ckpt"))} if is_one else read_ranks(Path("out")), ""


@pytest.mark.parametrize("key", a_third(PAIRS, 0))
def test_pairs_of_options_are_one_after_the_other(key):
    command, *options = (word for word in re.split(r"(?=--)", key) if word)
    chance = random.Random(key)
    for conversion in chance.sample(OF_RANKS, len(OF_RANKS)):
        Path("whole.ckpt").unlink(missing_ok=True)
        whole, _ = ranks_written(command, conversion)  # Float8 has no mean, for example
        if whole is not None:
            break
    names = {name for entries in whole.values() for name in entries}
    made_up, chosen = made_up_choice(key, names)
    of_options = {
        "--include": made_up,
        "--weights-only": ["--weights-only"],
        "--rename": ["--rename", "*=net.*"],
        "--dtype": ["--dtype", "bf16", "--on-overflow", "inf"],
    }
    words = [word for option in options for word in of_options[option]]
    if "--include" in options:
        names &= chosen
    if "--weights-only" in options:
        names = {name for name in names if not TRAINING.fullmatch(name)}
    tensors, said = ranks_written(command, conversion, *words)
    if not names:
        assert "no tensor is chosen" in said
        return
    assert tensors is not None, said
    for rank, entries in whole.items():
        kept = {name: tensor for name, tensor in entries.items() if name in names}
        if "--dtype" in options:
            kept = {name: rounded(name, tensor) for name, tensor in kept.items()}
        if "--rename" in options:
            kept = {renamed(name): tensor for name, tensor in kept.items()}
        of_rank = tensors.get(rank, {})
        assert of_rank.keys() == kept.keys()
        for name, tensor in kept.items():
            assert tensor is None or of_rank[name] == tensor, name


def test_all_that_is_wrong_with_patterns_rules_and_names_is_reported_at_once():
    case = Path("golden/reshard_8_to_4")
    merge = ("merge", case / "src", "-s", case / "src_strategy.ckpt", "-o", "m.h5")
    words = ["--include", "nothing*", "--exclude", "qq", "--rename", "x*=y*", "--dtype", "bf16:zz*"]
    said = message(run(*merge, *words))
    for pattern in ("nothing*", "qq", "x*", "zz*"):
        assert f"no tensor matches '{pattern}'" in said
    result = run(*merge, "--rename", "lm_head.weight=a//b", "--rename", "model.norm_out.weight=")
    assert result.exit_code == 5
    for part in (
        "would have no name",
        "HDF5 cannot keep this name exactly: 3 tensors a//b, with their states",
    ):
        assert part in message(result)
    assert not Path("m.h5").exists()
