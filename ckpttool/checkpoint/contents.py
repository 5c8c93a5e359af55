"""The contents of tensors without a layout: which ranks hold the same.

Running statistics of normalisation layers differ by design.  A BatchNorm layer in training mode
updates a mean and a variance for each channel.  It computes them from the samples of its device.
Gradients are averaged over the devices, but statistics are not.  So statistics differ between ranks
whose other parameters are equal.

Source
------
MindSpore 2.10 ``nn/layer/normalization.py`` (``_BatchNorm``, ``_InstanceNorm``; ``SyncBatchNorm``
averages them over the devices), ``mint/nn/layer/normalization.py`` (``_NormBase``).
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpttool.checkpoint.evidence import Asking, UnreadEvidenceError, ask
from ckpttool.discovery.sharded_files import scan_indexed
from ckpttool.formats.encryption import read_plain
from ckpttool.formats.local import is_file, open_source, read_file
from ckpttool.formats.strict_json import parse_json
from ckpttool.formats.weight_index import MAP_NAME
from ckpttool.model.belonging import LEAST_COUNT, Belongings, may_count
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.names import map_of_component, parse_name
from ckpttool.model.slicing import RankGroups
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.problems import CkptToolError, FormatError
from ckpttool.transaction.sealed_files import ManifestFile

if TYPE_CHECKING:
    from ckpttool.storage.sampling import Sample

_MAX_CONFIG_BYTES = 1 << 20  # those of models have some KiB


class EqualContents(Struct, frozen=True):
    """The ranks with equal contents of tensors that names and shapes do not decide."""

    groups: Mapping[str, RankGroups] = {}
    # Constant tensors, without optimizer states; slices of them would look like full tensors.
    constant: tuple[str, ...] = ()
    running_statistics: frozenset[str] = frozenset()  # these differ by design


def compare_contents(
    catalog: Catalog, strategy: Strategy, names: Mapping[str, str | None]
) -> Asking[EqualContents]:
    """Group the ranks by equal contents of some tensors, as a conversion needs to know it.

    ``names`` has the parameters of optimizer states.  A state with equal elements on all ranks is
    left out: its shape decides.
    """
    from ckpttool.storage.sampling import digest

    metas, groups = catalog.metas, (yield from _group(catalog, names, digest))
    constant = [
        name
        for name, contents in groups.items()
        if _is_constant(metas[name], contents) and map_of_component(name) is None  # statuses often
    ]
    for name in constant:
        if names[name] is not None:
            del groups[name]
    differing = [name for name, contents in groups.items() if len(contents) > 1]
    running = yield from find_running_statistics(catalog, strategy, differing)
    of_ranks = {name: tuple(map(tuple, contents.values())) for name, contents in groups.items()}
    return EqualContents(of_ranks, tuple(name for name in constant if name in groups), running)


def sample_states(catalog: Catalog, names: Mapping[str, str | None]) -> Asking[EqualContents]:
    """Group the ranks by equal samples, for tensors named and shaped like optimizer state.

    Samples distinguish state from replicated parameters.
    """
    from ckpttool.storage.sampling import sample

    states = [name for name, parameter in names.items() if parameter is not None]
    groups = yield from _group(catalog, states, sample)
    metas = catalog.metas
    return EqualContents(
        {
            name: tuple(map(tuple, contents.values()))
            for name, contents in groups.items()
            if not _is_constant(metas[name], contents)
        }
    )


def sample_ranks(
    catalog: Catalog, names: Iterable[str]
) -> Asking[list[tuple[str, RankGroups, bool]]]:
    """Return the ranks grouped by equal samples of each tensor, and whether it is one value.

    Slices of one value are equal even if they are of different elements.  Equal bytes of different
    shapes or element types are not equal tensors.
    """
    from ckpttool.storage.sampling import sample

    sampled = []
    for name, contents in (yield from _group(catalog, names, sample)).items():
        metas = catalog.metas_of(name)
        groups: dict[object, list[int]] = defaultdict(list)
        for content, ranks in contents.items():
            for rank in ranks:
                groups[content, metas[rank]].append(rank)
        is_constant = len(groups) == 1 and _is_constant(catalog.metas[name], contents)
        sampled.append((name, tuple(map(tuple, groups.values())), is_constant))
    return sampled


def find_differing_ends(
    catalog: Catalog, names: Iterable[str]
) -> Asking[dict[str, tuple[int, int]]]:
    """Return the tensors whose samples differ between the first and the last rank that hold them.

    Slices of an even split differ between these two, whatever the layout is.
    """
    from ckpttool.storage.sampling import sample

    ends = {
        name: (min(with_it), max(with_it)) for name in names if (with_it := catalog.holders[name])
    }
    tensors = {
        name: [catalog.files[rank].tensors[name] for rank in ranks] for name, ranks in ends.items()
    }
    samples = yield from ask(sample, (tensor for pair in tensors.values() for tensor in pair))
    return {name: ends[name] for name, (a, b) in tensors.items() if samples[a] != samples[b]}


def _group(
    catalog: Catalog, names: Iterable[str], read: Callable[[StoredTensor], Sample]
) -> Asking[dict[str, dict[Sample, list[int]]]]:
    """Return name to content to the ranks that have it."""
    tensors = {
        (name, rank): file.tensors[name]
        for name in names
        for rank, file in catalog.files.items()
        if name in file.header
    }
    contents = yield from ask(read, tensors.values())
    groups: dict[str, dict[Sample, list[int]]] = defaultdict(dict)
    for (name, rank), tensor in tensors.items():
        groups[name].setdefault(contents[tensor], []).append(rank)
    return groups


def _is_constant(meta: TensorMeta, contents: Collection[Sample]) -> bool:
    are_equal = len(contents) == 1 and next(iter(contents)).is_constant
    return are_equal and meta.nbytes > meta.itemsize


# -------------------------------------------------------------- other listings of the same tensors

IndexedTensors = Mapping[str, TensorMeta] | CkptToolError | OSError


def read_indexes_beside(root: str) -> Asking[Mapping[str, IndexedTensors]]:
    """Return the full tensors of an index in a source's folder or its parent, by its path.

    MindSpore's ``unified_safetensors`` writes such an index with its full tensors.
    """
    folder = Path(root).absolute()
    paths = (str(at / MAP_NAME) for at in (folder, folder.parent))
    return (yield from ask(_read_index, paths))


def _read_index(path: str) -> IndexedTensors:
    if not is_file(path):
        return {}
    try:
        merged = scan_indexed(path)
    except (CkptToolError, OSError) as error:
        return error
    return {} if merged is None else merged.metas


class ComparedCopies(Struct, frozen=True):
    """Tensors that an index names in one file, by the other files that hold copies of them."""

    equal: Mapping[str, Sequence[StoredTensor]] = {}
    differing: Mapping[str, Sequence[StoredTensor]] = {}


def find_counting(
    catalog: Catalog, listed_names: Collection[str], metas: Mapping[str, TensorMeta]
) -> Asking[frozenset[str]]:
    """Return the single numbers whose values show that they count something; see `may_count`.

    A number that cannot be read shows nothing; copying it reports the error.
    """
    names = (metas[name].name for name in may_count(listed_names, metas))  # those on disk
    stored = {
        name: catalog.files[catalog.holders[name][0]].header[name]
        for name in names
        if name in catalog.holders
    }
    if not stored:
        return frozenset()
    try:
        numbers = yield from ask(read_number, stored.values())
    except UnreadEvidenceError:
        return frozenset()
    values = {name: numbers[tensor] for name, tensor in stored.items()}
    return frozenset(n for n, value in values.items() if value > LEAST_COUNT and value.is_integer())


def read_number(tensor: StoredTensor) -> float:
    """Return the only number of a stored tensor, without NumPy; runs on a worker."""
    data, file = bytearray(tensor.meta.itemsize), tensor.file
    with open_source(file) as opened:
        if file.cipher is None:
            data[:] = opened.pread(len(data), tensor.extents[0].offset)
        else:
            offset = tensor.extents[0].offset
            read_plain(opened.fileno(), file.path, file.cipher, offset, memoryview(data))
    if tensor.meta.dtype == "BFloat16":  # the upper half of a Float32
        data[:0] = bytes(2)
    (number,) = struct.unpack({2: "<e", 4: "<f", 8: "<d"}[len(data)], data)
    return float(number)


def read_weight_block(root: str, belongings: Belongings) -> Asking[tuple[int, int] | None]:
    """Return the rows and columns of Float8 that share a scale, if a file beside says it.

    It is a config.json, or else the manifest of a set that was written from such a source.
    """
    if not any(what.role == "scale" for what in belongings.values()):
        return None
    folder = Path(root).absolute()
    paths = [str(at / "config.json") for at in (folder, folder.parent)]
    paths += [str(folder / MANIFEST), f"{folder}.{MANIFEST}"]
    blocks = yield from ask(_read_block, paths)
    return next(filter(None, map(blocks.__getitem__, paths)), None)


def _read_block(path: str) -> tuple[int, int] | None:
    """Return the size of blocks in a config.json or a manifest; runs on a worker.

    A config.json may be that of another program: then shapes have to fit blocks of the usual size.
    """
    if not is_file(path):
        return None
    if path.endswith(MANIFEST):
        try:
            return ManifestFile.read(Path(path)).provenance().weight_block
        except FormatError:
            return None  # `ckpttool.checks.manifest_hashes.check_source` reports it
    if Path(path).stat().st_size > _MAX_CONFIG_BYTES:
        return None
    try:
        config = parse_json(read_file(path))
    except ValueError:
        return None
    match config:
        case {"quantization_config": {"weight_block_size": [int(rows), int(columns)]}}:
            return (rows, columns) if rows > 0 and columns > 0 else None
    return None


def compare_copies(catalog: Catalog, by_samples: bool) -> Asking[ComparedCopies]:
    """Compare the copies of tensors that an index names in another file.

    Compare all bytes, or with ``by_samples`` some pages of each tensor.
    """
    if not catalog.copies:
        return ComparedCopies()
    from ckpttool.storage.sampling import digest, sample

    named = {
        name: tensor
        for file in catalog.files.values()
        for name, tensor in file.tensors.items()
        if name in catalog.copies
    }
    read: dict[Callable[[StoredTensor], Sample], list[StoredTensor]] = {sample: [], digest: []}
    for tensor in chain(named.values(), *catalog.copies.values()):
        read[sample if by_samples or tensor.meta.text is not None else digest].append(tensor)
    samples = yield from ask(sample, read[sample])
    digests = yield from ask(digest, read[digest])
    contents = {**samples, **digests}
    equal: dict[str, list[StoredTensor]] = {}
    differing: dict[str, list[StoredTensor]] = {}
    for name, copies in catalog.copies.items():
        original = named[name]
        for copy in copies:
            is_equal = copy.meta == original.meta and contents[copy] == contents[original]
            (equal if is_equal else differing).setdefault(copy.file.path, []).append(original)
    return ComparedCopies(equal, differing)


# ---------------------------------------------------------------------------- running statistics

_VARIANCE_OF_MEAN = {
    "moving_mean": "moving_variance",  # nn.BatchNorm
    "running_mean": "running_var",  # mint.nn.BatchNorm
    "mean": "variance",  # nn.InstanceNorm
}
_WEIGHT_NAMES = ("gamma", "weight")  # of the same layers
_FLOAT_DTYPES = ("Float16", "BFloat16", "Float32", "Float64")


def find_running_statistics(
    catalog: Catalog, strategy: Strategy, names: Collection[str]
) -> Asking[frozenset[str]]:
    """Return the ``names`` that are running statistics by name, shape and values.

    Their numbers are finite on every rank, and variances are not negative.
    """
    from ckpttool.storage.sampling import find_least

    least = find_statistic_candidates(catalog.metas, strategy) if names else {}
    tensors = {
        name: [file.tensors[name] for file in catalog.files.values() if name in file.header]
        for name in names
        if name in least
    }
    minima = yield from ask(
        find_least, (tensor for stored in tensors.values() for tensor in stored)
    )
    return frozenset(
        name
        for name, stored in tensors.items()
        if all(minima[tensor] >= least[name] for tensor in stored)
    )


def find_statistic_candidates(
    metas: Mapping[str, TensorMeta], strategy: Strategy
) -> dict[str, float]:
    """Return the least value of each parameter that may be running statistics by name and shape.

    The mean and the variance of a layer are a pair, with one number for each channel.  Statistics
    that the strategy lists are left out, and those of layers whose weight it shards: they may be
    slices.
    """
    least: dict[str, float] = {}
    for name, meta in metas.items():
        layer, last = parse_name(name).layer, parse_name(name).last
        pair = metas.get(_join_name(layer, _VARIANCE_OF_MEAN.get(last, "")))
        if pair is None or (meta.dtype, meta.shape) != (pair.dtype, pair.shape):
            continue
        names = {name, pair.name}
        may_be_sliced = names & strategy.layouts.keys() or any(
            math.prod(layout.slice_counts) > 1
            for weight in _WEIGHT_NAMES
            for layout in strategy.layouts.get(_join_name(layer, weight), ())
        )
        if meta.dtype in _FLOAT_DTYPES and len(meta.shape) == 1 and not may_be_sliced:
            least |= {name: -math.inf, pair.name: 0.0}
    return least


def _join_name(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name
