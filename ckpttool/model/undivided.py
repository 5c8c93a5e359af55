"""Checkpoints that hold every parameter undivided, in one file or several.

Of several, one file may be kept apart: it goes to every rank as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckpttool.model.catalog import Catalog, MergedCatalog, TensorMeta
from ckpttool.model.findings import Finding
from ckpttool.model.notes import Note
from ckpttool.model.sources import Sources, full_source
from ckpttool.model.states import Owners, find_owners
from ckpttool.model.strategy import parameter_of, shorten
from ckpttool.model.unlisted import Unlisted


def undivided_sources(catalog: Catalog, unlisted: Unlisted | None = None) -> Sources:
    """Sources of a checkpoint that holds every parameter undivided, in one file or several.

    ``unlisted`` decides, as in `find_sources`, what becomes of tensors of which it may hold only
    one rank's slice.
    """
    sources = Sources(damage=list(catalog.damaged.values()))
    sources.notes += on_one_of_several(catalog)
    slices = possible_slices(catalog)
    if slices:
        question, note = _settle_slices(catalog, slices, unlisted)
        sources.problems += [Finding("unlisted", question)] if question else []
        sources.notes += [note] if note else []
    for rank, file in catalog.files.items():
        kept = (name for name in file.tensors if unlisted != "drop" or name not in slices)
        sources.found += [full_source(catalog, name, rank) for name in kept]
    return sources


def on_one_of_several(catalog: Catalog) -> Iterator[Note]:
    """A warning if a source is one rank's file of several."""
    if isinstance(catalog, MergedCatalog) and catalog.one_of_several:
        text = f"{catalog.root}: one rank of several ({catalog.one_of_several}); its tensors may "
        yield Note("doubt", text + "be slices", is_warning=True)


def why_not_full(catalog: Catalog) -> str | None:
    """Why a source is not taken for a full checkpoint, and what to do; None if it is taken."""
    if not catalog.one_of_several:
        return None
    return (
        f"{catalog.root}: one rank of several ({catalog.one_of_several}), so its tensors may be "
        "slices, and it is not taken for a full checkpoint; name the folder of all ranks, and "
        "their strategy (merge or reshard with -s STRATEGY), or say --replicated if this file "
        "alone holds everything in full"
    )


def possible_slices(catalog: Catalog) -> Mapping[str, str]:
    """What an undivided checkpoint keeps apart and what may be rank 0's slice of it all.

    MindSpore puts there what it did not merge: what the strategy does not list, but also
    ``accu_grads.*`` and parameters that were not chosen.  Whole for certain is what an index names,
    a tensor without axes, one with a single element, and a state that has its parameter's shape.
    A state that has not is none, even of a single element.

    Returns
    -------
    Mapping
        Name to what is known of it, for a message.
    """
    if not isinstance(catalog, MergedCatalog):
        return {}
    metas = catalog.metas
    owners = find_owners((), metas)
    found = {}
    for name, is_named in catalog.common_tensors.items():
        meta, base = metas[name], metas.get(_owner(metas, owners, name))
        if is_named or not meta.shape:
            continue
        if base is not None and base.name not in catalog.common_tensors:
            if meta.shape != base.shape:
                found[name] = f"{name} {meta.shape}, of {base.name} {base.shape}"
        elif math.prod(meta.shape) != 1:
            found[name] = f"{name} {meta.shape}"
    return found


def _owner(metas: Mapping[str, TensorMeta], owners: Owners, name: str) -> str:
    """The parameter whose state ``name`` is, by its prefix or by its shape; itself if of none."""
    base = owners.get(name, name)
    is_alike = metas[base].shape == metas[name].shape
    return base if is_alike else parameter_of(name) or name


def _settle_slices(
    catalog: Catalog, slices: Mapping[str, str], unlisted: Unlisted | None
) -> tuple[str | None, Note | None]:
    """The question that `possible_slices` raise, or a note of how the user decided it."""
    listed = f"{catalog.root}: {shorten(slices.values())}"
    if unlisted == "drop":
        return None, Note("dropped", f"{listed}: perhaps rank 0's slices only: dropped")
    if unlisted == "first":
        return None, Note("unlisted", f"{listed}: perhaps rank 0's slices only: taken as they are")
    text = f"{listed}: not in the index, so only rank 0's, of which it may have a slice; "
    text += "leave out what is one with --unlisted drop, or take all as it is with --unlisted first"
    return text, None
