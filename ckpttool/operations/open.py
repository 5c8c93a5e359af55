"""A sharded checkpoint opened like one file: a tensor is read where it is indexed.

What is read is planned as a conversion is, see `ckpttool.operations.plans.plan_reading`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import EllipsisType, TracebackType
from typing import Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpttool.model.layout import Layout
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.problems import join_clauses
from ckpttool.storage.numbers import decode
from ckpttool.storage.region_io import FlatFiles, read_band
from ckpttool.wording import count, format_bytes, format_shape, shorten

DTypes = Literal["float32", "ml_dtypes"]
Index: TypeAlias = int | slice | EllipsisType | None
Array: TypeAlias = npt.NDArray[np.generic]

SCRATCH_BYTES = 64 << 10  # runs that lie closer than a page are read at once, at most so many bytes
PAGE_BYTES = 4096
BAND_BYTES = 4 << 20  # of elements that are read at a time to keep some of them
CHUNK_BYTES = 64 << 20  # of a chunk for Dask, at most

_ML_DTYPES = {
    "BFloat16": "bfloat16",
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
}


class OpenCheckpoint(Mapping[str, "LazyTensor"]):
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
    ) -> None:
        self.path = path
        self.overflows = overflows
        self.closed = False
        self._attrs = attrs
        self._tensors = {tensor.meta.name: LazyTensor(self, tensor, dtypes) for tensor in tensors}

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
        """Return the texts that the headers of all files have in common."""
        return dict(self._attrs)

    def get_slice(self, name: str) -> LazyTensor:
        """Return a tensor, not yet read, as ``safetensors.safe_open`` does."""
        return self[name]

    def get_tensor(self, name: str) -> Array:
        """Return a tensor, read as a whole."""
        return self[name][...]

    def __repr__(self) -> str:
        nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        state = ", closed" if self.closed else ""
        tensors = count(len(self), "tensor")
        return f"<ckpttool checkpoint {self.path}: {tensors}, {format_bytes(nbytes)}{state}>"


class LazyTensor:
    """A tensor of an open checkpoint, or a rank's slice of one; indexing it reads.

    Attributes
    ----------
    name
        Its name.
    shape
        Its shape.
    dtype
        The type of the arrays that are read; bytes (``V1``) where NumPy has no type, as for Int4.
    stored_dtype
        MindSpore's name of the stored type, such as ``"BFloat16"``.
    """

    def __init__(self, checkpoint: OpenCheckpoint, tensor: OutputTensor, dtypes: DTypes) -> None:
        self._checkpoint = checkpoint
        self._tensor = tensor
        self.name = tensor.meta.name
        self.shape = tensor.meta.shape
        self.stored_dtype = tensor.meta.dtype
        self._decode = _decoder(tensor.meta.dtype, dtypes)
        empty = np.zeros((0,), np.uint8)
        self.dtype = np.dtype(str) if tensor.meta.text is not None else self._decode(empty).dtype

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
        ranges, then = _parse_index(index, self.shape)
        return self._read(ranges)[then]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[np.generic]:
        if copy is False:
            raise ValueError("its elements are in files, so they have to be copied")
        return np.asarray(self[...], dtype)

    def _read(self, ranges: Sequence[range]) -> Array:
        """Return the elements at the positions of ``ranges``, which ascend, one for each axis."""
        itemsize = self._tensor.meta.itemsize
        out = np.empty((*map(len, ranges), itemsize), np.uint8)
        # A wide step leaves out more than a page, so each position is read by itself.
        inner = itemsize
        single = []
        for axis in reversed(range(len(ranges))):
            single.append(ranges[axis].step > 1 and ranges[axis].step * inner >= PAGE_BYTES)
            inner *= self.shape[axis]
        # The gaps of a narrow step are read, so such bands have a limit.
        spans = [positions[-1] + 1 - positions[0] if positions else 0 for positions in ranges]
        nbytes = (
            math.prod(spans) * itemsize if any(positions.step > 1 for positions in ranges) else 0
        )
        parts = []
        for positions, alone in zip(ranges, reversed(single), strict=True):
            number = len(positions) or 1
            if alone:
                number = 1
            elif nbytes > BAND_BYTES:
                number = max(1, number * BAND_BYTES // nbytes)
            nbytes = nbytes * number // max(number, len(positions))
            cuts = range(0, len(positions), number)
            parts.append([(slice(i, i + number), positions[i : i + number]) for i in cuts])
        with FlatFiles(SCRATCH_BYTES) as files:
            for part in product(*parts) if out.size else ():
                where = tuple(at for at, _ in part)
                start = tuple(positions[0] for _, positions in part)
                stop = tuple(positions[-1] + 1 for _, positions in part)
                steps = tuple(slice(None, None, positions.step) for _, positions in part)
                band = Region(start, stop)
                if all(positions.step == 1 for _, positions in part):
                    read_band(files, self._tensor, band, out[where])
                    continue
                read = np.empty((*band.shape, itemsize), np.uint8)
                read_band(files, self._tensor, band, read)
                out[where] = read[steps]
            if files.caster is not None and not self._checkpoint.overflows:
                stats = files.caster.take_stats()
                if stats.infinities:
                    message = f"{self.name}: {stats} in {self.stored_dtype}"
                    raise OverflowError(f"{message}; on_overflow='inf' reads it so")
        return self._decode(out.reshape(-1)).reshape(out.shape[:-1])

    def __repr__(self) -> str:
        return f"<ckpttool tensor {self.name}: {self.stored_dtype} {format_shape(self.shape)}>"


def _parse_index(
    index: Index | tuple[Index, ...], shape: tuple[int, ...]
) -> tuple[list[range], tuple[Index, ...]]:
    """Return the positions to read on each axis, ascending, and the index that is applied then.

    Raises
    ------
    IndexError
        As NumPy's basic indexing does.
    """
    given = index if isinstance(index, tuple) else (index,)
    axes = sum(part is not None and part is not Ellipsis for part in given)
    if axes > len(shape) or sum(part is Ellipsis for part in given) > 1:
        raise IndexError(f"{axes} indices for {len(shape)} axes, or more than one ellipsis")
    rest = len(shape) - axes if not any(part is Ellipsis for part in given) else 0
    given = (*given, *[slice(None)] * rest)
    ranges: list[range] = []
    then: list[Index] = []
    for part in given:
        if part is None:
            then.append(None)
        elif part is Ellipsis:
            ranges += map(range, shape[len(ranges) : len(ranges) + len(shape) - axes])
            then.append(Ellipsis)  # makes an array of what has no axes, as NumPy does
        elif isinstance(part, slice):
            positions = range(*part.indices(shape[len(ranges)]))
            is_reversed = positions.step < 0
            ranges.append(positions[::-1] if is_reversed else positions)
            then.append(slice(None, None, -1) if is_reversed else slice(None))
        else:
            size, at = shape[len(ranges)], _position(part)
            if not -size <= at < size:
                raise IndexError(f"index {at} is out of bounds for axis {len(ranges)} of {size}")
            ranges.append(range(at % size, at % size + 1))
            then.append(0)
    return ranges, tuple(then)


def _position(index: object) -> int:
    is_mask = isinstance(index, bool | np.bool_)
    try:
        if not is_mask and isinstance(index, SupportsIndex):
            return operator.index(index)
    except TypeError:  # an array of several numbers
        pass
    kind = type(index).__name__
    raise IndexError(f"an index is an integer, a slice, an ellipsis or None, and no {kind}")


def _decoder(dtype: str, dtypes: DTypes) -> Callable[[npt.NDArray[np.uint8]], Array]:
    if dtypes == "ml_dtypes" and dtype in _ML_DTYPES:
        import ml_dtypes

        return partial(_view, as_type=getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return partial(_view, as_type=np.bool_) if dtype == "Bool" else partial(_decode, dtype=dtype)


def _view(data: npt.NDArray[np.uint8], as_type: type[np.generic]) -> Array:
    return data.view(as_type)


def _decode(data: npt.NDArray[np.uint8], dtype: str) -> Array:
    numbers = decode(data, dtype)
    if numbers is None:  # Int4, with two numbers in a byte, and others that are no numbers
        return data.view("V1")
    is_float = dtype == "BFloat16" or "Float8" in dtype or dtype == "HiFloat8"
    with np.errstate(invalid="ignore"):  # signalling NaN
        return numbers.astype(np.float32) if is_float else numbers
