"""What is known of each tensor of a checkpoint, as the texts of this folder say.

A case lists strategies, tensors of ranks, and what comes of them:

- ``strategy w=2x2:1,- v=4:-``: device matrix, then the device axes of each tensor axis; ``/2`` is
  an optimizer shard, ``;rows=6+4``, ``;fields=3`` and ``;full=8x3`` are those of `Layout`.
  ``stage`` has the layouts of one more stage; ``target`` the strategy of a target;
- ``0-3 w(4,3) rng:Int32(2)=abcd s="text"``: what these ranks hold.  Letters are contents by rank,
  capitals are equal elements; without them slices are as the strategy says, and all else is equal;
- ``damaged 2 FormatError``, ``empty 3``, ``marked True``: files that cannot be read, that hold
  nothing, that say whether they were saved without redundancy;
- ``> unlisted=rank``: a conversion with these options, its tensors and diagnostics;
- ``>> not_in_target=full``: one for the target, and what each rank gets from which.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from ckpttool import problems
from ckpttool.checks import run_checks
from ckpttool.model.joining import join_alike
from ckpttool.model.plan import Target
from ckpttool.model.region import Region
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.model.tensors import FileIndex, StoredFile
from ckpttool.planning.targets import plan
from ckpttool.problems import Diagnostics
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import format_ranks
from tests.support.checkpoints import catalog_of
from tests.support.described import Described, joined, ranks_of
from tests.support.in_memory import resolve_in_memory
from tests.support.transcripts import check_case, read_cases

TEXTS = {title: path for path in Path(__file__).parent.glob("*.txt") for title in read_cases(path)}


def spell(layout):
    """Write a layout as `layout_of` reads it, with its first rank."""
    axes = ["+".join(map(str, axes)) or "-" for axes in layout.tensor_map]
    text = f"{'x'.join(map(str, layout.device_matrix))}:{','.join(axes)}"
    text += f"/{layout.optimizer_shard}" if layout.optimizer_shard > 1 else ""
    text += f";rows={'+'.join(map(str, layout.rows))}" if layout.rows else ""
    text += f";fields={layout.fields}" if layout.fields > 1 else ""
    return text + (f" of {layout.first_rank}" if layout.first_rank else "")


class Case(Described):
    """A case, and what is said of files that cannot be read."""

    def __init__(self):
        super().__init__()
        self.damaged, self.empty, self.attrs, self.said = {}, [], {}, set()

    def act(self, kind, words, options):
        """Do what a line says."""
        if kind == ">":
            return self.resolve(options)
        if kind == ">>":
            return self.plan(**options)
        if kind == "damaged":
            error = getattr(problems, words[1] if len(words) > 1 else "FormatError")
            self.damaged |= {
                rank: error(f"run/rank_{rank}/net.ckpt", 7, "cut short")
                for rank in ranks_of(words[0])
            }
        elif kind == "empty":
            self.empty += ranks_of(words[0])
        else:
            assert kind == "marked"
            self.attrs = {"remove_redundancy": words[0]}
        return None

    def checkpoint(self, options=None):
        """Resolve what was said."""
        catalog = catalog_of(self.tensors)
        files = {rank: file for rank, file in catalog.files.items() if rank not in self.damaged}
        if self.attrs:
            files = {
                rank: FileIndex(file.files, "safetensors", 9, file.tensors, self.attrs)
                for rank, file in files.items()
            }
        for rank in self.empty:
            path = StoredFile(f"run/rank_{rank}/net.ckpt")
            files[rank] = FileIndex((path,), "ckpt", 0, {})
        catalog = replace(catalog, files=files, damaged=self.damaged)
        strategy = joined(self.stages, "src.ckpt")
        letters = dict(self.letters)
        for name, layouts in ({} if strategy is None else strategy.layouts).items():
            if name not in letters:
                letters[name] = {
                    rank: f"{layout.slice_index(rank)}"
                    for layout in layouts
                    for rank in layout.ranks
                }
        return resolve_in_memory(catalog, strategy, letters, **(options or {}))

    def resolve(self, options):
        """Yield the tensors of a checkpoint, and what the checks find."""
        checkpoint, contents = self.checkpoint(options)
        for one in checkpoint.tensors:
            text = f"{one.name} {one.meta.dtype} {one.meta.shape}"
            text += f" by {spell(one.layout)}" if isinstance(one.slicing, LayoutSlicing) else ""
            text += "" if one.is_listed else ", not listed"
            text += f", as {one.parameter}" if one.parameter else ""
            text += f", for ranks {one.only_for}" if one.only_for else ""
            yield text + f", from {sources_of(one)}"
        found = Diagnostics()
        found.failures += checkpoint.damage
        found.add(*run_checks(checkpoint, contents, "convert"))
        yield from self.tell(found)

    def plan(self, not_in_target="follow", ranks=None, **options):
        """Yield what each rank of the target gets, and from which ranks, and what is found."""
        checkpoint, contents = self.checkpoint(options)
        target = joined(self.target, "dst.ckpt")
        found = Diagnostics()
        found.failures += checkpoint.damage
        found.add(*run_checks(checkpoint, contents, "convert"))
        all_ranks = range(1) if target is None else target.ranks
        wanted = ranks_of(ranks) if ranks else all_ranks
        target = Target("ckpt", {one: f"out/rank_{one}" for one in wanted}, len(all_ranks), target)
        options = OutputOptions(not_in_target=not_in_target)
        made = plan(checkpoint, contents, target, options, found)
        given = {}
        for output in made or ():
            for tensor in output.tensors:
                shape = tensor.meta.shape
                pieces = tensor.pieces(Region.whole(shape)) if tensor.meta.text is None else ()
                what = (
                    tensor.meta.text or f"{shape} from {format_numbers({p.rank for p in pieces})}"
                )
                given.setdefault(tensor.meta.name, {}).setdefault(what, []).append(output.rank)
        for name, kinds in given.items():
            yield f"{name}: " + "; ".join(
                f"{format_numbers(r)} {what}" for what, r in kinds.items()
            )
        for kind, (number, nbytes) in made.not_listed.sizes.items() if made else ():
            if number:
                yield f"{kind}: {number} of {nbytes} B"
        yield from self.tell(found)

    def tell(self, found):
        """Yield diagnostics, the gravest first, those of a line before without their facts."""
        for error in found.failures:
            yield f"damage: {error}".replace("\n", " ")
        for severity in ("error", "warning", "note"):
            for one in join_alike(found.of(severity)):
                lines = f"{severity} {one.code}: {one.text}".splitlines()
                yield from [f"{lines[0]} (as above)"] if one.text in self.said else lines
                self.said.add(one.text)


def format_numbers(ranks):
    """Format ranks without the word."""
    return format_ranks(sorted(ranks)).partition(" ")[2]


def sources_of(tensor):
    """The ranks that the slices of a tensor are read from."""
    if not isinstance(tensor.slicing, LayoutSlicing):
        return "each file"
    counts = product(*map(range, tensor.slicing.layout.slice_counts))
    paths = [tensor.slicing.find_slice(index)[1].file.path for index in counts]
    return " ".join(path.split("/")[1].removeprefix("rank_") for path in paths[:8])


@pytest.mark.parametrize("title", sorted(TEXTS))
def test_what_is_known_of_the_tensors_of_a_checkpoint(title):
    check_case(TEXTS[title], title, Case().read)
