"""Hand-written strategies from Chinese keyboards: signs and encodings that YAML does not know."""
# ruff: noqa: RUF001

import re
import subprocess

import pytest

from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import read_strategy

CHINESE = """ckpttool_strategy: 1  # 手写的策略：八卡，“张量并行”
ranks: 2
parameters:
  '层［0］': replicated
  "*.weight": {axis: 0}
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ranks: 2", "ranks： 2", r"line 2, column 6: ： where the ASCII sign : belongs"),
        ("{axis: 0}", "［2，1］", r"line 5, column 15: ［ where the ASCII sign \[ belongs"),
        ("{axis: 0}", "[2， 1]", r"line 5, column 17: ， where the ASCII sign , belongs"),
        ('"*.weight"', "“*.weight”", r'line 5, column 3: “ where the ASCII sign " belongs'),
        ('"*.weight"', "‘*.weight’", r"line 5, column 3: ‘ where the ASCII sign ' belongs"),
        (
            "{axis: 0}",
            "{axis:\u30000}",
            r"line 5, column 21: \u3000 where the ASCII sign   belongs",
        ),
        ("replicated", "ｒeplicated", r"line 4, column 11: ｒ where the ASCII sign r belongs"),
    ],
)
def test_signs_that_only_look_like_ascii_are_named_with_their_line(old, new, words, tmp_path):
    path = tmp_path / "hand.yaml"
    path.write_text(CHINESE, encoding="utf-8")
    assert read_strategy(str(path)).rules is not None  # comments and quoted names may have them
    path.write_text(CHINESE.replace(old, new), encoding="utf-8")
    with pytest.raises(StrategyError, match=rf"hand\.yaml, {words}") as caught:
        read_strategy(str(path))
    assert re.fullmatch("`.` in place of `.`, in all of the file", caught.value.hint)


def test_typographic_quotes_in_json_are_named_with_their_line(tmp_path):
    path = tmp_path / "hand.json"
    path.write_text('{\n "ranks": 2,\n “ckpttool_strategy”: 1}', encoding="utf-8")
    with pytest.raises(StrategyError, match=r'hand\.json, line 3, column 2: “ where .* " belongs'):
        read_strategy(str(path))


@pytest.mark.parametrize("name", ["hand.yaml", "手 写.yml"])
def test_a_file_in_gbk_is_named_with_its_line_and_the_command_that_converts_it(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(CHINESE.replace("手", "\n# 联通手").encode("gbk"))
    said = r"line 2: not UTF-8; in GBK it reads # 联通手写的策略：.*; if that is right, iconv -f GB"
    with pytest.raises(StrategyError, match=said) as caught:
        read_strategy(str(path))
    _, _, command = caught.value.hint.partition(", ")
    command = command.replace("NEW", str(tmp_path / "new"))
    subprocess.run(command, shell=True, check=True)
    assert read_strategy(str(next(tmp_path.glob("new*")))).rules is not None


@pytest.mark.parametrize(
    ("comment", "read"),
    [("größe der Gewichte", "gr鲞e der Gewichte"), ("poids répétés", "poids r")],
)
def test_a_file_in_latin_1_is_shown_as_gbk_would_read_it(comment, read, tmp_path):
    path = tmp_path / "hand.yaml"
    path.write_bytes(f"ckpttool_strategy: 1\n# {comment} .\n".encode("latin-1"))
    said = f"line 2: not UTF-8; in GBK it reads # {read}.*; if that is right, iconv"
    with pytest.raises(StrategyError, match=said):
        read_strategy(str(path))


def test_other_encodings_are_told(tmp_path):
    path = tmp_path / "hand.yaml"
    path.write_bytes(CHINESE.encode("utf-16"))
    with pytest.raises(StrategyError, match=r"hand.yaml: not UTF-8, but UTF-16; iconv -f UTF-16"):
        read_strategy(str(path))
    path.write_bytes(b"ranks: 2\n# \xff\xff\n")
    with pytest.raises(StrategyError, match=r"hand.yaml, line 2: not UTF-8; byte 11 is 0xff"):
        read_strategy(str(path))
