"""YAML of which every value has one meaning and a place, and nothing is larger than the file."""

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.problems import StrategyError
from ckpttool.strategy_files.handwritten import MAX_BYTES, Node, nodes_of_json, parse_yaml
from tests.strategies import examples


def bare(node):
    """The values of a node and of all below it, without places."""
    if isinstance(node.value, dict):
        return {key: bare(item) for key, item in node.value.items()}
    if isinstance(node.value, tuple):
        return [bare(item) for item in node.value]
    return node.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: [1, -2, 0]\nb:\n  c: x y\n", {"a": [1, -2, 0], "b": {"c": "x y"}}),
        ("- a\n- [b, {c: d}]\n", ["a", ["b", {"c": "d"}]]),
        ("a:\nb: ~\nc: null\nd: ''\n", {"a": None, "b": None, "c": None, "d": ""}),
        (
            "[010, 0x1f, 1_000, 1:30, 1.5, 1e3, +1]",
            ["010", "0x1f", "1_000", "1:30", "1.5", "1e3", "+1"],
        ),
        ("[yes, no, on, true, 2024-01-01]", ["yes", "no", "on", "true", "2024-01-01"]),
        ("['4', \"4\", 4]", ["4", "4", 4]),
        ("no: 1\n1: 2\n1.5: 3\n'': 4\n", {"no": 1, "1": 2, "1.5": 3, "": 4}),
        ("\ufeffa: größe 𝄞\n", {"a": "größe 𝄞"}),
        ("# only a comment\n", None),
        ("", None),
        ('{"a": [1, "x\\n"]}', {"a": [1, "x\n"]}),
        ("9999999999999999999", "9999999999999999999"),
    ],
)
def test_what_json_has_is_read_and_nothing_is_turned_into_something_else(text, value):
    assert bare(parse_yaml(text.encode(), "a.yaml")) == value


def test_every_value_knows_where_it_stands():
    root = parse_yaml(b"a:\n  b: [1,\n    x]\n", "a.yaml").value
    inner = root["a"].value["b"]
    assert root["a"].place == "a.yaml, line 1, column 1"
    assert inner.place == "a.yaml, line 2, column 3"  # of its key
    places = ["a.yaml, line 2, column 7", "a.yaml, line 3, column 5"]
    assert [item.place for item in inner.value] == places


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "^line 3, column 1: key a comes twice$"),
        ("a: {b: 1, 'b': 2}\n", "^line 1, column 11: key b comes twice$"),
        ("a: &x [1]\nb: *x\n", "^line 1, column 4: anchor &x is not read$"),
        ("- &x a\n", "^line 1, column 3: anchor &x"),
        ("a: *x\n", r'^line 1, column 4: alias \*x is not read; quotes .*: "\*\.weight"$'),
        (
            "*.weight: 1\n",
            r"line 1, column 2: not valid YAML: .*; quotes around a name or pattern",
        ),
        ("*weight: 1\n", r"^line 1, column 1: alias \*weight is not read; quotes around"),
        (
            "a: !!python/object/apply:os.system [x]\n",
            "^line 1, column 4: tag tag:yaml.org,2002:python/object/apply:os.system is not read$",
        ),
        ("!!binary a: 1\n", "^line 1, column 1: tag tag:yaml.org,2002:binary is"),
        ("a: !x 1\n", "^line 1, column 4: tag !x is not read$"),
        ("a: ! 1\n", "^line 1, column 4: tag ! is not read$"),
        ("a: !x &y 1\n", "^line 1, column 4: anchor &y"),
        ("? [a]\n: 1\n", "line 1, column 3: a key is not text"),
        ("a: [1\n", "line 2, column 1: not valid YAML: expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "line 2, column 1: not valid YAML: a tab; indent"),
        ("a: 1\n---\nb: 2\n", "^line 2, column 1: a second document, expected one$"),
        ("a: 1\n---\n", "^line 2, column 1: a second document, expected one$"),
        ("a: \x01\n", "not valid YAML: unacceptable character"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_what_has_no_one_meaning_is_refused_with_its_place(text, reason):
    with pytest.raises(StrategyError) as caught:
        parse_yaml(text.encode(), "a.yaml")
    assert re.search(reason, str(caught.value).removeprefix("a.yaml, "))


def test_an_alias_bomb_is_refused_at_its_first_anchor():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(StrategyError, match=r"^a.yaml, line 1, column 5: anchor &a0 is not read$"):
        parse_yaml("\n".join(lines).encode(), "a.yaml")


def test_what_is_too_large_or_no_text_is_refused():
    with pytest.raises(StrategyError, match=f"{MAX_BYTES + 1} bytes .*; at most {MAX_BYTES}"):
        parse_yaml(b"#" * (MAX_BYTES + 1), "a.yaml")
    with pytest.raises(StrategyError, match="not UTF-8"):
        parse_yaml(b"a: \xff", "a.yaml")


def test_json_becomes_the_same():
    document = {"a": [1, {"b": None}], "c": "x", "d": 1.5, "e": True}
    node = nodes_of_json(json.dumps(document).encode(), "a.json")
    assert bare(node) == {"a": [1, {"b": None}], "c": "x", "d": "1.5", "e": "True"}
    assert node.value["a"].place == "a.json"
    with pytest.raises(StrategyError, match=r"^a.json: .*nested too deep"):
        nodes_of_json(b"[" * 900 + b"]" * 900, "a.json")
    with pytest.raises(StrategyError, match="a: stored twice"):
        nodes_of_json(b'{"a": 1, "a": 2}', "a.json")


@examples(300)
@given(
    st.text(st.sampled_from("ab:-[]{}&*!?|>'\"#%@` \n\t0\\,~"), max_size=24)
    | st.binary(max_size=16)
)
def test_any_bytes_give_nodes_or_a_reason(text):
    data = text if isinstance(text, bytes) else text.encode()
    with contextlib.suppress(StrategyError):
        assert isinstance(parse_yaml(data, "a.yaml"), Node)
