"""The metadata of safetensors files, which outputs of that format take over from their sources.

An entry is carried if all files that have it agree, and if it still holds.  An entry that names a
tensor holds only if every tensor is written as it was: under its name, with its type and values,
and neither joined from slices nor sharded.  `names_tensor` says what names a tensor.

Marks of one file or one program are never carried: see `_OF_ONE_FILE`.  The mark ``format`` is that
of the target.  Nor is an entry that is called like a tensor, which MindSpore takes for its type.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from msgspec.structs import replace

from ckpttool.lazy import compile_late
from ckpttool.model.plan import Plan
from ckpttool.problems import Diagnostic, Diagnostics
from ckpttool.wording import shorten

# The checksum and the mark of MindSpore, slices of torch, signatures, and how ckpttool made a file.
_OF_ONE_FILE = compile_late(
    r"(?s)format|remove_redundancy|crc_.*|DCP_.*|__.*__|ckpttool\..*",
)
_WORD = compile_late(r"[\w./-]+")
_JSON_STRING = compile_late(r'"([^"\\]*)"')


def carry_metadata(plan: Plan, diagnostics: Diagnostics) -> Plan:
    """Return the plan with the metadata of its sources; note what is left out."""
    texts = defaultdict[str, set[str]](set)
    for catalog in plan.checkpoints:
        for file in catalog.files.values():
            for key, value in file.attrs.items():
                if not _OF_ONE_FILE.fullmatch(key):
                    texts[key].add(value)
    if not texts:
        return plan
    names = {*plan.left_out}.union(*(catalog.metas for catalog in plan.inputs))
    modules = {name.rpartition(".")[0] for name in names} - {""}
    new_names = {transfer.name for transfer in plan.transfers}
    is_changed = _is_changed(plan, names)
    carried, left_out = dict[str, str](), defaultdict[str, list[str]](list)
    for key, (value, *differing) in sorted(texts.items()):
        if plan.target.format != "safetensors":
            left_out[f"{plan.target.format} has no place for it"].append(key)
        elif differing:
            left_out["it differs between the files"].append(key)
        elif key in names or key in new_names:
            left_out["MindSpore takes an entry with the name of a tensor for its type"].append(key)
        elif is_changed and names_tensor(key, value, names, modules):
            left_out["it names tensors, and some are written otherwise"].append(key)
        else:
            carried[key] = value
    for why, keys in left_out.items():
        facts = shorten(keys, 3)
        diagnostics.add(Diagnostic("metadata", f"metadata is left out: {why}", facts=facts))
    return replace(plan, target=replace(plan.target, attrs={**carried, **plan.target.attrs}))


def _is_changed(plan: Plan, names: Collection[str]) -> bool:
    written = {transfer.source.name for transfer in plan.transfers}
    return not written.issuperset(names) or any(
        transfer.is_cast
        or transfer.name != transfer.source.name
        or (transfer.source.is_sharded and not transfer.is_own)
        or any(max(layout.slice_counts, default=1) > 1 for layout in transfer.layouts)
        for transfer in plan.transfers
    )


def names_tensor(key: str, value: str, names: Collection[str], modules: Collection[str]) -> bool:
    """Return whether an entry names a tensor.

    The key, the text, or a word or a JSON string in the text is the name of a tensor, or of a
    module with one.  A name beside that of a tensor counts, too: torchao stores ``0.weight`` as
    ``0._weight_qdata``.  A module without a dot must be a whole JSON string, the text or the key,
    and numbers are not modules.

    Examples
    --------
    >>> names, modules = {"h.0.w"}, {"h.0"}
    >>> [names_tensor(key, text, names, modules) for key, text in (("h.0.b", ""), ("a", "h.1.w"))]
    [True, False]
    """

    def is_in_module(word: str) -> bool:
        module, _, last = word.rpartition(".")
        heads = (word[: dot.start()] for dot in re.finditer(r"[.]", word))
        return (module in modules and not last.isdecimal()) or any(head in names for head in heads)

    whole = {key, value, *_JSON_STRING.findall(value)}
    return any(
        word in names
        or is_in_module(word)
        or (word in modules and not word.isdecimal() and ("." in word or word in whole))
        for word in (*whole, *(word.strip(".") for word in _WORD.findall(value)))
    )
