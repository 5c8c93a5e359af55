"""Sets that say what they hold: their layouts, or the names that the source's strategy uses."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from tests.support.checkpoints import ROWS, SHARDED, WHOLE, cut, noise, strategy_of, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.manifests import MANIFEST, listing_of
from tests.support.readers import Entry, entry_of, read, read_ranks

COLUMNS = Layout((2, 2), ((), (0,)))
EXCHANGE = ["--rename", "a.w=b.w", "--rename", "b.w=a.w"]
STAGED = strategy_of(
    {"a.w": ROWS, "b.w": COLUMNS, "shared": WHOLE}, {"c.w": COLUMNS, "shared": WHOLE}
)
SETS = {
    "rows and columns": strategy_of({"a.w": ROWS, "b.w": COLUMNS}),
    "optimizer shards": strategy_of({"a.w": SHARDED, "b.w": COLUMNS, "adam_m.a.w": SHARDED}),
    "stages": STAGED,
}


@pytest.fixture(params=SETS)
def made(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = SETS[request.param]
    full = {name: noise(name, "Float32", (8, 8)) for name in strategy.layouts}
    write_ranks(Path("src"), cut(full, strategy), "ckpt")
    ckpttool.write_strategy(strategy, "s.ckpt")
    return full


def exchanged(full: dict[str, Entry]) -> dict[str, Entry]:
    names = {"a.w": "b.w", "b.w": "a.w", "adam_m.a.w": "adam_m.b.w"}
    return {names.get(name, name): entry for name, entry in full.items()}


def merged(folder: str, *words: str) -> dict[str, Entry]:
    run_well("merge", folder, *words, "-o", "m.safetensors", "--overwrite")
    return read(Path("m.safetensors"))


def head_of(folder: str) -> dict:
    document = json.loads(Path(folder, MANIFEST).read_text())
    return {key: value for key, value in document.items() if key != "outputs"}


def edit(folder: str, change) -> None:
    path = Path(folder, MANIFEST)
    document = json.loads(path.read_text())
    change(document)
    path.write_bytes(listing_of(document))


def make_old(document) -> None:
    for key in ("layouts", "source_names"):
        document.pop(key, None)


# ------------------------------------------------------------------------------ layouts are known


def test_exchanged_names_are_read_by_the_layouts_of_the_set(made):
    words = ["reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt", "-o", "new", *EXCHANGE]
    run_well(*words, "--write-strategy", "new/w.ckpt")
    assert merged("new") == exchanged(made)
    assert merged("new", "-s", "new/w.ckpt") == exchanged(made)
    assert run("merge", "new", "-s", "s.ckpt", "-o", "x.h5").exit_code == 5
    for path in ("s.ckpt", "new/w.ckpt"):
        Path(path).unlink()
    assert "layouts from new/ckpttool.json" in message(run_well("explain", "new"))
    assert merged("new") == exchanged(made)


@pytest.mark.parametrize("rules", [EXCHANGE, ["--rename", "*=net.*"]], ids=["swap", "prefix"])
@pytest.mark.parametrize("target", ["s.ckpt", "d.yaml"])
def test_a_target_has_the_names_of_the_source_or_those_of_the_files(made, rules, target):
    lines = "".join(f'  "{name}": {{axis: 0}}\n' for name in made)
    Path("d.yaml").write_text(f"ckpttool_strategy: 1\nranks: 2\nparameters:\n{lines}")
    of_target = ["-s", "s.ckpt", "-d", target, "--format", "ckpt"]
    run_well("reshard", "src", *of_target, "-o", "direct", *rules)
    run_well("convert", "src", "-o", "files", *rules)
    run_well("reshard", "files", *of_target, "-o", "new")
    assert read_ranks(Path("new")) == read_ranks(Path("direct"))
    assert merged("new") == merged("direct")


def test_a_merged_file_and_its_ranks_have_each_layout_once(made):
    run_well("reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt", "-o", "new")
    known = ckpttool.read_strategy("s.ckpt")
    head = head_of("new")
    kinds = [
        tuple(Layout(**{k: _tupled(v) for k, v in layout.items()}) for layout in kind)
        for kind in head["layouts"]["kinds"]
    ]
    assert len(set(kinds)) == len(kinds)
    tensors = head["layouts"]["tensors"]
    assert {name: kinds[n] for name, n in tensors.items()} == dict(known.layouts)
    run_well("merge", "new", "-o", "m.h5")
    head = json.loads(Path(f"m.h5.{MANIFEST}").read_text())
    assert head["layouts"]["tensors"] == dict.fromkeys(made, 0)


def _tupled(value):
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def test_parts_and_finalize_write_the_manifest_of_one_run(made):
    words = ["reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt", *EXCHANGE]
    run_well(*words, "-o", "whole")
    for part in ("1/2", "2/2"):
        run_well(*words, "-o", "parts", "--part", part)
    run_well("finalize", "parts")
    assert Path("parts", MANIFEST).read_bytes() == Path("whole", MANIFEST).read_bytes()
    assert merged("parts") == exchanged(made)
    for number in range(2):
        run_well("convert", "src", "-o", "again", *EXCHANGE, "--part", f"{number + 1}/2")
    run_well("finalize", "again")
    run_well("convert", "src", "-o", "alone", *EXCHANGE)
    assert Path("again", MANIFEST).read_bytes() == Path("alone", MANIFEST).read_bytes()


@pytest.mark.parametrize("rest", ['  "*": {axis: 1}\n', "otherwise: {axis: 1}\n"])
def test_patterns_of_a_target_are_not_read_again_by_the_new_names(tmp_path, monkeypatch, rest):
    monkeypatch.chdir(tmp_path)
    strategy = strategy_of({"model.w": ROWS, "other.w": COLUMNS})
    full = {name: noise(name, "Float32", (8, 8)) for name in strategy.layouts}
    write_ranks(Path("src"), cut(full, strategy), "safetensors")
    ckpttool.write_strategy(strategy, "s.ckpt")
    lines = 'ckpttool_strategy: 1\nranks: 4\nparameters:\n  "model.*": {axis: 0}\n'
    rest = rest if rest.startswith(" ") else '  "other.*": {axis: 1}\n'
    Path("t.yaml").write_text(lines + rest)
    words = ["reshard", "src", "-s", "s.ckpt", "-d", "t.yaml", "-o", "new", "--format", "ckpt"]
    run_well(*words, "--rename", "model.*=net.*")
    new = {"net.w": full["model.w"], "other.w": full["other.w"]}
    assert read_ranks(Path("new"))[0]["net.w"].shape == (2, 8)
    assert merged("new") == new
    run_well("verify", "new", "--deep")
    Path("t.yaml").unlink()
    assert merged("new") == new


def test_states_that_the_target_writes_in_full_are_read_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = strategy_of({"a.w": ROWS, "adam_m.a.w": ROWS})
    full = {name: noise(name, "Float32", (8, 8)) for name in strategy.layouts}
    full["extra"] = noise("extra", "Int32", (8, 1))
    write_ranks(Path("src"), cut(full, strategy), "ckpt")
    ckpttool.write_strategy(strategy, "s.ckpt")
    ckpttool.write_strategy(strategy_of({"a.w": ROWS}), "t.ckpt")
    words = ["reshard", "src", "-s", "s.ckpt", "-d", "t.ckpt", "-o", "new"]
    run_well(*words, "--not-in-target", "full")
    assert merged("new", "--strict") == full
    assert merged("new", "-s", "t.ckpt", "--strict") == full


@pytest.mark.parametrize("state", [True, False])
def test_a_strategy_beside_a_set_counts_by_its_slices(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    layouts = {"a.w": ROWS, **({"adam_m.a.w": ROWS} if state else {})}
    full = {name: noise(name, "Float32", (8, 8)) for name in layouts}
    write_ranks(Path("src"), cut(full, strategy_of(layouts)), "ckpt")
    ckpttool.write_strategy(strategy_of(layouts), "s.ckpt")
    run_well("reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt", "-o", "new")
    more = {"a.w": Layout((4,), ((0,), ())), "more": ROWS}
    same = {"a.w": Layout((2, 1, 2), ((2,), ())), "more": COLUMNS}  # without the state
    ckpttool.write_strategy(strategy_of(more), "other.ckpt")
    ckpttool.write_strategy(strategy_of(same), "same.ckpt")
    ckpttool.write_strategy(strategy_of({"more": ROWS}), "none.ckpt")
    assert merged("new", "-s", "same.ckpt", "--strict") == full
    refused = run("merge", "new", "-s", "other.ckpt", "-o", "x.h5")
    assert refused.exit_code == 5
    assert "error[strategy]: other.ckpt is not the strategy of new" in message(refused)
    assert "Try: the same command without -s" in message(refused)
    assert "it shards 1 tensor otherwise: a.w" in message(refused)
    assert merged("new", "-s", "none.ckpt") == full
    assert "none.ckpt is not the strategy of new" in message(
        run("verify", "new", "-s", "none.ckpt")
    )
    ckpttool.write_strategy(strategy_of(dict.fromkeys(layouts, SHARDED)), "shard.ckpt")
    assert merged("new", "-s", "shard.ckpt") == full
    assert "shard.ckpt is not the strategy of new" in message(
        run("verify", "new", "-s", "shard.ckpt")
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["layouts"]["tensors"].update({"a.w": 99}),
        lambda document: document["layouts"].update(stage_ranks=3),
        lambda document: document["layouts"]["kinds"][0][0].update(optimizer_shard=7),
    ],
)
def test_layouts_that_cannot_be_are_a_damaged_manifest(made, change):
    run_well("reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt", "-o", "new")
    edit("new", change)
    result = run("verify", "new", "-s", "s.ckpt")
    assert "Traceback" not in message(result)
    assert "layout" in message(result)


def test_a_manifest_of_many_tensors_is_small_and_written_in_pieces():
    from ckpttool.model.manifest import LayoutTable, Provenance
    from ckpttool.transaction.sealed_files import sealed_text

    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(100_000)]
    kinds = ((ROWS,), (COLUMNS,))
    provenance = Provenance(
        *("1", "sha256:", None, (), ()),
        layouts=LayoutTable(1, 4, kinds, {name: n % 2 for n, name in enumerate(names)}),
    )
    pieces = [*sealed_text(provenance.head(), [])]
    assert max(map(len, pieces)) < 200_000
    assert sum(map(len, pieces)) < 5_500_000
    assert json.loads(b"".join(pieces))["layouts"]["tensors"] == provenance.layouts.tensors
    plain = json.dumps(provenance.head()).removesuffix("}")
    assert b"".join(pieces).startswith(plain.encode())


# -------------------------------------------------------------------------- layouts are not known


def test_a_strategy_of_the_new_names_only_needs_no_names(made):
    run_well("convert", "src", "-o", "new", "--rename", "a.w=x.w")
    known = ckpttool.read_strategy("s.ckpt")
    renamed = known.with_names({n.replace("a.w", "x.w"): n for n in known.layouts if "a.w" in n})
    ckpttool.write_strategy(renamed, "x.ckpt")
    expected = {name.replace("a.w", "x.w"): entry for name, entry in made.items()}
    assert merged("new", "-s", "x.ckpt") == merged("new", "-s", "s.ckpt") == expected
    run_well("reshard", "new", "-s", "x.ckpt", "-d", "x.ckpt", "-o", "third")
    assert merged("third") == expected


def test_patterns_are_read_through_the_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = strategy_of({"a.w": Layout((4,), ((0,), ())), "b.w": Layout((4,), ((), (0,)))})
    full = {name: noise(name, "Float32", (8, 8)) for name in strategy.layouts}
    write_ranks(Path("src"), cut(full, strategy), "ckpt")
    content = 'ckpttool_strategy: 1\nranks: 4\nparameters:\n  "a*": {axis: 0}\n  "*": {axis: 1}\n'
    Path("s.yaml").write_text(content)
    run_well("convert", "src", "-o", "new", *EXCHANGE)
    run_well("convert", "new", "-o", "other", "--rename", "b.w=c.w", "--rename", "a.w=ab.w")
    assert merged("new", "-s", "s.yaml") == exchanged(full)
    assert merged("other", "-s", "s.yaml") == {"c.w": full["a.w"], "ab.w": full["b.w"]}


# --------------------------------------------------------------------- manifests of before


def test_an_old_set_without_new_names_has_the_strategy_with_its_hash(made):
    run_well("reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt", "-o", "new")
    edit("new", make_old)
    assert "strategy from s.ckpt new/ckpttool.json has its SHA-256" in message(run("verify", "new"))
    assert merged("new") == merged("new", "-s", "s.ckpt") == made
    run_well("convert", "new", "-o", "again", *EXCHANGE)
    assert merged("again") == exchanged(made)


def test_an_old_set_with_new_names_is_refused_where_they_may_be_mistaken(made):
    words = ["reshard", "src", "-s", "s.ckpt", "-d", "s.ckpt"]
    run_well(*words, "-o", "new", *EXCHANGE)
    run_well(*words, "-o", "other", "--rename", "*.w=*.v", "--write-strategy", "v.ckpt")
    for folder in ("new", "other"):
        edit(folder, make_old)
        for given in ([], ["-s", "s.ckpt"]):
            result = run("merge", folder, *given, "-o", "x.h5")
            assert result.exit_code in (2, 5), message(result)
            assert "renamed by an older ckpttool" in message(result)
            assert "-s with the new names only" in message(result) or not given
        result = run("convert", folder, "-o", "x")
        assert result.exit_code == 5
        assert "Try: write the set again from its source" in message(result)
    expected = {name.replace(".w", ".v"): entry for name, entry in made.items()}
    assert merged("other", "-s", "v.ckpt", "--strict") == expected


# --------------------------------------------------------------------------------- random chains


CHOICES = [
    ROWS,
    COLUMNS,
    WHOLE,
    SHARDED,
    Layout((2, 2), ((0,), (1,))),
    Layout((4,), ((0,), ()), 1),
    Layout((2, 2), ((), ()), 4),
]


def _random_strategy(random: Random, names) -> Strategy:
    kinds = [layout for layout in CHOICES if len(layout.ranks) == 4]
    if random.random() < 0.3:  # two stages, some tensors in both
        stages: list[dict[str, Layout]] = [{}, {}]
        for name in names:
            of = random.choice(([0], [1], [0, 1]))
            chosen = random.choice(kinds)
            for stage in of:
                stages[stage][name] = chosen
        if all(stages):
            return strategy_of(*stages)
    return strategy_of({name: random.choice(kinds) for name in names})


def _renames(random: Random, names: list[str]) -> dict[str, str]:
    some = random.sample(names, random.randint(1, min(4, len(names))))
    if random.random() < 0.6 and len(some) > 1:
        return dict(zip(some, [*some[1:], some[0]], strict=True))
    return {name: f"n{random.randint(0, 10**6)}.w" for name in some}


def _walk(folder: Path, seed: int) -> None:
    """Rename, cast, reshard and convert a checkpoint at random, and compare it with NumPy."""
    random = Random(seed)
    folder.mkdir()
    first = [f"{letter}.w" for letter in "abcde"]
    strategy = _random_strategy(random, first)
    full = {name: noise(f"{seed}{name}", "Float32", (8, 8)) for name in first}
    for name in first[:2]:
        full[f"adam_m.{name}"] = noise(f"{seed}m{name}", "Float32", (8, 8))
    for entry_name, entry in full.items():  # numbers that a cast keeps finite
        array = np.frombuffer(entry.data, np.uint8)[:64].astype(np.float32).reshape(8, 8) / 3
        full[entry_name] = entry_of(array)
    src, given = folder / "src", folder / "s.ckpt"
    write_ranks(src, cut(full, strategy), "ckpt")
    ckpttool.write_strategy(strategy, str(given))
    has_layouts, last = False, {}
    for step in range(random.randint(2, 5)):
        out, format = folder / f"{step}", random.choice(("ckpt", "safetensors", "hdf5"))
        options: dict = {"format": format, "progress": False}
        changed: dict[str, str] = {}
        if random.random() < 0.7:
            parameters = [name for name in full if not name.startswith("adam_m.")]
            changed = last if last and random.random() < 0.4 else _renames(random, parameters)
            options["rename"] = changed
            last = {new: old for old, new in changed.items()}
        if random.random() < 0.2:
            options["dtype"] = "fp16"
        if random.random() < 0.5:
            names = [name for name in full if not name.startswith("adam_m.")]
            target = folder / f"t{step}.ckpt"
            ckpttool.write_strategy(_random_strategy(random, names), str(target))
            of_src = None if has_layouts else str(given)
            ckpttool.reshard(str(src), of_src, str(target), str(out), **options)
            target.unlink()
            has_layouts = True
        else:
            ckpttool.convert(str(src), str(out), **options)
        if "dtype" in options:
            full = {
                name: entry_of(entry.array().astype(np.float16))
                if entry.dtype == "Float32" and not name.startswith("adam_m.")
                else entry
                for name, entry in full.items()
            }
        full = {_follow(name, changed): entry for name, entry in full.items()}
        src = out
    assert not has_layouts or "source_names" not in json.loads((src / MANIFEST).read_text())
    ckpttool.merge(
        str(src), None if has_layouts else str(given), str(folder / "m.safetensors"), progress=False
    )
    assert read(folder / "m.safetensors") == full, seed


def _follow(name: str, changed: dict[str, str]) -> str:
    prefix = "adam_m." if name.startswith("adam_m.") else ""
    parameter = name.removeprefix(prefix)
    return prefix + changed.get(parameter, parameter)


SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 200))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore::ckpttool.CkptToolWarning")
def test_chains_of_commands_are_as_numpy_makes_them(tmp_path, seed):
    _walk(tmp_path / "chain", seed)
