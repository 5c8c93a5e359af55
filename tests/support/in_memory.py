"""Plans carried out on slices that exist in memory only, to see what their pieces make."""

from __future__ import annotations

from functools import partial

import numpy as np
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents, ResolveOptions
from ckpttool.checkpoint.contents import EqualContents, read_number
from ckpttool.checkpoint.evidence import Evidence, answer
from ckpttool.checkpoint.interpret import EachFile
from ckpttool.checkpoint.resolve import resolving
from ckpttool.checks import is_refused, run_checks
from ckpttool.model.catalog import Catalog
from ckpttool.model.joining import join_alike
from ckpttool.model.plan import Target
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex, StoredFile, TensorMeta
from ckpttool.planning.targets import plan
from ckpttool.problems import Diagnostics
from ckpttool.storage.sampling import Sample, digest, nearness, sample, sample_box
from ckpttool.transaction.resume import OutputOptions
from tests.support.checkpoints import ONE_STAGE, catalog_of, stored
from tests.support.evidence import MadeUp
from tests.support.readers import Entry


def catalog_of_entries(ranks) -> Catalog:
    """Return the headers of slices that exist in memory only."""
    files = {}
    for rank, entries in ranks.items():
        metas = [TensorMeta(name, entry.dtype, entry.shape) for name, entry in entries.items()]
        tensors = {meta.name: stored(meta, f"rank_{rank}") for meta in metas}
        files[rank] = FileIndex((StoredFile(f"rank_{rank}"),), "ckpt", 1, tensors)
    return Catalog("run", files)


def checkpoint_in_memory(catalog, strategy, content_groups=None, unlisted=None) -> Checkpoint:
    """Resolve headers alone; ``content_groups`` says which ranks hold equal tensors."""
    options = ResolveOptions(unlisted=unlisted)
    if strategy is None:
        return Checkpoint(
            catalog=catalog,
            strategy=Strategy.without_layouts(),
            options=options,
            records=EachFile(catalog),
            files="full",
        )
    equal = EqualContents(content_groups or {})
    bare = Checkpoint(catalog=catalog, strategy=strategy, options=options)
    return bare.with_strategy(replace(strategy), equal)


def resolve_in_memory(catalog, strategy, letters, **options) -> tuple[Checkpoint, Contents]:
    """Resolve a checkpoint whose files are not there, with samples that are made up.

    ``letters`` says what a rank holds of a tensor: ranks with the same letter hold the same, and a
    capital stands for equal elements.  Of other tensors all ranks hold the same.
    """

    def read(function, subject):
        if function is sample_box:
            return bytes(subject.layout.first_rank)
        if function is nearness:
            return None
        if function is read_number:
            return 1.0  # no single number counts anything
        if function not in (sample, digest):
            return {}  # no index lies beside the files
        rank = int(subject.file.path.split("/")[1].removeprefix("rank_"))
        of_tensor = letters.get(subject.meta.name)
        letter = "a" if of_tensor is None else of_tensor[rank]
        return Sample(f"{subject.meta.name} {letter}".encode(), letter.isupper(), 8.0)

    steps = resolving(
        catalog,
        strategy,
        ResolveOptions(**options),
        contents="all",
        is_refused=partial(is_refused, command="convert"),
        files="full" if strategy is None else "joined",
    )
    return answer(steps, MadeUp(read), Evidence())


def check_in_memory(checkpoint) -> Diagnostics:
    """Return what the checks of headers find for a conversion."""
    found = Diagnostics()
    found.failures += checkpoint.damage
    found.add(*run_checks(checkpoint, Contents(is_refused=True), "convert"))
    return found


def find(catalog, strategy=ONE_STAGE, content_groups=None, unlisted=None):
    """Return full tensors by name, problems, and texts of the notes by kind."""
    checkpoint = checkpoint_in_memory(catalog, strategy, content_groups, unlisted)
    checked = check_in_memory(checkpoint)
    notes = {}
    for note in join_alike(checked.of("note", "warning")):
        notes.setdefault(note.code, []).append(note.text)
    found = {}
    for tensor in checkpoint.tensors:
        found.setdefault(tensor.name, []).append(tensor)
    return found, [problem.text for problem in join_alike(checked.errors)], notes


def plan_in_memory(catalog, strategy, target, content_groups=None, unlisted=None, **options):
    """Plan from headers alone; ``content_groups`` says which ranks hold equal tensors.

    ``options`` are those of the outputs.
    """
    checkpoint = checkpoint_in_memory(catalog, strategy, content_groups, unlisted)
    found = check_in_memory(checkpoint)
    made = plan(checkpoint, Contents(), target, OutputOptions(**options), found)
    found.raise_if_errors()
    return replace(made, notes=found.of("note", "warning"))


def full_tensors(**shapes):
    """The catalog of one file with full tensors of these shapes."""
    return Catalog("m", catalog_of({0: shapes}).files, is_merged=True)


def merge_in_memory(catalog, strategy=None, agreement=None):
    """The plan of one output with full tensors."""
    return plan_in_memory(catalog, strategy, Target("ckpt", {0: "out"}), agreement)


def make(catalog, src, dst):
    """Plan for all target ranks; unlisted names are the same on all ranks, in source and target."""
    content_groups = {
        name: (tuple(rank for rank, file in catalog.files.items() if name in file.tensors),)
        for name in {name for file in catalog.files.values() for name in file.tensors}
        if name not in src.layouts
    }
    ranks = 1 if dst is None else len(dst.ranks)
    paths = {rank: f"out_{rank}" for rank in range(ranks)}
    target = Target("ckpt", paths, ranks, dst)
    return plan_in_memory(catalog, src, target, content_groups, not_in_target="follow")


def carry_out(plan, ranks):
    """Fill the outputs of a plan from slices in memory, each element exactly once."""
    outputs = {}
    for output in plan:
        outputs[output.rank] = {}
        for tensor in output.tensors:
            meta = tensor.meta
            out = np.zeros(meta.shape, f"V{meta.itemsize}")
            written = np.zeros(meta.shape, int)
            for piece in tensor.pieces(Region.whole(meta.shape)):
                assert piece.tensor.file.path == f"rank_{piece.rank}"
                assert piece.src.shape == piece.dst.shape
                assert piece.dst.size > 0
                held = ranks[piece.rank][meta.name]
                assert held.shape == piece.tensor.meta.shape
                raw = held.array().view(out.dtype)
                out[slices(piece.dst)] = raw[slices(piece.src)]
                written[slices(piece.dst)] += 1
            assert (written == 1).all(), meta
            outputs[output.rank][meta.name] = Entry(meta.dtype, meta.shape, out.tobytes())
    return outputs


def slices(region):
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
