"""hyper-parallel's checkpoints: boxes of tensors, and a pickle that says where they are.

What is said of such folders is in ``e2e/saves/hyper_parallel.txt``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pickletools
import random
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.discovery import hyper_parallel
from ckpttool.discovery.hyper_parallel import read_metadata
from ckpttool.formats.sandbox import Sandbox
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import CombinedError, FormatError, PlanError, UnsupportedError
from tests.strategies import examples, moves
from tests.support.checkpoint2 import write_safetensors
from tests.support.checkpoints import noise
from tests.support.commands import SUFFIXES, refused, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.hyper_parallel import HyperSave, classes
from tests.support.plans import check_conversions, plan_merge
from tests.support.readers import SAFETENSORS_TYPES, Entry, entry_of, read
from tests.support.spin import spin

# ------------------------------------------------------- what hyper-parallel itself has written

REAL = [
    pytest.param(
        path.parent, id=path.parent.name, marks=pytest.mark.exhaustive if number > 1 else ()
    )
    for number, path in enumerate(sorted((GOLDEN / "hyper_parallel").glob("*/expected.npz")))
]


def expected(case):
    """The full tensors of a golden folder."""
    with np.load(case / "expected.npz") as full:
        return dict(_entry(name, full[name]) for name in full)


def _entry(name, array):
    bare, _, kind = name.partition("|")
    if kind != "bf16":
        return bare, entry_of(array)
    bits = (array.view("<u4") >> 16).astype("<u2")
    return bare, Entry("BFloat16", array.shape, bits.tobytes())


@pytest.mark.parametrize("case", REAL)
def test_what_hyper_parallel_wrote_is_merged_byte_for_byte(case, tmp_path):
    full = expected(case)
    for suffix in SUFFIXES.values():
        run_well("merge", case / "ckpt", "-o", tmp_path / f"merged{suffix}")
        assert read(tmp_path / f"merged{suffix}") == full
    shown = json.loads(run_well("inspect", case / "ckpt", "--json").stdout)
    assert {
        tensor["name"]: (tensor["dtype"], tuple(tensor["shape"])) for tensor in shown["tensors"]
    } == {name: (tensor.dtype, tensor.shape) for name, tensor in full.items()}
    assert len(shown["ranks"]) == 4
    for words in ((), ("--deep",)):
        document = json.loads(run_well("verify", case / "ckpt", *words, "--json").stdout)
        assert (document["clean"], document["tensors"]) == (True, len(full))


@pytest.mark.parametrize("case", REAL)
def test_what_hyper_parallel_wrote_is_compared_bit_by_bit(case, tmp_path):
    merged = tmp_path / "merged.safetensors"
    run_well("merge", case / "ckpt", "-o", merged)
    for a, b in ((case / "ckpt", merged), (merged, case / "ckpt"), [case / "ckpt"] * 2):
        assert json.loads(run_well("diff", a, b, "--json").stdout)["equal"]
    data = bytearray(merged.read_bytes())
    data[-1] ^= 1
    changed = tmp_path / "changed.safetensors"
    changed.write_bytes(data)
    result = run("diff", case / "ckpt", changed, "--json")
    assert result.exit_code == 1
    assert [difference["kind"] for difference in json.loads(result.stdout)["differences"]] == [
        "values"
    ]


@pytest.mark.parametrize("case", REAL)
def test_a_stored_tensor_has_the_name_that_it_has_in_the_checkpoint(case):
    catalog = ckpttool.scan(str(case / "ckpt"))
    for file in catalog.files.values():
        assert all(tensor.meta.name == name for name, tensor in file.tensors.items())
    for name, described in catalog.description.tensors.items():
        boxes = [box for boxes in described.slicing.slices for box in boxes]
        assert {box.tensor.meta.name for box in boxes} == {name}


# ------------------------------------------------------------------------------ whatever is saved


@st.composite
def box_lists(draw, shape):
    """Boxes that fill a tensor: cut in two along any axis, again and again."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        start, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes:
            boxes.append((start, sizes))
            continue
        axis = draw(st.sampled_from(axes))
        n = draw(st.integers(1, sizes[axis] - 1))
        moved = (*start[:axis], start[axis] + n, *start[axis + 1 :])
        boxes.append((start, (*sizes[:axis], n, *sizes[axis + 1 :])))
        boxes.append((moved, (*sizes[:axis], sizes[axis] - n, *sizes[axis + 1 :])))
    return boxes


@st.composite
def saves(draw, entries):
    """A checkpoint of these tensors, boxes on any ranks."""
    owners = st.sets(st.integers(0, 4), min_size=1, max_size=3)
    boxes = {
        name: {box: draw(owners) for box in draw(box_lists(entry.shape))}
        for name, entry in entries.items()
    }
    return HyperSave(
        entries,
        boxes,
        package=draw(st.sampled_from(["checkpoint", "distributed_checkpoint"])),
        remove_redundancy=draw(st.booleans()),
        collectives=draw(st.booleans()),
        protocol=draw(st.integers(2, 5)),
        version=draw(st.sampled_from(["1.0", "2.0", None])),
        objects=draw(st.sampled_from([(), ("scheduler",)])),
        spell_dtype=draw(st.sampled_from([str, lambda name: f"torch.{name.lower()}"])),
    )


@pytest.mark.slow
@examples(80)
@given(moves(), st.data())
def test_whatever_boxes_are_saved_are_merged_and_resharded(new_folder, move, data):
    entries = {
        name: entry
        for name, entry in move.entries.items()
        if entry.dtype in SAFETENSORS_TYPES.values()
    }
    if not entries.keys() & move.dst.layouts.keys():
        return
    folder = new_folder()
    data.draw(saves(entries)).write(folder / "src")
    check_conversions(folder, entries, move.dst)


@examples(60)
@given(box_lists((4, 5, 3)), st.data())
def test_boxes_that_do_not_fill_a_tensor_exactly_are_refused(new_folder, boxes, data):
    entry, folder = noise("t", "Int16", (4, 5, 3)), new_folder()
    ranks = {box: (i % 3,) for i, box in enumerate(boxes)}
    box = data.draw(st.sampled_from(boxes))
    del ranks[box]
    start, sizes = box
    how = data.draw(st.sampled_from(["gone", "moved", "larger"]))
    axis = data.draw(st.integers(0, 2))
    if how == "larger" and start[axis] + sizes[axis] < entry.shape[axis]:
        ranks[start, (*sizes[:axis], sizes[axis] + 1, *sizes[axis + 1 :])] = (0,)
    elif how == "moved" and start[axis] > 0:
        ranks[(*start[:axis], start[axis] - 1, *start[axis + 1 :]), sizes] = (0,)
    HyperSave({"t": entry}, {"t": ranks}).write(folder / "src")
    if not ranks:
        return  # nothing was written
    ways = "t: slices overlap and are not the same|t: .* in no file|begin at the same element"
    with pytest.raises((PlanError, FormatError), match=ways):
        plan_merge(ckpttool.scan(str(folder / "src")), None, str(folder / "m.ckpt"))


# -------------------------------------------------------------------------------------- bad input


def dump(path, **changes):
    """A ``.metadata`` of one tensor, with other values for some attributes."""
    kind = classes("distributed_checkpoint")
    value = {
        "dtype": "Float32",
        "size": (4,),
        "start": (0,),
        "sizes": (4,),
        "at": (0,),
        "file": "_rank0_.safetensors",
        "span": (0, -1),
        "key": None,
        "version": "1.0",
        "fqn": "w",
    } | changes
    chunks = value.get("chunks", [kind.ChunkStorageMetadata(value["start"], value["sizes"])])
    properties = kind.TensorProperties(value["dtype"], False, None)
    tensor = value.get("tensor", kind.TensorStorageMetadata(properties, value["size"], chunks))
    index = kind.MetadataIndex(value["fqn"], value["at"], 0)
    storage = {index: kind.StorageInfo(value["file"], *value["span"], value["key"])}
    metadata = kind.Metadata({"w": tensor}, None, value.get("storage", storage), value["version"])
    path.write_bytes(pickle.dumps(metadata))
    return str(path)


BAD = {
    "another version": (
        {"version": "3.0"},
        "unknown version of .metadata; expected 1.0 or 2.0, found .3.0",
    ),
    "no storage": ({"storage": None}, "storage_data: expected object, got null"),
    "a list for a tensor": ({"tensor": [1]}, "expected a TensorStorageMetadata, found list"),
    "an element type": ({"dtype": "float7"}, "unknown dtype 'float7'"),
    "no element type": ({"dtype": 7}, "properties.dtype: expected str, got int"),
    "a shape that is none": ({"size": (4.0,)}, "size\\[0\\]: expected int, got float"),
    "a negative size": ({"size": (-4,)}, "\\(-4,\\): expected at most 32 sizes, and none below 0"),
    "many axes": ({"size": (1,) * 33}, "expected at most 32 sizes, and none below 0"),
    "another number of axes": ({"sizes": (4, 1)}, "a chunk of 2 axes"),
    "a file elsewhere": ({"file": "../x"}, "relative_path '../x' is not a file name"),
    "bytes of a file": ({"span": (8, 16)}, "part of _rank0_.safetensors, at byte 8; expected all"),
    "a key that is none": ({"key": 5}, "tensor_key: expected str . null, got int"),
    "a box that is not there": ({"at": (2,)}, "a chunk at \\(2,\\), state_dict_metadata has none"),
    "a tensor that is not there": (
        {"fqn": "x"},
        "'x': in storage_data, but not in state_dict_metadata",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_metadata_that_contradicts_itself_is_refused_by_name(what, tmp_path):
    changes, pattern = BAD[what]
    with pytest.raises(FormatError, match=pattern):
        read_metadata(StoredFile(dump(tmp_path / ".metadata", **changes)))


def test_metadata_that_names_a_file_of_no_rank_is_refused(tmp_path):
    (tmp_path / "src").mkdir()
    dump(tmp_path / "src" / ".metadata", file="weights.safetensors")
    write_safetensors(tmp_path / "src" / "weights.safetensors", {"w": noise("w", "Float32", (4,))})
    refused(
        tmp_path / "src", 5, "weights.safetensors: the name, which .metadata lists, has no rank"
    )


def test_chunks_of_one_place_have_to_be_the_same(tmp_path):
    kind = classes("distributed_checkpoint")
    chunks = [kind.ChunkStorageMetadata((0,), (n,)) for n in (4, 3)]
    with pytest.raises(FormatError, match="begin at the same element"):
        read_metadata(StoredFile(dump(tmp_path / ".metadata", chunks=chunks)))


# ------------------------------------------------------------------------------- hostile pickles


class Call:
    """Pickled, it is a call of a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def refusal(tmp_path, code):
    """The error of a folder whose metadata are these bytes."""
    source = tmp_path / "src"
    source.mkdir(exist_ok=True)
    (source / ".metadata").write_bytes(code)
    with pytest.raises(FormatError) as caught:
        ckpttool.scan(str(source))
    return caught.value


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of one tensor on two ranks."""
    save = HyperSave({"w": noise("w", "Float32", (8, 6))}, {"w": {((0, 0), (8, 6)): (0, 1)}})
    return save.write(tmp_path / "checkpoint")


def test_metadata_is_read_in_the_limited_process(folder, monkeypatch):
    read_here = []
    monkeypatch.setattr(hyper_parallel, "_load", read_here.append)
    assert len(ckpttool.scan(str(folder)).description.tensors) == 1
    assert not read_here


HOSTILE = [
    lambda proof: Call(os.system, f"touch {proof}"),
    lambda proof: Call(eval, f"open({str(proof)!r}, 'w')"),
    lambda proof: Call(exec, f"open({str(proof)!r}, 'w')"),
    lambda proof: Call(open, str(proof), "w"),
    lambda proof: Call(getattr, Call(__import__, "os"), "system"),
    lambda proof: {"w": [Call(map, Call(eval, "print"), (Call(open, str(proof), "w"),))]},
    lambda proof: os.system,
    lambda proof: hyper_parallel.Path,
]


@pytest.mark.parametrize(
    "protocol", [2, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (3, 4, 5))]
)
def test_nothing_that_a_pickle_names_is_imported_or_called(protocol, tmp_path):
    path, proof = tmp_path / ".metadata", tmp_path / "proof"
    for make in HOSTILE:
        path.write_bytes(pickle.dumps(make(proof), protocol))
        with pytest.raises(UnsupportedError, match=r"it names .*; nothing was loaded"):
            read_metadata(StoredFile(str(path)))
        assert type(refusal(tmp_path, path.read_bytes())) is UnsupportedError
    assert not proof.exists()


def named(module, name):
    """Instructions that put a class on the stack."""
    return (
        b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93"
    )


METADATA = named("hyper_parallel.core.checkpoint.metadata", "Metadata")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            named("hyper_parallel.core.checkpoint.metadata", "Metadata.__init__"),
            "nothing was loaded",
        ),
        (named("hyper_parallel.core.checkpoint.storage", "os"), "nothing was loaded"),
        (named("ckpttool.discovery.hyper_parallel", "CLASSES"), "nothing was loaded"),
        (b"cos\nsystem\n", "names os.system"),
        (named("torch.distributed.checkpoint.metadata", "Metadata"), "dcp_to_torch_save, then"),
        (b"(S'true'\nios\nsystem\n", "names os.system"),  # INST
        (b"(cos\nsystem\nS'true'\no", "names os.system"),  # OBJ
        (b"\x82\x01", "UnpicklingError|ValueError"),  # EXT1
        (b"K\x01Q", "UnpicklingError"),  # BINPERSID
        (METADATA + b"K\x01\x85R", "TypeError"),  # REDUCE
        (METADATA + b"K\x01\x85\x81", "TypeError"),  # NEWOBJ
        # BUILD of the class itself
        (METADATA + b"N}\x8c\x08__init__" + METADATA + b"s\x86b", "changes the class Metadata"),
        (named("torch", "Size") + b"N}\x8c\x01xNs\x86b", "TypeError|AttributeError"),
        # attributes that Python calls, with what else there is to be called
        (METADATA + b")\x81}\x8c\x0c__setstate__" + METADATA + b"sb}b", "TypeError"),
        (
            METADATA + b")\x81}\x8c\x08__repr__" + METADATA + b"sb",
            "missing required field state_dict",
        ),
    ],
)
def test_instructions_find_nothing_to_call(code, words, tmp_path):
    (tmp_path / "p").write_bytes(b"\x80\x04" + code + b".")
    with pytest.raises(FormatError, match=words):
        read_metadata(StoredFile(str(tmp_path / "p")))
    assert not {"__init__", "__setstate__"} & set(vars(hyper_parallel._Object))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_keep_their_attributes_and_a_shape_is_a_tuple(protocol, tmp_path):
    path = tmp_path / "p"
    kind = classes("checkpoint")
    path.write_bytes(pickle.dumps(kind.ChunkStorageMetadata((1, 2), (3, 4)), protocol))
    value = hyper_parallel._load(StoredFile(str(path)))
    assert (type(value).__name__, vars(value)) == (
        "ChunkStorageMetadata",
        {"offsets": (1, 2), "sizes": (3, 4)},
    )
    path.write_bytes(b"\x80\x02ctorch\nSize\n(K\x02K\x03t\x85R.")
    assert hyper_parallel._load(StoredFile(str(path))) == (2, 3)


def test_a_pickle_that_shares_and_nests_without_end_is_refused(tmp_path):
    doubled = b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(200))
    key = b"\x80\x04)\x94" + doubled + b"}h\xc8Ns."  # hashing it takes 2**200 steps
    deep = b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns."  # hashing it recurses
    (tmp_path / "p").write_bytes(key)
    with Sandbox() as reader:
        with pytest.raises(FormatError, match="the unpickler does not finish reading it"):
            reader.run(read_metadata, StoredFile(str(tmp_path / "p")), "the unpickler", 0.5)
        (tmp_path / "p").write_bytes(deep)
        with pytest.raises(FormatError, match=r"the unpickler crashed while|RecursionError"):
            reader.run(read_metadata, StoredFile(str(tmp_path / "p")), "the unpickler")
    selfish = b"\x80\x04}\x94(h\x00h\x00K\x01h\x00u."
    for code in (selfish, b"\x80\x04]\x94h\x00a.", b"\x80\x04)\x94" + doubled + b"."):
        refusal(tmp_path, code)


def read_with_little_memory(file):
    resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))
    return read_metadata(file)


def test_memory_without_bounds_is_not_given_to_a_pickle(tmp_path):
    memo = b"\x80\x04K\x01r\xff\xff\xff\xff."  # a memo of 2**32 places
    pickled = b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x."
    size = named("torch", "Size")
    for code in (memo, pickled):
        assert refusal(tmp_path, code).reason == "not a readable pickle", code[:20]
    grown = b"\x80\x04X" + (10**6).to_bytes(4, "little") + b"x" * 10**6 + b"\x94" + size + b"\x94("
    grown += b"h\x01h\x00\x85R" * 1000 + b"l."  # eight megabytes for seven bytes, a thousand times
    (tmp_path / "p").write_bytes(grown)
    with (
        Sandbox() as reader,
        pytest.raises(FormatError, match="not a readable pickle; MemoryError"),
    ):
        reader.run(read_with_little_memory, StoredFile(str(tmp_path / "p")), "")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "p").open("wb") as file:
        file.write(b"\x80\x04")
        file.truncate(hyper_parallel.MAX_BYTES + 1)
    with pytest.raises(UnsupportedError, match="expected at most 200000000"):
        read_metadata(StoredFile(str(tmp_path / "p")))


def test_unpickling_never_ends_and_the_command_says_so(folder, monkeypatch):
    monkeypatch.setattr(hyper_parallel, "CPU_SECONDS", 0.3)
    monkeypatch.setattr(hyper_parallel, "read_metadata", spin)
    refused(folder, 3, "the unpickler does not finish reading it")


@examples(300)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_damaged_metadata_is_refused_or_read_and_nothing_else(new_folder, seed, changes):
    rng, path = random.Random(seed), new_folder() / ".metadata"
    dump(path)
    code = bytearray(path.read_bytes())
    for _ in range(changes):
        at = rng.randrange(len(code))
        how = rng.randrange(4)
        if how == 0:
            code[at] = rng.randrange(256)
        elif how == 1:
            code[at : at + rng.randrange(1, 20)] = b""
        elif how == 2:
            code[at:at] = code[: rng.randrange(1, 60)]
        else:
            code[at:at] = rng.choice(b"()}]ubRat\x81\x85\x86\x87\x93\x94hjNK.").to_bytes(1, "big")
        code = code or bytearray(b".")
    path.write_bytes(bytes(code))
    try:
        tensors, objects = read_metadata(StoredFile(str(path)))
    except (FormatError, CombinedError):
        return
    assert set(tensors) | set(objects)


@examples(300)
@given(st.lists(st.sampled_from([op.code for op in pickletools.opcodes]), max_size=30), st.data())
def test_any_instructions_end_in_a_value_or_an_error_of_ours(new_folder, codes, data):
    path = new_folder() / "p"
    code = b"\x80\x04"
    for instruction in codes:
        code += instruction.encode("latin-1") + data.draw(st.binary(max_size=4))
    path.write_bytes(code + b".")
    with contextlib.suppress(FormatError, CombinedError):
        read_metadata(StoredFile(str(path)))
