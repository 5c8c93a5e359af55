"""YAML of which every value has one meaning and a place, and nothing is larger than the file."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.problems import StrategyError
from ckpttool.strategy_files.handwritten import MAX_BYTES, Node, nodes_of_json, parse_yaml
from tests.strategies import examples


def bare(node):
    if isinstance(node.value, dict):
        return {key: bare(item) for key, item in node.value.items()}
    if isinstance(node.value, tuple):
        return [bare(item) for item in node.value]
    return node.value


def test_every_value_knows_where_it_stands():
    root = parse_yaml(b"a:\n  b: [1,\n    x]\n", "a.yaml").value
    inner = root["a"].value["b"]
    assert root["a"].place == "a.yaml, line 1, column 1"
    assert inner.place == "a.yaml, line 2, column 3"  # of its key
    places = ["a.yaml, line 2, column 7", "a.yaml, line 3, column 5"]
    assert [item.place for item in inner.value] == places


def test_an_alias_bomb_is_refused_at_its_first_anchor():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(StrategyError, match=r"^a.yaml, line 1, column 5: anchor &a0 is not read$"):
        parse_yaml("\n".join(lines).encode(), "a.yaml")


def test_what_is_too_large_or_no_text_is_refused():
    with pytest.raises(StrategyError, match=f"{MAX_BYTES + 1} bytes .*; at most {MAX_BYTES}"):
        parse_yaml(b"#" * (MAX_BYTES + 1), "a.yaml")
    with pytest.raises(StrategyError, match="nested too deep"):
        parse_yaml(b"[" * 100_000, "a.yaml")


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
