"""A sharded checkpoint opened like one file: a tensor is read where it is indexed.

Reads are planned like a conversion, by `ckpttool.operations.plans.plan_reading`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from types import EllipsisType, TracebackType
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpttool.model.layout import Layout
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.problems import join_clauses
from ckpttool.storage.numbers import decode
from ckpttool.storage.region_io import FlatFiles, read_band
from ckpttool.wording import Brief, count, fold_names, format_bytes, format_shape, shorten

DTypes = Literal["float32", "ml_dtypes"]
Framework = Literal["np", "pt"]
Array: TypeAlias = npt.NDArray[np.generic]
# A list, in any order and with repetitions, or a mask: of one axis, as h5py takes them.
Index: TypeAlias = int | slice | EllipsisType | Sequence[int] | Array | None
Positions: TypeAlias = range | npt.NDArray[np.intp]  # ascending

SCRATCH_BYTES = 64 << 10  # runs that lie closer than a page are read at once, at most so many bytes
PAGE_BYTES = 4096
BAND_BYTES = 4 << 20  # of elements that are read at a time to keep some of them
CHUNK_BYTES = 64 << 20  # of a chunk for Dask, at most

_EXTENDED_DTYPES = {  # as ml_dtypes and PyTorch call them
    "BFloat16": "bfloat16",
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
}


class OpenCheckpoint(Brief, Mapping[str, "LazyTensor"]):
    """An open checkpoint: the names of its tensors, and each tensor, read where it is indexed.

    Threads may read from it together.  Use as a context manager; after it, nothing can be read.
    """

    def __init__(
        self,
        path: str,
        tensors: Sequence[OutputTensor],
        attrs: Mapping[str, str],
        dtypes: DTypes = "float32",
        overflows: bool = False,
        framework: Framework = "np",
    ) -> None:
        self.path = path
        self.overflows = overflows
        self.closed = False
        self._attrs = attrs
        self._tensors = {
            tensor.meta.name: LazyTensor(self, tensor, dtypes, framework) for tensor in tensors
        }

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reading; no file stays open between two reads."""
        self.closed = True

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> LazyTensor:
        if name in self._tensors:
            return self._tensors[name]
        if not isinstance(name, str):
            raise KeyError(name)
        there = f"{count(len(self), 'tensor')}: {shorten(self, 3)}"
        raise KeyError(join_clauses(f"no tensor {name!r} in {self.path}", there))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def metadata(self) -> dict[str, str]:
        """Return the texts that the headers of all files have in common; step, ranks, strategy.

        ``"ranks"`` are those that have files, as ``"0-7"``, and ``"strategy"`` its files.  A text
        of the headers with one of these names stands in its place.
        """
        return dict(self._attrs)

    def get_slice(self, name: str) -> LazyTensor:
        """Return a tensor, not yet read, as ``safetensors.safe_open`` does."""
        return self[name]

    def get_tensor(self, name: str) -> Array:
        """Return a tensor, read as a whole."""
        return self[name][...]

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {count(len(self), 'tensor')}"
        yield format_bytes(sum(tensor.nbytes for tensor in self._tensors.values()))
        yield "closed" if self.closed else ""

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "dtype", "shape")
        kinds = {name: (it.stored_dtype, it.shape) for name, it in self._tensors.items()}
        yield from (
            (name, dtype, format_shape(shape)) for name, (dtype, shape) in fold_names(kinds)
        )


class LazyTensor:
    """A tensor of an open checkpoint, or a rank's slice of one; indexing it reads.

    Attributes
    ----------
    name
        Its name.
    shape
        Its shape.
    dtype
        The type of the arrays that are read; bytes (``V1``) where NumPy lacks the type, as for
        Int4.  With ``framework="pt"`` that of the tensors of PyTorch; bytes are uint8.
    stored_dtype
        MindSpore's name of the stored type, such as ``"BFloat16"``.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        tensor: OutputTensor,
        dtypes: DTypes,
        framework: Framework = "np",
    ) -> None:
        self._checkpoint = checkpoint
        self._tensor = tensor
        self.name = tensor.meta.name
        self.shape = tensor.meta.shape
        self.stored_dtype = tensor.meta.dtype
        is_text = tensor.meta.text is not None
        self._is_torch = framework == "pt" and not is_text
        self._decode = _decoder(tensor.meta.dtype, "torch" if self._is_torch else dtypes)
        empty = np.zeros((0,), np.uint8)
        self.dtype = np.dtype(str) if is_text else self._returned(self._decode(empty)).dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The stored bytes."""
        return self._tensor.meta.nbytes

    @property
    def layout(self) -> Layout | None:
        """How the source is sharded; None if it describes its boxes."""
        slicing = self._tensor.terms[0].source.slicing
        return slicing.layout if isinstance(slicing, LayoutSlicing) else None

    def get_shape(self) -> list[int]:
        """Return the shape, as what ``get_slice`` of ``safetensors.safe_open`` returns does."""
        return list(self.shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of a part that is read well at once, for ``dask.array.from_array``."""
        chunk = list(self.shape)
        for axis, size in enumerate(self.shape):
            rest = math.prod(chunk[axis + 1 :]) * self.dtype.itemsize
            chunk[axis] = max(1, min(size, CHUNK_BYTES // max(rest, 1)))
            if chunk[axis] > 1:
                break
        return tuple(chunk)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len() of {self.name}, which has no axes")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Array:
        if self._checkpoint.closed:
            raise ValueError(f"{self._checkpoint.path} is closed")
        if (words := self._tensor.meta.text) is not None:
            return np.array(words)[index]
        positions, then, (axis, order) = _parse_index(index, self.shape)
        array = self._read(positions)[then]
        returned: Array = self._returned(array if order is None else array.take(order, axis))
        return returned

    def _returned(self, array: Any) -> Any:
        """Return an array as the framework has it."""
        if not self._is_torch:
            return array
        import torch

        if array.dtype.kind == "V":
            array = array.view(np.uint8)
        tensor = torch.from_numpy(np.asarray(array, order="C"))
        name = _EXTENDED_DTYPES.get(self.stored_dtype)
        return tensor if name is None else tensor.view(getattr(torch, name))

    def __dlpack__(self, **options: Any) -> object:
        """Return all elements for ``torch.as_tensor``, which else reads one by one."""
        every: Any = self[...]
        return every.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # memory of the processor

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[np.generic]:
        if copy is False:
            raise ValueError("its elements are in files, so they have to be copied")
        return np.asarray(self[...], dtype)

    def _read(self, of_axes: Sequence[Positions]) -> Array:
        """Return the elements at the positions on each axis, which ascend."""
        itemsize = self._tensor.meta.itemsize
        out = np.empty((*map(len, of_axes), itemsize), np.uint8)
        # The gaps of a narrow step are read, so such bands have a limit.
        spans = [int(at[-1]) + 1 - int(at[0]) if len(at) else 0 for at in of_axes]
        nbytes = 0 if all(map(_is_dense, of_axes)) else math.prod(spans) * itemsize
        parts = []
        for axis, positions in enumerate(of_axes):
            inner = math.prod(self.shape[axis + 1 :]) * itemsize
            step = positions.step if isinstance(positions, range) else 1
            number = len(positions) or 1
            # A wide step leaves out more than a page, so each position is read by itself.
            if step > 1 and step * inner >= PAGE_BYTES:
                number = 1
            elif nbytes > BAND_BYTES:
                number = max(1, number * BAND_BYTES // nbytes)
            nbytes = nbytes * number // max(number, len(positions))
            parts.append([*_cut(positions, number, inner)])
        with FlatFiles(SCRATCH_BYTES) as files:
            for part in product(*parts) if out.size else ():
                where = tuple(at for at, _ in part)
                start = tuple(int(positions[0]) for _, positions in part)
                band = Region(start, tuple(int(positions[-1]) + 1 for _, positions in part))
                if all(_is_dense(positions) for _, positions in part):
                    read_band(files, self._tensor, band, out[where])
                    continue
                read = np.empty((*band.shape, itemsize), np.uint8)
                read_band(files, self._tensor, band, read)
                out[where] = read[tuple(_within(positions) for _, positions in part)]
            if files.caster is not None and not self._checkpoint.overflows:
                stats = files.caster.take_stats()
                if stats.infinities:
                    message = f"{self.name}: {stats} in {self.stored_dtype}"
                    raise OverflowError(f"{message}; on_overflow='inf' reads it so")
        return self._decode(out.reshape(-1)).reshape(out.shape[:-1])

    def __repr__(self) -> str:
        return f"<ckpttool tensor {self.name}: {self.stored_dtype} {format_shape(self.shape)}>"


def _is_dense(positions: Positions) -> bool:
    return isinstance(positions, range) and positions.step == 1


def _within(positions: Positions) -> Any:
    """Return the index of positions in a band that begins with the first."""
    if isinstance(positions, range):
        return slice(None, None, positions.step)
    return positions - positions[0]


def _cut(positions: Positions, number: int, inner: int) -> Iterator[tuple[slice, Positions]]:
    """Yield the parts of positions that are read at once, and where they go.

    A part has at most ``number``; in a list also no gap of a page, with ``inner`` bytes a position.
    """
    starts = {*range(0, len(positions), number)}
    if not isinstance(positions, range):
        gaps = (np.diff(positions) - 1) * inner
        starts.update((np.flatnonzero(gaps >= PAGE_BYTES) + 1).tolist())
    for start, stop in pairwise([*sorted(starts), len(positions)]):
        part = positions[start:stop]
        first, last = int(part[0]), int(part[-1])
        is_run = last - first == len(part) - 1
        yield slice(start, stop), range(first, last + 1) if is_run else part


Parsed: TypeAlias = tuple[
    list[Positions], tuple[Index, ...], tuple[int, npt.NDArray[np.intp] | None]
]


def _parse_index(index: Index | tuple[Index, ...], shape: tuple[int, ...]) -> Parsed:
    """Return the positions to read on each axis, and what is applied then.

    That is a basic index, and the order along one axis: that of a list which does not ascend.

    Raises
    ------
    IndexError
        As NumPy's basic indexing does; or there are two lists.
    """
    given = index if isinstance(index, tuple) else (index,)
    axes = sum(part is not None and part is not Ellipsis for part in given)
    if axes > len(shape) or sum(part is Ellipsis for part in given) > 1:
        raise IndexError(f"{axes} indices for {len(shape)} axes, or more than one ellipsis")
    rest = len(shape) - axes if not any(part is Ellipsis for part in given) else 0
    given = (*given, *[slice(None)] * rest)
    positions: list[Positions] = []
    then: list[Index] = []
    order: tuple[int, npt.NDArray[np.intp] | None] = (0, None)
    lists = integers = 0
    for part in given:
        axis = len(positions)
        if part is None:
            then.append(None)
        elif part is Ellipsis:
            positions += map(range, shape[axis : axis + len(shape) - axes])
            then.append(Ellipsis)  # makes an array of a result without axes, as NumPy does
        elif isinstance(part, slice):
            at = range(*part.indices(shape[axis]))
            is_reversed = at.step < 0
            positions.append(at[::-1] if is_reversed else at)
            then.append(slice(None, None, -1) if is_reversed else slice(None))
        elif isinstance(part, list) or (isinstance(part, np.ndarray) and part.ndim):
            listed = _listed(part, shape[axis], axis)
            ascending, places = np.unique(listed, return_inverse=True)
            if not np.array_equal(ascending, listed):
                order = axis + sum(it is None for it in then) - integers, places
            positions.append(ascending)
            then.append(slice(None))
            lists += 1
        else:
            size, number = shape[axis], _position(part)
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of bounds for axis {axis} of {size}")
            positions.append(range(number % size, number % size + 1))
            then.append(0)
            integers += 1
    if lists > 1:
        raise IndexError("lists or masks of two axes, expected those of one")
    return positions, tuple(then), order


def _listed(part: object, size: int, axis: int) -> npt.NDArray[np.intp]:
    """Return the positions of a list or of a mask."""
    array = np.asarray(part)
    if array.ndim == 1 and array.dtype.kind == "b" and len(array) == size:
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise IndexError(f"a list of whole numbers or a mask of {size} for axis {axis} is expected")
    array = array.astype(np.intp)
    if array.size and not (-size <= array.min() and array.max() < size):
        raise IndexError(f"an index of the list is out of bounds for axis {axis} of {size}")
    return array % max(size, 1)


def _position(index: object) -> int:
    is_mask = isinstance(index, bool | np.bool_)
    if not is_mask and isinstance(index, SupportsIndex):
        return operator.index(index)
    kind = type(index).__name__
    expected = "an integer, a slice, a list, a mask, an ellipsis or None"
    raise IndexError(f"an index is {expected}, and no {kind}")


def _decoder(
    dtype: str, dtypes: DTypes | Literal["torch"]
) -> Callable[[npt.NDArray[np.uint8]], Array]:
    if dtypes == "torch" and dtype in _EXTENDED_DTYPES:  # integers, which PyTorch reads otherwise
        return partial(_view, as_type=np.int16 if dtype == "BFloat16" else np.int8)
    if dtypes == "ml_dtypes" and dtype in _EXTENDED_DTYPES:
        import ml_dtypes

        return partial(_view, as_type=getattr(ml_dtypes, _EXTENDED_DTYPES[dtype]))
    return partial(_view, as_type=np.bool_) if dtype == "Bool" else partial(_decode, dtype=dtype)


def _view(data: npt.NDArray[np.uint8], as_type: type[np.generic]) -> Array:
    return data.view(as_type)


def _decode(data: npt.NDArray[np.uint8], dtype: str) -> Array:
    numbers = decode(data, dtype)
    if numbers is None:  # Int4, with two numbers in a byte, and types without numbers
        return data.view("V1")
    is_float = dtype == "BFloat16" or "Float8" in dtype or dtype == "HiFloat8"
    with np.errstate(invalid="ignore"):  # signalling NaN
        return numbers.astype(np.float32) if is_float else numbers
