"""Files of rules for names: those that come along, conditions, and the way back."""

from __future__ import annotations

import json

import pytest

from ckpttool.model.belonging import Belonging
from ckpttool.model.renames import Names, rename, rename_notes
from ckpttool.problems import CkptToolError
from ckpttool.strategy_files.rename_files import SHIPPED, read_renames
from tests.support.corpus import GOLDEN

LAYERS = json.loads((GOLDEN / "layers.json").read_text())
OF_NEITHER = ("PyTorch has no such tensors", "MindSpore has no such tensors")
COUNTER = "num_batches_tracked"


def shapes_of(layer, framework, network="x."):
    if not network and framework == "mindspore" and "alone" in layer:
        return {name: tuple(shape) for name, shape in layer["alone"].items()}
    names = layer[framework].items()
    return {network + name.removeprefix("x."): tuple(shape) for name, shape in names}


RULES = {file: read_renames(file) for file in SHIPPED}


def follow(file, shapes):
    rules, names = RULES[file], Names(shapes)
    changed = rename(rules, names, {})
    notes = {rule.message: rule.facts for rule in rename_notes(rules, names, names, {})}
    return {changed.get(name, name): name for name in shapes}, notes


def without_others(names, file, shapes):
    rules = [one for one in RULES[file] if one.note in OF_NEITHER]
    known = Names(shapes)
    lacking = {it for it in names if any(rule.apply(it, known) is not None for rule in rules)}
    return {*names} - lacking


def named(name):
    return "word_embeddings." if "Embedding" in name else "x."


@pytest.mark.parametrize("network", ["x.", ""], ids=["in a network", "alone"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda one: one["cell"])
def test_a_cell_gets_the_names_of_its_module(layer, network):
    shapes = shapes_of(layer, "mindspore", network)
    expected = {*shapes_of(layer, "torch", network)}
    if not any(name.endswith(COUNTER) for name in shapes):
        expected = {name for name in expected if not name.endswith(COUNTER)}
    assert without_others(follow("to-pytorch", shapes)[0], "to-pytorch", shapes) == expected


@pytest.mark.parametrize("is_alone", [False, True], ids=["in a network", "alone"])
@pytest.mark.parametrize(
    "layer",
    [one for one in LAYERS if one["cell"].startswith("nn.") and "Ext(" not in one["cell"]],
    ids=lambda one: one["cell"],
)
def test_a_module_gets_the_names_of_its_cell(layer, is_alone):
    network = named(layer["module"]) if "Embedding" in layer["module"] or not is_alone else ""
    shapes = shapes_of(layer, "torch", network)
    cell = shapes_of(layer, "mindspore", network)
    expected = without_others(cell, "to-pytorch", cell)
    if "BatchNorm3d" in layer["cell"]:  # only a note on the convolutions says so
        expected = {name.replace("bn2d.", "") for name in expected}
        if is_alone:
            expected = {"mean", "variance", "gamma", "beta"}
    found, _ = follow("to-mindspore", shapes)
    assert without_others(found, "to-mindspore", shapes) == expected


def test_layers_of_one_network_do_not_disturb_each_other():
    shapes, expected = {}, set()
    for number, layer in enumerate(LAYERS):
        ours = shapes_of(layer, "mindspore", f"block.{number}.")
        shapes |= ours
        expected |= {
            name
            for name in shapes_of(layer, "torch", f"block.{number}.")
            if any(one.endswith(COUNTER) for one in ours) or not name.endswith(COUNTER)
        }
    found, _ = follow("to-pytorch", shapes)
    assert without_others(found, "to-pytorch", shapes) == expected


def test_cells_whose_shapes_differ_are_in_a_note():
    differ = {
        layer["cell"].partition("(")[0]
        for layer in LAYERS
        if {name: shape for name, shape in layer["torch"].items() if name in layer["mindspore"]}
        != {name: shape for name, shape in layer["mindspore"].items() if name in layer["torch"]}
    }
    assert differ == {"nn.Conv1d", "nn.Conv1dTranspose"}
    for layer in LAYERS:
        _, notes = follow("to-pytorch", shapes_of(layer, "mindspore"))
        _, back = follow("to-mindspore", shapes_of(layer, "torch"))
        is_conv1d = layer["cell"].partition("(")[0] in differ
        assert (notes.get("a Conv1d of PyTorch lacks the third axis") == "x.weight") == is_conv1d
        if "Conv" in layer["cell"]:
            text = "a Conv1d of MindSpore has a third axis of 1 more"
            assert (back.get(text) == "x.weight") == (is_conv1d or "Conv1d" in layer["cell"])
        if "Conv3d" in layer["cell"]:
            assert "where these are, a BatchNorm3d of MindSpore has bn2d in its names" in back


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        # a scale of a layer's output, as timm and ConvNeXt have it
        ({"blocks.0.ls1.gamma": (8,), "blocks.0.norm1.weight": (8,)}, "blocks.0.ls1.gamma"),
        ({"film.gamma": (8,), "film.beta": (8,), "film.weight": (8, 8)}, "film.gamma, film.beta"),
        ({"rotary.w": (8, 8)}, "rotary.w"),
        ({"cell.w": (8,), "cell.b": (8,)}, "cell.w"),
        ({"head.w": (8,), "head.bias": (1,)}, "head.w"),
    ],
)
def test_names_that_are_no_cells_are_kept_and_listed(names, kept):
    found, notes = follow("to-pytorch", names)
    assert found == {name: name for name in names}
    assert notes == {"names of MindSpore that are kept, since no cell is like this": kept}


@pytest.mark.parametrize(
    "names",
    [
        {"wte.weight": (9, 4), "h.0.ln_1.weight": (4,), "h.0.ln_1.bias": (4,), "ln_f.bias": (4,)},
        {"model.embed_tokens.weight": (9, 4), "model.norm.weight": (4,), "lm_head.weight": (9, 4)},
        {"layers.0.dense1.weight": (4, 4), "layers.0.dense1.bias": (4,), "x.bn2d.weight": (4,)},
    ],
)
def test_names_of_pytorch_stay(names):
    assert follow("to-pytorch", names) == ({name: name for name in names}, {})


def test_a_layer_that_is_called_bn2d_is_not_a_batchnorm3d():
    parts = ("gamma", "beta", "moving_mean", "moving_variance")
    names = {f"block.bn2d.{part}": (4,) for part in parts}
    found, _ = follow("to-pytorch", {**names, "block.conv.weight": (4, 4, 3, 3)})
    assert "block.bn2d.weight" in found
    found, notes = follow("to-pytorch", names)
    assert {*found} == {f"block.{one}" for one in ("weight", "bias", "running_mean", "running_var")}
    facts = "block.bn2d.moving_mean to block.running_mean"
    assert notes == {"bn2d removed, as of a BatchNorm3d": facts}


@pytest.mark.parametrize(
    ("name", "shape", "new"),
    [
        ("tok_embeddings.weight", (9, 4), "tok_embeddings.embedding_table"),
        ("transformer.wpe.weight", (9, 4), "transformer.wpe.embedding_table"),
        ("emb.weight", (4,), "emb.w"),
        ("embed_out.weight", (9, 4), "embed_out.weight"),
        ("patch_embed.proj.weight", (9, 4), "patch_embed.proj.weight"),
        ("layers.3.act.weight", (1,), "layers.3.act.w"),
        ("features.2.weight", (16,), "features.2.w"),
        ("model.layers.0.input_layernorm.weight", (16,), None),
        ("blocks.0.ln1.weight", (16,), None),
        ("norm.0.weight", (16,), None),
        ("q_proj.weight", (16, 16), None),
    ],
)
def test_a_weight_without_a_bias_is_known_by_its_name_and_axes(name, shape, new):
    found, notes = follow("to-mindspore", {name: shape, "conv.weight": (4, 4, 3, 3)})
    assert {*found} == {new or name, "conv.weight"}
    is_kept = new in (None, name)
    assert [*notes.values()] == [name if is_kept else f"{name} to {new}"]
    assert all(note.startswith("kept") == is_kept for note in notes)


def read(tmp_path, text, reverse=True):
    path = tmp_path / "names.yaml"
    path.write_text(text)
    return read_renames(path, reverse)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ('"model.*": "net.*"', "net.a.b", "model.a.b"),
        ('"a.?.*": "*.x.*"', "1.x.b", "a.1.b"),
        ('"*.w": "*[0].w"', "y[0].w", "y.w"),
        ('"a": "b"\n"b": "a"', "a", "b"),
        ('"a.*": "x.*"\n"a.w": "x.w"', "x.w", "a.w"),
        ('"a": {to: "b"}', "b", "a"),
    ],
)
def test_a_file_is_used_the_other_way(tmp_path, text, old, new):
    assert rename(read(tmp_path, text), Names({old: (2,)}), {}) == {old: new}
    assert rename(read(tmp_path, text, reverse=False), Names({new: (2,)}), {}) == {new: old}


def test_a_wildcard_of_one_character_stays_one(tmp_path):
    (rule,) = read(tmp_path, '"a.?": "b.*"')
    assert rule.apply("b.x", Names()) == "a.x"
    assert rule.apply("b.xy", Names()) is None


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"re:^a$": b\n"c": d', [1]),
        ('"a.*": "b"\n"c.[01]": "d.*"\n"e[0]": "e"', [1, 2, 3]),
        ('"a": {to: b, beside: c}\n"d": {note: "stays"}', [1, 2]),
        ('"*.gamma": "*.weight"\n"x": y\n"*.w": "*.weight"', [1, 3]),
        ('"a.*": "x.*"\n"b.w": "x.w"\n"c": "x.w"', [1, 2, 3]),
        ('"lm.w": "lm.weight"\n"*.gamma": "*.weight"', [1, 2]),
    ],
)
def test_rules_without_an_inverse_are_refused_by_line(tmp_path, text, lines):
    with pytest.raises(CkptToolError) as caught:
        read(tmp_path, text)
    diagnostics = [
        diagnostic for diagnostic in caught.value.diagnostics if diagnostic.code == "invalid_rules"
    ]
    assert [int(str(one.where).split("line ")[1].split(",")[0]) for one in diagnostics] == lines
    assert read(tmp_path, text, reverse=False)


@pytest.mark.parametrize("files", [("to-pytorch", "to-mindspore"), ("to-mindspore", "to-pytorch")])
def test_the_files_that_come_along_are_the_way_back_of_each_other(files):
    with pytest.raises(CkptToolError, match="the rules have no inverse") as caught:
        read_renames(files[0], reverse=True)
    assert [diagnostic.hint for diagnostic in caught.value.diagnostics] == [
        f"--rename-file {files[1]}"
    ]


@pytest.mark.parametrize(
    ("wanted", "shape", "counts"),
    [
        ("any", (3,), True),
        ("any", None, True),
        ("none", (3,), False),
        ("same", (2, 2), True),
        ("same", (2,), False),
        ("same", None, False),
        ("n", (3,), True),
        ("n", (3, 1), False),
        ("n x 1", (3, 1), True),
        ("n x 1", (3, 11), False),
        ("m", (1,), False),
        ("m", (10,), True),
        ("3", (3,), True),
        ("2 names", (3,), True),
        ("1 names", (3,), False),
    ],
)
def test_a_condition_is_about_the_tensor_beside(tmp_path, wanted, shape, counts):
    key = "x." if wanted.endswith("names") else "x.b"
    text = f'"*.a": {{to: "*.c", beside: {{"{key.replace("x", "*")}": {wanted}}}}}'
    names = Names({"x.a": (2, 2), "x.b": shape, "y.a": (2, 2)})
    found = rename(read(tmp_path, text, reverse=False), names, {})
    assert found.get("x.a") == ("x.c" if counts else None)


@pytest.mark.parametrize(
    "rule",
    ["{beside: b}", "{to: [b]}", "{to: b, beside: 1}", "{to: b, beside: {}, x: y}", "[]"]
    + [f"{{to: b, beside: {{c: {one}}}}}" for one in ("some", "n x", "[n]", "~")]
    + ["[{to: b}, c]", "{to: b, note: 1}"],
)
def test_a_malformed_rule_is_refused(tmp_path, rule):
    with pytest.raises(CkptToolError, match="neither a name nor to: and beside:"):
        read(tmp_path, f'"a": {rule}', reverse=False)


def test_the_first_of_several_rules_for_a_name_counts(tmp_path):
    text = '"*.a":\n  - {to: "*.b", beside: "*.x"}\n  - {to: "*.c", beside: "*.y"}\n'
    names = Names(dict.fromkeys(["1.a", "1.x", "2.a", "2.y", "3.a", "4.a", "4.x", "4.y"]))
    found = rename(read(tmp_path, text, reverse=False), names, {})
    assert found == {"1.a": "1.b", "2.a": "2.c", "4.a": "4.b"}


def test_state_of_a_tensor_is_not_in_a_note():
    names = Names({"act.w": (3,), "moments.act.w": (3,)})
    rules, belongings = read_renames("to-pytorch"), {"moments.act.w": Belonging("state", "act.w")}
    (note,) = rename_notes(rules, names, names, belongings)
    assert note.facts == "act.w to act.weight"
    assert rename(rules, names, belongings)["moments.act.w"] == "moments.act.weight"


@pytest.mark.parametrize(("tag", "new"), [("emb.embedding_table", "emb.weight"), ("e.w", "e.w")])
def test_a_map_parameter_has_no_shape_of_its_own(tag, new):
    names = {f"{tag}.__map_{part}__": (2,) for part in ("keys", "values", "statuses")}
    found, _ = follow("to-pytorch", names)
    assert {*found} == {name.replace(tag, new) for name in names}
