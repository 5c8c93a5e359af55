"""One table of element types: MindSpore's name, bytes per element, and each format's word for it.

The name of a type is the one that MindSpore writes into ``tensor_type`` of a ``.ckpt``, and that
``inspect`` prints.  Formats, casts and comparisons take all that they know of a type from here, so
that a new type is one line.  Its numbers are left to `ckpttool.storage.numbers`.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``tensor_to_ms_type``, ``_save_graph``); the
safetensors README, section "Format", and ``tensor.rs`` of its 0.8 (``Dtype``); the HDF5 reference
manual, "Predefined Datatypes".
"""

from __future__ import annotations

from msgspec import Struct


class DType(Struct, frozen=True):
    """One element type.

    Attributes
    ----------
    itemsize
        Bytes per element.  1 where several elements share a byte: a shape then counts bytes.
    hdf5
        Its HDF5 type as `ckpttool.formats.hdf5` names it.  ``"bytes"`` is an unsigned byte with
        an attribute that names the type, for types that HDF5 lacks.
    packed_bits
        Bits per element where several elements share a byte; None for other types.
    """

    name: str  # MindSpore's name; safetensors' word if MindSpore lacks the type
    itemsize: int
    safetensors: str | None  # its word in a safetensors header, or None if that format has none
    hdf5: str
    packed_bits: int | None = None


TEXT = "str"  # a string of append_dict: a value in a header, never a tensor (see TensorMeta.text)

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("Bool", 1, "BOOL", "bool"),
        DType("Int8", 1, "I8", "int8"),
        DType("Int16", 2, "I16", "int16"),
        DType("Int32", 4, "I32", "int32"),
        DType("Int64", 8, "I64", "int64"),
        DType("UInt8", 1, "U8", "uint8"),
        DType("UInt16", 2, "U16", "uint16"),
        DType("UInt32", 4, "U32", "uint32"),
        DType("UInt64", 8, "U64", "uint64"),
        DType("Float16", 2, "F16", "float16"),
        DType("Float32", 4, "F32", "float32"),
        DType("Float64", 8, "F64", "float64"),
        DType("BFloat16", 2, "BF16", "bfloat16"),
        DType("Float8E4M3FN", 1, "F8_E4M3", "float8_e4m3"),
        DType("Float8E5M2", 1, "F8_E5M2", "float8_e5m2"),
        DType("Complex64", 8, "C64", "complex64"),
        DType("Complex128", 16, None, "complex128"),
        DType("HiFloat8", 1, None, "bytes"),
        # Two numbers in a byte, but dims count bytes.  Safetensors lacks the type: MindSpore
        # writes I8 and a metadata entry that says Int4.
        DType("Int4", 1, "I8", "bytes"),
        # The raw random state that MindSpore 2.0 could save.
        DType("random_op", 1, None, "bytes"),
    )
}

# Types of safetensors 0.8 that MindSpore lacks.  Their values are not read; their bytes are copied
# from safetensors to safetensors.
SAFETENSORS_DTYPES: dict[str, DType] = {
    word: DType(word, 1, word, "bytes", bits)
    for word, bits in (
        ("F4", 4),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("F8_E8M0", None),
        ("F8_E4M3FNUZ", None),
        ("F8_E5M2FNUZ", None),
    )
}

ALL_DTYPES = DTYPES | SAFETENSORS_DTYPES

FLOAT8 = frozenset({"Float8E4M3FN", "Float8E5M2"})  # whose weights have scales
FLOATS = frozenset(name for name in DTYPES if "Float" in name)  # real floating-point numbers

INEXACT = FLOATS | {"Complex64", "Complex128"} | SAFETENSORS_DTYPES.keys()  # that are rounded

CAST_WORDS = {"fp32": "Float32", "fp16": "Float16", "bf16": "BFloat16"}  # of --dtype
WORDS_OF_CASTS = {dtype: word for word, dtype in CAST_WORDS.items()}
CASTABLE = frozenset({"Float64", *CAST_WORDS.values()})  # what is cast, and to what

# MindSpore 1.0 spelled one type in two ways: it wrote UInt8 and could only read Uint8.
ALIASES = {"Uint8": "UInt8"}

# Types that .safetensors can hold, and that MindSpore 2.10's own reader refuses (KeyError).
NOT_LOADED_FROM_SAFETENSORS = frozenset({"Float8E4M3FN", "Float8E5M2", "Complex64"})


def find_dtype(name: str) -> DType | None:
    """Return the type of a name or alias, or None.

    >>> find_dtype("BFloat16").itemsize, find_dtype("Float7")
    (2, None)
    """
    return DTYPES.get(ALIASES.get(name, name))


def find_word(word: str) -> DType | None:
    """Return the type for a framework's spelling, such as ``torch.float8_e4m3fn``; ignore case.

    >>> find_word("bfloat16").name, find_word("torch.float8_e4m3fn").name
    ('BFloat16', 'Float8E4M3FN')
    """
    return _WORDS.get(word.lower().rpartition(".")[2].replace("_", ""))


_WORDS = {name.lower().replace("_", ""): dtype for name, dtype in DTYPES.items()}
