"""The documents of ``--json``: each fits its schema, and no schema says what no document has.

`tests.support.commands.run` checks every document that a test makes a command print.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from ckpttool.formats import get_format
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.answer import Answer, DiagnosticAnswer, Failure
from ckpttool.operations.conversion import Conversion
from ckpttool.operations.explanation import Explanation
from ckpttool.operations.finalized import Finalized
from ckpttool.operations.inspected import (
    InspectedFile,
    InspectedFiles,
    InspectedForeign,
    InspectedRanks,
    InspectedSaves,
    InspectedSteps,
    InspectedStrategy,
)
from ckpttool.operations.strategies import RanksToFetch, WrittenStrategy
from ckpttool.operations.strategy_check import StrategyCheck
from ckpttool.operations.strategy_diff import StrategyComparison
from ckpttool.operations.strategy_draft import StrategyDraft
from ckpttool.operations.tensor_diff import Difference
from ckpttool.operations.values import Values
from ckpttool.operations.verification import Verification
from tests.support.checkpoints import create_file, noise, write_file, write_indexed, write_ranks
from tests.support.commands import command_of, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.documents import REFERENCE, SCHEMAS, check_document, declared, schema_of, used
from tests.support.file_bytes import layout, strategy
from tests.support.schemas import make_schema, make_schema_of_kinds
from tests.support.snapshots import SNAPSHOTS, UPDATE

CASE = GOLDEN / "tutorial_8_to_8_retrain"
UNEVEN = GOLDEN / "uneven_manual_split" / "src_strategy.ckpt"
DEVICE = {"device_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"}
TABLE = {"version": "1.0", "server_list": [{"server_id": "node1", "device": [DEVICE]}]}
DOCUMENT = re.compile(r"(?ms)^\$ ckpttool ([^\n]*) --json[^\n]*\n(\{.*?)\n(?=\n|2>|=>|\Z)")
ANSWERS: dict[str, type[Answer]] = {
    "diagnostic.json": DiagnosticAnswer,
    "diff.json": Difference,
    "error.json": Failure,
    "explain.json": Explanation,
    "finalize.json": Finalized,
    "run.json": Conversion,
    "strategy-check.json": StrategyCheck,
    "strategy-diff.json": StrategyComparison,
    "strategy-draft.json": StrategyDraft,
    "strategy-file.json": WrittenStrategy,
    "strategy-ranks.json": RanksToFetch,
    "verify.json": Verification,
}
INSPECTED = (
    *(InspectedFile, InspectedFiles, InspectedRanks, InspectedSaves),
    *(InspectedForeign, InspectedStrategy, Values, InspectedSteps),
)
YAML = "ckpttool_strategy: 1\nranks: 2\nparameters:\n  w: {axis: 0}\n"


def snapshots() -> Iterator[tuple[str, dict[str, object]]]:
    for path in (*SNAPSHOTS.rglob("*.txt"), *SNAPSHOTS.with_name("sessions").glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        for command, document in DOCUMENT.findall(text):
            yield command_of(shlex.split(command)), json.loads(document)


@pytest.fixture
def others() -> list[list[str]]:
    w = noise("w", "Float32", (8, 4))
    write_ranks(Path("run"), {r: {"w": w.excerpt(slice(4 * r, 4 * r + 4))} for r in (0, 1)}, "ckpt")
    Path("run/rank_table.json").write_text(json.dumps(TABLE))
    for rank, step in ((0, "1_2"), (1, "3_4")):
        write_ranks(Path("steps"), {rank: {"w": w}}, "ckpt")
        next(Path(f"steps/rank_{rank}").iterdir()).rename(f"steps/rank_{rank}/net-{step}.ckpt")
    Path("s.yaml").write_text(YAML)
    Path("fields.ckpt").write_bytes(strategy(layout("w", (2,), (0, -1), field=2)))
    for name, text in (("a", "one"), ("b", "two")):
        metas = [TensorMeta("note", "str", (), text)]
        create_file(get_format("ckpt"), f"{name}.ckpt", metas, {})
    write_file(Path("w.safetensors"), {"w": w}, "safetensors")
    write_file(Path("v.safetensors"), {"w": noise("v", "Float32", (8, 4))}, "safetensors")
    rule = "recipe: mine\nversion: 1\nsource: x\nrules: [{axes: a b, names: {w: v}}]\n"
    Path("mine.yaml").write_text(rule)
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    write_indexed(Path("model"), {"part0.safetensors": {"e.__map_keys__": w}})
    return [
        ["inspect", "run/rank_table.json"],
        ["inspect", "steps"],
        ["inspect", "run", "-s", "s.yaml"],
        ["inspect", "run", "-s", "fields.ckpt"],
        ["inspect", "s.yaml"],
        ["strategy", "draft", "run", "-o", "draft.yaml"],
        ["inspect", "fields.ckpt"],
        ["inspect", str(UNEVEN)],
        ["strategy", "diff", "fields.ckpt", str(UNEVEN)],
        ["merge", "run", "-s", "fields.ckpt", "-o", "m.ckpt"],
        ["inspect", "model"],
        ["merge", "a.ckpt", "-o", "many", "--format", "ckpt", "--max-shard-size", "4KiB"],
        ["inspect", "many"],
        ["inspect", str(GOLDEN / "hyper_parallel" / "newtorch_ragged" / "ckpt")],
        ["merge", "w.safetensors", "-o", "v", "--recipe", "mine.yaml", "--hf-config", "hf"],
        ["recipe", "check", "w.safetensors", "--recipe", "mine.yaml", "--hf-config", "hf"],
        ["inspect", "w.safetensors", "--recipe", "mine.yaml"],
        ["diff", "a.ckpt", "b.ckpt"],
        ["verify", "a.ckpt", "--like", "b.ckpt"],
        ["verify", "w.safetensors", "--like", "v.safetensors", "--deep"],
    ]


def test_every_schema_is_one_and_every_property_of_it_is_in_some_document(others):
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    printed = ((command_of(words), json.loads(run(*words, "--json").stdout)) for words in others)
    seen = set()
    for command, document in (*snapshots(), *printed):
        seen |= used(schema_of(command, document), document)
    assert sorted(set().union(*map(declared, SCHEMAS)) - seen) == []


def test_no_object_of_a_schema_is_open():
    def check(node: object, place: str) -> None:
        if isinstance(node, dict):
            is_object = "object" in (node.get("type") or ())
            assert not is_object or "additionalProperties" in node, place
            assert not is_object or {*node.get("required", ())} <= {*node.get("properties", ())}
            for key, child in node.items():
                check(child, f"{place}/{key}")

    for name, schema in SCHEMAS.items():
        check(schema, name)


@pytest.fixture
def page() -> str:
    shutil.copytree(CASE / "src", "checkpoint")
    shutil.rmtree("checkpoint/rank_3")
    shutil.copy(CASE / "src_strategy.ckpt", "strategy.ckpt")
    return (REFERENCE / "json.md").read_text(encoding="utf-8")


def fold(value: object, indent: str = "") -> str:
    line = json.dumps(value)
    if len(indent) + len(line) < 80 or not isinstance(value, (dict, list)):
        return line
    inner = indent + " "
    if isinstance(value, list):
        return f",\n{inner}".join(fold(one, inner) for one in value).join("[]")
    items = (f"{json.dumps(key)}: {fold(one, inner)}" for key, one in value.items())
    return f",\n{inner}".join(items).join("{}")


def test_the_examples_of_the_page_are_what_the_commands_print(page):
    examples = re.findall(r"```sh\nckpttool ([^\n]*)\n```\n\n```json\n(.*?)```", page, re.DOTALL)
    (merge, merged), (inspect, failed) = examples
    printed = json.loads(run_well(*merge.split()).stdout)
    nbytes = printed["outputs"][0]["nbytes"]
    assert printed["dst_bytes"] == nbytes
    printed["dst_bytes"] = printed["outputs"][0]["nbytes"] = 50944  # as the library for HDF5 does
    assert printed["seconds"] >= 0
    printed["seconds"] = 0.06
    del printed["largest_sharded"][1:]
    refused = json.loads(run(*shlex.split(inspect, comments=True)).stdout)
    if os.environ.get(UPDATE):
        text = page.replace(merged, fold(printed) + "\n").replace(failed, fold(refused) + "\n")
        (REFERENCE / "json.md").write_text(text, encoding="utf-8")
    else:
        assert (merged, failed) == (f"{fold(printed)}\n", f"{fold(refused)}\n")


@pytest.mark.parametrize("name", ["json.md", "exit-codes.md"])
def test_the_commands_of_the_pages_run(page, name):
    text = (REFERENCE / name).read_text(encoding="utf-8")
    lines = re.findall(r"^ckpttool ([^|>\n]*)", text, re.MULTILINE)
    assert lines
    for file in ("a.h5", "b.h5"):
        run_well("merge", "checkpoint", "-s", "strategy.ckpt", "-o", file)
    for line in lines:
        result = run(*shlex.split(line))
        assert result.exit_code == ("verify" in line) + 2 * ("checkpiont" in line), line


@pytest.mark.source
@pytest.mark.parametrize("name", ANSWERS)
def test_the_schema_of_an_answer_is_made_of_its_fields(name):
    path, made = REFERENCE / "schema" / name, make_schema(ANSWERS[name])
    if os.environ.get(UPDATE):
        path.write_text(made, encoding="utf-8")
    else:
        assert path.read_text(encoding="utf-8") == made


@pytest.mark.source
def test_the_schema_of_inspect_is_made_of_the_fields_of_all_that_it_finds():
    path = REFERENCE / "schema" / "inspect.json"
    summary = "The JSON document of inspect: one of the kinds below."
    made = make_schema_of_kinds("Inspect", summary, INSPECTED)
    if os.environ.get(UPDATE):
        path.write_text(made, encoding="utf-8")
    else:
        assert path.read_text(encoding="utf-8") == made


@pytest.mark.source
def test_the_page_names_every_key_and_links_to_every_schema():
    text = (REFERENCE / "json.md").read_text(encoding="utf-8")
    for name, schema in SCHEMAS.items():
        assert f"](schema/{name})" in text
        kinds = schema.get("$defs", {"": schema})
        for kind in ("", "InspectedFile", "InspectedFiles", "InspectedRanks"):
            keys = kinds.get(kind, {}).get("properties", {})
            assert [key for key in keys if f"`{key}`" not in text] == []


@pytest.mark.parametrize(
    "change", [{"more": 1}, {"schema": 2}, {"step": 5}, {"notes": [{"code": "nan"}]}]
)
def test_a_document_that_does_not_fit_its_schema_is_refused(change):
    printed = json.loads(run_well("inspect", CASE / "src", "--json").stdout)
    with pytest.raises(AssertionError, match=r"^inspect\.json: \$"):
        check_document("inspect", json.dumps({**printed, **change}), 0)
