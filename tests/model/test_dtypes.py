"""The table of element types."""

import numpy as np
import pytest

from ckpttool.formats import safetensors
from ckpttool.model.dtypes import (
    ALIASES,
    DTYPES,
    NOT_LOADED_FROM_SAFETENSORS,
    SAFETENSORS_DTYPES,
    TEXT,
    find_dtype,
    find_word,
)
from tests.support.readers import NUMPY_TYPES, SAFETENSORS_TYPES


def test_every_type_of_the_tests_own_readers_is_in_the_table_with_its_width():
    widths = {name: np.dtype(kind).itemsize for name, kind in NUMPY_TYPES.items() if name != TEXT}
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == widths


def test_every_word_of_safetensors_is_in_the_table_once():
    words = {dtype.safetensors: name for name, dtype in DTYPES.items() if name != "Int4"}
    words.pop(None)
    assert words == SAFETENSORS_TYPES
    assert sorted(safetensors._ORDER) == sorted({*SAFETENSORS_TYPES, *SAFETENSORS_DTYPES})
    assert all(find_word(word) is None for word in SAFETENSORS_DTYPES)


def test_a_type_is_found_by_its_name_and_by_its_old_name():
    assert find_dtype("Uint8") is find_dtype("UInt8") is DTYPES["UInt8"]
    assert all(find_dtype(name) is dtype for name, dtype in DTYPES.items())
    assert set(ALIASES.values()) <= set(DTYPES)


@pytest.mark.parametrize("name", ["", "float32", "FLOAT32", "Float7", TEXT])
def test_another_name_finds_nothing(name):
    assert find_dtype(name) is None


def test_types_that_hdf5_has_no_words_for_are_told_apart_by_name():
    names = [dtype.hdf5 for dtype in DTYPES.values() if dtype.hdf5 != "bytes"]
    assert len(names) == len(set(names))
    assert all(dtype.itemsize == 1 for dtype in DTYPES.values() if dtype.hdf5 == "bytes")
    assert set(DTYPES) >= NOT_LOADED_FROM_SAFETENSORS
