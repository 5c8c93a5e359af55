"""Hand-written strategies, YAML and MindSpore's JSON, and what is read: see ``documents.txt``.

A line is a word for how it is read, and a document, in which ``\\n`` and ``\\xff`` stand for these
characters: ``yaml`` gives its values and their columns, ``cut`` is the line of ``w``, which has
12 x 12 elements, in a strategy of 4 ranks, ``layout`` that of ``w`` in a file of MindSpore's.
``hand.yaml``, ``hand.json`` and ``s.json`` are files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.model.layout import Layout
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import CkptToolError
from ckpttool.strategy_files.handwritten import Node, parse_yaml
from ckpttool.strategy_files.reader import read_strategy
from tests.support.transcripts import check_case, read_cases

TEXT = Path(__file__).with_name("documents.txt")
SHAPES = {"w": TensorMeta("w", "Float32", (12, 12))}
AROUND = {
    "cut": (b"ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: ", b""),
    "layout": (b'{"parallel_layout_item": {"w": ', b"}}"),
}
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def decode(text: str) -> bytes:
    """Return a document; `\\xff` is a byte, `\\uff1a` a character."""
    parts = re.split(r"\\(x..|u....|.)", text)
    plain = [part.encode() for part in parts[::2]]
    signs = [
        bytes.fromhex(one[1:])
        if one[0] == "x"
        else (chr(int(one[1:], 16)) if one[0] == "u" else ESCAPES[one]).encode()
        for one in parts[1::2]
    ]
    return b"".join(a + b for a, b in zip(plain, [*signs, b""], strict=True))


def outcome(how: str, document: bytes) -> Iterator[str]:
    """Yield what is read, or every problem."""
    try:
        if how == "yaml":
            yield show(parse_yaml(document, "a.yaml"))
            return
        path = Path({"cut": "hand.yaml", "layout": "s.json"}.get(how, how))
        before, after = AROUND.get(how, (b"", b""))
        path.write_bytes(before + document + after)
        strategy = read_strategy(str(path))
        problems = ()
        if strategy.rules is not None:
            strategy, problems = strategy.resolve(SHAPES)
        for problem in problems:
            yield on_one_line(problem.text)
        for name, layouts in strategy.layouts.items():
            yield f"{name}: {'; '.join(map(spell, layouts))}"
        yield from (note.text for note in strategy.notes)
    except CkptToolError as error:
        if error.exit_code != 4:
            yield f"exit {error.exit_code}"
        for diagnostic in error.diagnostics:
            yield on_one_line(diagnostic.text)


def on_one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " | ", text)


def show(node: Node) -> str:
    if isinstance(node.value, dict):
        return f"{{{', '.join(f'{key!r}: {show(one)}' for key, one in node.value.items())}}}"
    if isinstance(node.value, tuple):
        return f"[{', '.join(map(show, node.value))}]"
    return repr(node.value)


def spell(one: Layout) -> str:
    told = [f"{one.device_matrix} {list(map(list, one.tensor_map))}"]
    told += [
        f"{name} {getattr(one, name)}"
        for name in ("optimizer_shard", "first_rank", "full_shape", "rows", "fields")
        if getattr(one, name) != getattr(Layout((), ()), name)
    ]
    return ", ".join(told)


@pytest.mark.parametrize("title", read_cases(TEXT))
def test_documents_are_read_or_refused_with_the_reason(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def act(line):
        how, _, text = line.partition(" ")
        yield from outcome(how, decode(text))

    check_case(TEXT, title, act)
