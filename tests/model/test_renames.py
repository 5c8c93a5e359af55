"""New names: by globs and expressions, of what follows a parameter."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ckpttool.model.belonging import Belonging
from ckpttool.model.renames import Rename, parse_renames, rename
from ckpttool.problems import RulesError
from ckpttool.strategy_files.handwritten import MAX_BYTES
from ckpttool.strategy_files.rename_files import read_renames


@pytest.mark.parametrize(
    ("old", "new", "name", "expected"),
    [
        ("x[0].w", "y.w", "x[0].w", "y.w"),
        ("x[0].w", "y.w", "x0.w", "y.w"),
        ("x[0].w", "y.w", "x[1].w", None),
        ("x[01].*", "y*.*", "x[01].b", "y[01].b"),
        ("x[0].*", "y.*", "x[0].b", "y.b"),
        ("x.[0-3].w", "y.*.w", "x.2.w", "y.2.w"),
        ("a*b", "*", "a*b", "*"),
        ("a?b", "?", "a\nb", "\n"),
        ("[!a]*", "*_*", "bc", "b_c"),
        ("*a*b*", "<*><*><*>", "aabcab", "<aabc><><>"),
        ("*a?*.[01]*", "*|?|*|*|*", "xaya1.0.1z", "xay|1|.0|1|z"),
        ("*[0]*x", "*|*|*", "a[0]bx", "a[|0|]b"),
        ("**x?", "*,*,?", "abxc", "ab,,c"),
        (r"re:\[(\d)\]", r".\1", "x[0].y[1]", "x.0.y.1"),
    ],
)
def test_a_rule_gives_a_name(old, new, name, expected):
    assert Rename(old, new).apply(name, [name]) == expected


@pytest.mark.parametrize("glob", ["*a*a*a*a*a*b", "*a?*a?*[ab]*[!a]*c", "a*" * 40 + "c"])
def test_many_stars_take_time_in_the_length_of_a_name(glob):
    rule, began = Rename(glob, "*"), time.process_time()
    for name in ("a" * 50_000, "ab" * 25_000 + "d", "a[ab]" * 10_000):
        assert rule.apply(name, ()) is None
    assert time.process_time() - began < 5  # a regular expression with these stars takes for ever


@pytest.mark.parametrize("tag", ["e", "map", "s", "__map_keys__"])
def test_components_of_a_map_parameter_have_its_new_name(tag):
    names = [f"{tag}.__map_{part}__" for part in ("keys", "values", "statuses")]
    state = f"adam_m.{names[1]}"
    belongings = {state: Belonging("state", names[1])}
    found = rename([Rename(tag, "new")], [*names, state], belongings)
    assert found == {
        **{name: name.replace(f"{tag}.", "new.", 1) for name in names},
        state: "adam_m.new.__map_values__",
    }


@pytest.mark.parametrize("prefix", ["eta_", "mu_", "mu_product_"])
def test_single_values_of_a_parameter_follow_it(prefix):
    belongings = {f"{prefix}w": Belonging("counter", "w")}
    found = rename([Rename("*", "net.*")], ["w", f"{prefix}w"], belongings)
    assert found == {"w": "net.w", f"{prefix}w": f"{prefix}net.w"}


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_a_scale_follows_its_weight(suffix):
    names, belongings = ["a.w", f"a.w{suffix}"], {f"a.w{suffix}": Belonging("scale", "a.w")}
    found = rename([Rename("a.*", "b.*.x")], names, belongings)
    assert found == {"a.w": "b.w.x", f"a.w{suffix}": f"b.w.x{suffix}"}


def test_rules_of_python_are_a_mapping_pairs_or_texts():
    rules = [Rename("a.*", "b.*"), Rename("c", "d")]
    for given in ({"a.*": "b.*", "c": "d"}, [("a.*", "b.*"), "c=d"], rules):
        assert [*parse_renames(given)] == rules


@pytest.mark.parametrize("given", [{"lm_head.*": 1}, Path("names.yaml"), 3, [("a",)], [b"a=b"]])
def test_other_rules_are_refused_with_what_is_expected(given):
    with pytest.raises(ValueError, match=r"expected rules such as \"OLD=NEW\""):
        [*parse_renames(given)]


@pytest.mark.parametrize("kind", ["large", "pipe", "device", "folder"])
def test_a_file_of_rules_is_a_file_of_a_mebibyte_at_most(kind, tmp_path):
    path, reason = tmp_path / "rules.yaml", "not a file"
    if kind == "large":
        path.write_bytes(b'"a": "b"\n')
        assert len(read_renames(path)) == 1
        os.truncate(path, MAX_BYTES + 1)
        reason = "1048577 bytes are too many for rules"
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(RulesError) as caught:
        read_renames(path)
    assert caught.value.reason == reason
