"""Checkpoints of hyper-parallel: the file that holds each box of each tensor.

A folder has ``_rank3_.safetensors`` for every rank that saved tensors and one ``.metadata`` that
names the file of every box.  If the ranks saved without communicating, each has a metadata file of
its own, ``.rank3_metadata`` or, later, ``3.metadata``.  Objects that are not tensors lie in
``*.bytes``, layouts perhaps in ``*.layout``; neither is read.

The trainer has a folder ``global_step_12`` for every save, and ``latest_checkpoint_iteration.txt``
beside them with the number of the last complete one.  Metadata is written last, so a folder
without it was not finished.  Where each rank has its own, every rank with a file of tensors needs
it, and every rank of other saves.  To resume, the trainer takes the save that the file names.
Without the file, or if that save is not complete, it takes the newest complete one.

Bytes of a metadata file
------------------------
A pickle of protocol 2 to 5 of one object, with these classes of
``hyper_parallel.core.checkpoint`` or, later, ``hyper_parallel.core.distributed_checkpoint``::

    metadata.Metadata
        state_dict_metadata   {fqn: TensorStorageMetadata or BytesStorageMetadata}
        planner_data          not read
        storage_data          {MetadataIndex: StorageInfo}
        version               "1.0" or "2.0"; "1.0" if absent
    metadata.TensorStorageMetadata
        properties            TensorProperties: dtype, such as "Float32" or "torch.float32"
        size                  the full shape
        chunks                [ChunkStorageMetadata]: offsets and sizes, in elements
    metadata.BytesStorageMetadata    an object that is not a tensor
    metadata.MetadataIndex    fqn and offset, as in chunks; its index is not read
    storage.StorageInfo       relative_path: a file in the same folder; offset 0 and length -1 for a
                              tensor; tensor_key: its name in the file, None or absent if it is fqn

Shapes are tuples, of PyTorch's ``torch.Size`` as well.  Equal chunks are replicas; storage_data may
have one of them or all.

A pickle is a program.  Here it can name only `CLASSES`, which have attributes and nothing else, and
``tuple`` in place of ``torch.Size``.  It runs in the limited process of `ckpttool.formats.sandbox`,
because a hostile one can still take much memory and time.

Limits: 200 MB a file; 5,000,000 chunks; 32 axes.

Source
------
hyper-parallel ``hyper_parallel/core/checkpoint/``, revision fdd0a80 of 2026-03 (run with MindSpore
2.10 and torch 2.13), and ``core/distributed_checkpoint/`` of later in 2026 (read, not run).  Its
issue 646 describes the folders of the trainer.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.file_names import HYPER_METADATA
from ckpttool.discovery.ignored import describe_ignored
from ckpttool.discovery.saves import FoundStep
from ckpttool.discovery.self_described import (
    BARE_NAME,
    Fault,
    FilesByName,
    NumberedSaves,
    damages,
    describe_faults,
    errors_of,
    find_tensor,
    left_of,
    read_existing_files,
)
from ckpttool.formats.local import (
    identify_file,
    is_file,
    list_folder,
    open_file,
    open_source,
    stat_file,
)
from ckpttool.formats.sandbox import CPU_SECONDS, Sandbox
from ckpttool.formats.strict_json import convert_as
from ckpttool.lazy import compile_late
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import find_word
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    Box,
    BoxSlicing,
    Description,
    FullTensor,
    Listed,
    box_problems,
    fill_with_boxes,
)
from ckpttool.model.tensors import (
    CutShortError,
    FileIndex,
    StoredFile,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    Diagnostics,
    FormatError,
    PlanError,
    UnfinishedError,
    UnsupportedError,
    raise_all,
)
from ckpttool.wording import count, format_shape, shorten

MAX_BYTES = 200_000_000  # a hundred bytes and more for every slice of every rank
_BYTES_PER_SECOND = 2_000_000  # of a metadata file, read by the slowest machine
MAX_CHUNKS = 5_000_000  # of all tensors together
MAX_AXES = 32
_VERSIONS = ("1.0", "2.0")

T = TypeVar("T")

_STEPS = NumberedSaves(
    "step", compile_late(r"global_step_(\d{1,18})"), "latest_checkpoint_iteration.txt"
)
_TENSOR_FILE = compile_late(r"_rank(\d{1,9})_\.safetensors")
_ALL_RANKS = -1  # in place of the rank of a metadata file: it is that of all
_PICKLE = b"\x80"  # first byte of every pickle of protocol 2 and later


def scan_hyper_parallel(src: str, step: str | None) -> Catalog | None:
    """Return the catalog of a hyper-parallel checkpoint; None if ``src`` is something else."""
    folder, diagnostics = Path(src), Diagnostics()
    if not _is_complete(folder):
        return None
    if step is not None:
        message = "it has one save and no steps"
        raise PlanError([Diagnostic("source", message, hint="omit --step", where=src)])
    metadata = _metadata_files(folder)
    if metadata[0][0] == _ALL_RANKS and metadata[1:]:
        names = shorten(sorted(path.name for _, path in metadata[1:]), 3)
        message = "metadata files of single ranks beside .metadata: ignored"
        diagnostics.add(Diagnostic("skipped", message, facts=names, where=src))
        metadata = metadata[:1]
    documents = tuple(identify_file(str(path)) for _, path in metadata)
    tensors, objects = _read_all(documents)
    diagnostics.add(*describe_ignored(folder, objects, "that are not tensors", noun="object"))
    named = {box.file for tensor in tensors.values() for box in tensor.stored}
    unnamed = [
        path.name
        for path in list_folder(folder)
        if path.name not in named
        and (path.suffix == ".layout" or _TENSOR_FILE.fullmatch(path.name))
    ]
    diagnostics.add(*describe_ignored(folder, unnamed, "not in .metadata"))
    files = _with_lost_names(tensors, read_existing_files(folder, sorted(named)))
    description = replace(
        _place_boxes(tensors, folder, files, diagnostics),
        files=tuple(str(path) for _, path in metadata),
    )
    return Catalog(
        src,
        _by_rank(tensors, files),
        step=_STEPS.label(folder),
        damaged=errors_of(files),
        diagnostics=tuple(diagnostics),
        documents=documents,
        description=description,
    )


def choose_step_folder(
    root: Path, wanted: str | None, diagnostics: Diagnostics
) -> tuple[Path, str | None]:
    """Return the folder of one step below ``root``, and ``--step`` where it is not resolved yet.

    The default is the last complete step; UnfinishedError if no step is complete.  Any other folder
    than the root or a step of the trainer is returned as it is.
    """
    if _STEPS.number(root) is not None and _is_save(root):
        _STEPS.require_wanted(root, wanted)
        return root, None
    folders = _STEPS.find_folders(root)
    if not any(map(_is_save, folders)):
        return root, wanted
    complete = {path: number for path, number in folders.items() if _is_complete(path)}
    unfinished = [path for path in folders if path not in complete]
    further = []
    if wanted is None:
        if not complete:
            message = "no step was finished"
            facts = f"without .metadata: {shorten((path.name for path in unfinished), 3)}"
            raise UnfinishedError([Diagnostic("unfinished", message, facts=facts, where=str(root))])
        last, named = max(complete.values()), _read_named_step(root, diagnostics)
        if named is not None and named in complete.values():
            last = named
        elif named is not None:
            further.append(f"{_STEPS.tracker} names {named}, which is not complete")
        newer = sorted(number for number in complete.values() if number > last)
        if newer:
            further.append(f"newer than {_STEPS.tracker} says: {shorten(map(str, newer), 3)}")
        wanted = str(last)
    chosen = _STEPS.choose(root, wanted, complete)
    _STEPS.note_choice(folders, folders[chosen], unfinished, diagnostics, further)
    return chosen, None


def list_step_folders(root: Path, diagnostics: Diagnostics) -> list[FoundStep] | None:
    """Return the steps of the trainer in a folder, the first one first; None for something else.

    ``diagnostics`` gets why none of them is read without ``--step``.
    """
    folders = _STEPS.find_folders(root)
    if not any(map(_is_save, folders)):
        is_save = _is_complete(root) or (_STEPS.number(root) is not None and _is_save(root))
        return [_describe_step(root, _STEPS.label(root), _is_complete(root))] if is_save else None
    chosen = None
    try:
        chosen, _ = choose_step_folder(root, None, Diagnostics())
    except UnfinishedError as error:
        diagnostics.add(*error.diagnostics)
    last, reason = _read_named_step(root, diagnostics), f"newer than {_STEPS.tracker} says"
    return [
        step.doubted(True, reason) if step.complete and last is not None and number > last else step
        for number, step in _STEPS.list_steps(root, chosen, _describe_step)
    ]


def _describe_step(folder: Path, name: str | None, is_chosen: bool) -> FoundStep:
    files = _tensor_files(folder)
    ranks = tuple(sorted(_rank_of(path.name) for path in files))
    lost = [] if files else ["no files of tensors"]
    if not _is_complete(folder):
        of_ranks = _ranks_of_metadata(folder)
        lost.append("ranks without metadata" if of_ranks else "no .metadata, which is written last")
    lost += damages(read_existing_files(folder, [path.name for path in files]))
    step, reason = _STEPS.label(folder), "; ".join(lost)
    nbytes = sum(stat_file(path).nbytes for path in files)
    return FoundStep(name, step, not lost, reason, ranks, (), len(files), nbytes, is_chosen)


def _read_named_step(root: Path, diagnostics: Diagnostics) -> int | None:
    try:
        return _STEPS.read_tracker(root)
    except FormatError as error:
        message = "cannot be read: ignored, as the trainer does"
        diagnostics.add(Diagnostic("skipped", message, facts=error.reason, where=error.path))
        return None


def find_unfinished(folder: Path) -> Diagnostic | None:
    """Return the diagnostic of a save without metadata; None if it is complete, or no save."""
    files = _tensor_files(folder)
    if not files or _is_complete(folder):
        return None
    missing = "ranks have no metadata" if _ranks_of_metadata(folder) else "no .metadata"
    real_path = folder.absolute()
    above = folder.parent if folder.name == real_path.name else real_path.parent
    complete = {path: n for path, n in _STEPS.find_folders(above).items() if _is_complete(path)}
    is_step = _STEPS.number(folder) is not None and bool(complete)
    hint = "-s STRATEGY --pattern '_rank{rank}_.safetensors', if all files are there"
    return Diagnostic(
        "unfinished",
        f"a save that did not finish: {missing}, which is written last",
        hint=f"{max(complete, key=complete.__getitem__)} as SRC" if is_step else hint,
        facts=f"{count(len(files), 'file')} of tensors, which may be missing or cut short",
        path=str(folder),
        where=str(folder),
    )


def _tensor_files(folder: Path) -> list[Path]:
    return [path for path in list_folder(folder) if _TENSOR_FILE.fullmatch(path.name)]


def _is_save(folder: Path) -> bool:
    return _is_complete(folder) or bool(_tensor_files(folder))


def _is_complete(folder: Path) -> bool:
    """Return whether a folder has the metadata of a finished save.

    If each rank has its own metadata, that of every file of tensors must be there.  If other saves
    lie beside it, it must also have all ranks of one of them, unless the trainer recorded it.
    """
    ranks = _ranks_of_metadata(folder)
    if not ranks or _ALL_RANKS in ranks:
        return bool(ranks)
    if {_rank_of(path.name) for path in _tensor_files(folder)} - ranks:
        return False
    number, above = _STEPS.number(folder), folder.absolute().parent
    # Choosing a step reports what is wrong with the record.
    if number is None or number == _read_named_step(above, Diagnostics()):
        return True
    beside = [path for path in _STEPS.find_folders(above) if path.name != folder.absolute().name]
    of_saves = [
        ranks for ranks in map(_ranks_of_metadata, beside) if ranks and _ALL_RANKS not in ranks
    ]
    return not of_saves or any(other <= ranks for other in of_saves)


def _ranks_of_metadata(folder: Path) -> set[int]:
    return {rank for rank, _ in _metadata_files(folder)}


def _metadata_files(folder: Path) -> list[tuple[int, Path]]:
    files = []
    for path in list_folder(folder):
        match = HYPER_METADATA.fullmatch(path.name)
        if (match or path.name == ".metadata") and _is_pickle(path):
            files.append((int(match[1] or match[2]) if match else _ALL_RANKS, path))
    return sorted(files)


def _is_pickle(path: Path) -> bool:
    if not is_file(path):
        return False
    with open_file(path) as file:
        return file.read(1) == _PICKLE


def _read_all(files: Sequence[StoredFile]) -> tuple[dict[str, _HyperTensor], tuple[str, ...]]:
    """Return the tensors and objects of all metadata files; types and shapes have to agree."""
    tensors: dict[str, _HyperTensor] = {}
    objects: dict[str, None] = {}
    problems: list[Diagnostic] = []
    errors: list[CkptToolError] = []
    with Sandbox() as sandbox:
        for file in files:
            seconds = CPU_SECONDS + stat_file(file.path).nbytes / _BYTES_PER_SECOND
            try:
                read, names = sandbox.run(read_metadata, file, "the unpickler", seconds)
            except CkptToolError as error:
                errors.append(error)
                continue
            objects |= dict.fromkeys(names)
            for name, tensor in read.items():
                known = tensors.setdefault(name, tensor)
                if known.meta != tensor.meta:
                    own, other = tensor.meta, known.meta
                    facts = f"{file.path}: {own.dtype} {format_shape(own.shape)}; "
                    facts += f"others: {other.dtype} {format_shape(other.shape)}"
                    message = "the metadata files of ranks contradict each other"
                    problems.append(Diagnostic("source", message, facts=facts, tensor=name))
                elif known is not tensor:
                    stored = dict.fromkeys((*known.stored, *tensor.stored))
                    tensors[name] = known._replace(stored=tuple(stored))
    if problems:
        errors.append(PlanError(problems))
    raise_all(errors)
    return tensors, tuple(objects)


def _by_rank(tensors: Mapping[str, _HyperTensor], files: FilesByName) -> dict[int, FileIndex]:
    """Return the headers by rank, with the tensors' names in place of the keys in the file.

    The header has the first of a tensor's boxes in a file; `Description` has all of them.
    """
    own, by_rank = _names_of_keys(tensors), {}
    for file, read in sorted(files.items(), key=lambda item: _rank_of(item[0])):
        if (index := left_of(read)) is not None:
            renamed: dict[str, StoredTensor] = {}
            for key, stored in index.tensors.items():
                name = own[file].get(key, key)
                renamed.setdefault(name, _with_name(name, stored))
            by_rank[_rank_of(file)] = replace(index, tensors=renamed)
    return by_rank


def _names_of_keys(tensors: Mapping[str, _HyperTensor]) -> Mapping[str, Mapping[str, str]]:
    own: dict[str, dict[str, str]] = defaultdict(dict)
    for name, tensor in tensors.items():
        for box in tensor.stored:
            own[box.file][box.key] = name
    return own


def _with_lost_names(tensors: Mapping[str, _HyperTensor], files: FilesByName) -> FilesByName:
    own, named = _names_of_keys(tensors), dict(files)
    for file, error in files.items():
        if isinstance(error, CutShortError):
            lost = {own[file].get(key, key): meta for key, meta in error.remains.lost.items()}
            named[file] = error.knowing(replace(error.remains, lost=lost))
    return named


def _with_name(name: str, stored: StoredTensor) -> StoredTensor:
    return replace(stored, meta=replace(stored.meta, name=name))


def _rank_of(file: str) -> int:
    match = _TENSOR_FILE.fullmatch(file)
    if match is None:
        facts = "expected _rankN_.safetensors, which says which rank wrote it"
        message = "the name, which .metadata lists, has no rank"
        raise PlanError([Diagnostic("source", message, facts=facts, where=file)])
    return int(match[1])


def _place_boxes(
    tensors: Mapping[str, _HyperTensor], folder: Path, files: FilesByName, diagnostics: Diagnostics
) -> Description:
    placed: dict[str, FullTensor] = {}
    problems: list[Diagnostic] = []
    faults: list[tuple[Fault, str]] = []
    for name, tensor in tensors.items():
        boxes = []
        reasons = []
        for box in tensor.stored:
            stored = find_tensor(folder, files, box.file, box.key, ".metadata")
            if isinstance(stored, Fault):
                reasons.append(stored)
            else:
                boxes.append(Box(box.region, _rank_of(box.file), _with_name(name, stored)))
        wrong = box_problems(tensor.meta, boxes)
        filled = wrong or fill_with_boxes(tensor.meta, boxes)
        if isinstance(filled, BoxSlicing):
            placed[name] = FullTensor(tensor.meta, filled, Listed())
        else:
            problems += wrong or ([] if reasons else filled)
        faults += ((reason, "" if name in placed else name) for reason in reasons)
    problems += describe_faults(faults, are_harmless=False)
    diagnostics.add(*describe_faults(faults, are_harmless=True))
    return Description((), placed, frozenset(tensors) - placed.keys(), tuple(problems))


# ---------------------------------------------------------------------------- the metadata file


class _StoredBox(Struct, frozen=True):
    """The place of a stored box of a tensor: a file's name, and the tensor's name in it."""

    region: Region
    file: str
    key: str


class _HyperTensor(NamedTuple):
    """One tensor of the metadata, and the boxes that are stored."""

    meta: TensorMeta
    stored: tuple[_StoredBox, ...] = ()


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"the pickle changes the class {cls.__name__}")


class _Object(metaclass=_Sealed):
    """An object of a class of hyper-parallel: attributes, and no behaviour."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


_METADATA_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata "
    "MetadataIndex"
)
CLASSES: Mapping[tuple[str, str], type] = {
    ("torch", "Size"): tuple,
    **{
        (f"hyper_parallel.core.{package}.{module}", name): _Sealed(name, (_Object,), {})
        for package in ("checkpoint", "distributed_checkpoint")
        for module, names in (("metadata", _METADATA_CLASSES), ("storage", "StorageInfo"))
        for name in names.split()
    },
}


_OF_PYTORCH = (
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, then save its tensors with "
    "safetensors.torch.save_file"
)


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds only `CLASSES`, so that a pickle can call nothing else."""

    path = ""

    def find_class(self, module: str, name: str) -> type:
        kind = CLASSES.get((module, name))
        if kind is None:
            facts = f"it names {module[:100]}.{name[:100]}; nothing was loaded"
            reason = "a pickle that is not metadata of hyper-parallel"
            hint = _OF_PYTORCH if module.startswith("torch.distributed.") else ""
            raise UnsupportedError(self.path, None, reason, hint, facts)
        return kind


def _load(file: StoredFile) -> object:
    path = file.path
    with BufferedReader(open_source(file)) as opened:
        nbytes = os.fstat(opened.fileno()).st_size
        if nbytes > MAX_BYTES:
            facts = f"{nbytes} bytes, expected at most {MAX_BYTES}"
            raise UnsupportedError(path, None, "the metadata file is too large", facts=facts)
        unpickler = _Unpickler(opened)
        unpickler.path = path
        try:
            return unpickler.load()
        except (CkptToolError, OSError):
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            facts = f"{type(error).__name__}: {str(error)[:200]}"
            raise FormatError(path, None, "not a readable pickle", facts=facts) from error


def read_metadata(file: StoredFile) -> tuple[dict[str, _HyperTensor], tuple[str, ...]]:
    """Return the tensors of a metadata file by name, and the names of its other objects.

    Called in the limited process.  A file that contradicts itself is a FormatError for each
    problem; one of other classes, as of another program, or of a later version is unsupported.
    """
    path, top = file.path, _load(file)
    try:
        metadata = _read(_Metadata, top)
    except ValueError as error:
        raise FormatError(path, None, str(error)) from error
    if metadata.version not in _VERSIONS:
        known = " or ".join(_VERSIONS)
        facts = f"expected {known}, found {short(metadata.version)}"
        raise UnsupportedError(path, None, "an unknown version of .metadata", facts=facts)
    errors: list[FormatError] = []
    tensors: dict[str, _HyperTensor] = {}
    objects: dict[str, None] = {}
    regions: dict[str, dict[tuple[int, ...], Region]] = {}
    budget = MAX_CHUNKS
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ == "BytesStorageMetadata":
            objects[name] = None
            continue
        try:
            tensors[name], regions[name] = _read_tensor(name, entry, budget)
            budget -= len(regions[name])
        except ValueError as error:
            errors.append(FormatError(path, None, f"{short(name)}: {error}"))
    stored: dict[str, dict[_StoredBox, None]] = {name: {} for name in tensors}
    for index, info in metadata.storage_data.items():
        name = str(getattr(index, "fqn", "storage_data"))
        try:
            place = _read(_MetadataIndex, index)
            if name in regions:
                stored[name][_read_box(place, regions[name], _read(_StorageInfo, info))] = None
            elif name not in objects and not errors:
                raise ValueError("in storage_data, but not in state_dict_metadata")
        except ValueError as error:
            errors.append(FormatError(path, None, f"{short(name)}: {error}"))
    raise_all(errors)
    placed = {name: tensor._replace(stored=tuple(stored[name])) for name, tensor in tensors.items()}
    return placed, tuple(objects)


def _read_tensor(
    name: str, entry: object, budget: int
) -> tuple[_HyperTensor, dict[tuple[int, ...], Region]]:
    """Return a tensor and its boxes by their starts, stored or not; raise ValueError."""
    spelled = _read(_TensorStorageMetadata, entry)
    dtype = find_word(spelled.properties.dtype)
    if dtype is None:
        raise ValueError(f"unknown dtype {spelled.properties.dtype[:40]!r}")
    if len(spelled.chunks) > budget:
        raise ValueError(f"chunks is not a list of at most {budget}")
    regions: dict[tuple[int, ...], Region] = {}
    for item in spelled.chunks:
        chunk = _read(_ChunkStorageMetadata, item)
        start, sizes = chunk.offsets, chunk.sizes
        if not len(start) == len(sizes) == len(spelled.size):
            message = f"a chunk of {len(sizes)} axes at {start}, expected {len(spelled.size)}"
            raise ValueError(message)
        region = Region(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        if (other := regions.setdefault(start, region)) != region:
            raise ValueError(f"chunks {other} and {region} begin at the same element")
    return _HyperTensor(TensorMeta(name, dtype.name, spelled.size)), regions


def _read_box(
    index: _MetadataIndex, regions: Mapping[tuple[int, ...], Region], info: _StorageInfo
) -> _StoredBox:
    if index.offset is None or index.offset not in regions:
        message = f"storage_data has a chunk at {index.offset}, state_dict_metadata has none"
        raise ValueError(message)
    file = info.relative_path
    if BARE_NAME.fullmatch(file) is None:
        raise ValueError(f"relative_path {file[:100]!r} is not a file name")
    if (info.offset, info.length) != (0, -1):
        raise ValueError(f"part of {file}, at byte {short(info.offset)}; expected all of a tensor")
    key = index.fqn if info.tensor_key is None else info.tensor_key
    return _StoredBox(regions[index.offset], file, key)


class _Metadata(Struct, frozen=True):
    state_dict_metadata: dict[str, object]
    storage_data: dict[object, object]
    version: object = _VERSIONS[0]


class _TensorProperties(Struct, frozen=True):
    dtype: str


class _TensorStorageMetadata(Struct, frozen=True):
    properties: _TensorProperties
    size: tuple[int, ...]
    chunks: list[object]

    def __post_init__(self) -> None:
        _require_sizes(self.size)


class _ChunkStorageMetadata(Struct, frozen=True):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_sizes(self.offsets)
        _require_sizes(self.sizes)


class _MetadataIndex(Struct, frozen=True):
    fqn: str
    offset: tuple[int, ...] | None = None


class _StorageInfo(Struct, frozen=True):
    relative_path: str
    offset: int
    length: int
    tensor_key: str | None = None


def _require_sizes(sizes: tuple[int, ...]) -> None:
    if len(sizes) > MAX_AXES or not all(0 <= n < 1 << 62 for n in sizes):
        raise ValueError(f"{short(sizes)}: expected at most {MAX_AXES} sizes, and none below 0")


def _read(kind: type[T], value: object) -> T:
    name = kind.__name__[1:]
    if type(value).__name__ != name:
        raise ValueError(f"expected a {name}, found {type(value).__name__}")
    return convert_as(kind, value)
