"""The names of checkpoint files: rank, step and training run in them.

The end of a name says its step: ``{prefix}-{epoch}_{step}``, and ``_breakpoint`` behind it if
training stopped there.  MindFormers puts the rank into the prefix, ``llama_rank_3-10_2.ckpt``.
Others put only its number there, ``alpha_3-10_2.ckpt``.  MindSpore adds a counter to a prefix that
the folder has already, ``llama_rank_3_1-10_2.ckpt``.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py`` (``_chg_ckpt_file_name_if_same_exist``);
MindFormers ``tools/utils.py`` (ranks in names).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ckpttool.lazy import compile_late

RANK_FOLDER = compile_late(r"(rank|node|ckpt|device)[_-]?(\d+)(?:_ckpt)?")
RANK_IN_NAME = compile_late(r"(?<![A-Za-z])rank_?(\d+)(?!\d)")
STEP_IN_NAME = compile_late(r"-(\d{1,255})_(\d{1,255})(_breakpoint)?$")  # no file name is longer
NUMBER = compile_late(r"\d{1,255}")
_OF_BEST = compile_late(r"(.+)_(\d{1,9})_(\d{1,9})(\.\w+)?", re.DOTALL)
_COUNTER = compile_late(r"_([1-9]\d{0,254})$")
_RANK = "{rank}"
# What a number counts if not ranks, before the number.
_OTHER_COUNT = compile_late(
    r"(?<![a-z])(epoch|ep|step|iter|iteration|round|version|ver|v|run|trial|exp|experiment|seed|k?fold)"
    r"s?[^a-z0-9]*$",
    re.IGNORECASE,
)
HYPER_METADATA = compile_late(r"\.rank(\d{1,9})_metadata|(\d{1,9})\.metadata")  # of one rank
ITERATION = compile_late(r"iter(?:ation)?_(\d{1,18})")  # a folder of Checkpoint 2.0


class Step(NamedTuple):
    """The step of a save; later steps compare greater."""

    epoch: int
    step: int
    is_breakpoint: bool

    @property
    def label(self) -> str:
        """The step as spelled in names."""
        return f"{self.epoch}_{self.step}" + ("_breakpoint" if self.is_breakpoint else "")


class RankFile(Struct, frozen=True):
    """A file that may belong to the checkpoint, and the rank that wrote it.

    ``name`` is its name, with ``{rank}`` in place of the number if a pattern has it there.
    """

    rank: int
    path: Path
    name: str


class SaveName(NamedTuple):
    """The parts of the name of a rank's file: the run that saved it, and the step.

    ``prefix`` is the name before counter and step, with ``{rank}`` in place of the rank's number;
    all ranks of a run have the same.  ``counter`` is the number that MindSpore adds to a prefix
    that the folder has already, from 1 on; ranks of one run may have different ones.
    """

    prefix: str
    counter: int | None
    step: Step | None
    suffix: str

    @property
    def key(self) -> str:
        """The whole name, with ``{rank}`` in place of the rank's number."""
        counter = "" if self.counter is None else f"_{self.counter}"
        step = "" if self.step is None else f"-{self.step.label}"
        return f"{self.prefix}{counter}{step}{self.suffix}"

    @property
    def order(self) -> Step:
        """The step for comparison; names without a step come first."""
        return self.step or Step(-1, -1, False)

    @property
    def text(self) -> str:
        """The step, or the name if it has none."""
        return f"step {self.step.label}" if self.step else self.key


def read_names(files: Sequence[RankFile]) -> list[SaveName]:
    """Return what the names of all files of all ranks say, in their order.

    The number after the word ``rank`` is that of the rank if they agree.  Another number before the
    step is the rank's if every name of this form has its own rank there.  Names of this form must
    be on all ranks, or on several ranks with rank 0 among them.  So the 2 of ``alpha-2B6_2`` and
    the 1 of ``net_1`` on all ranks are part of the name.

    ``_1`` before the step is a counter after the number of the rank, or if another file has the
    same name without it.  So ``pangu_2`` alone is a prefix.

    If each rank's folder has one file, and all files are of one step, they share one prefix.

    Examples
    --------
    >>> files = {0: ("net_0-1_2.ckpt", "net_0_1-1_2.ckpt"), 1: ("net_1-1_2.ckpt",)}
    >>> listing = [RankFile(rank, Path(name), name) for rank in files for name in files[rank]]
    >>> [(name.prefix, name.counter, name.step.label) for name in read_names(listing)]
    [('net_{rank}', None, '1_2'), ('net_{rank}', 1, '1_2'), ('net_{rank}', None, '1_2')]
    """
    ranks = {item.rank for item in files}
    times = Counter(item.name for item in files)
    heads: list[str] = []
    for item in files:
        head = run_of(item.name)
        if times[item.name] < len(ranks) or len(ranks) == 1:  # all ranks' names are of none
            head = RANK_IN_NAME.sub(partial(_with_placeholder, item.rank), head)
        heads.append(head)
    steps = [step_of(item.name) for item in files]
    has_step = [step is not None for step in steps]
    places = _rank_places(files, heads, has_step)
    for i, item in enumerate(files):
        matches = () if _RANK in heads[i] else NUMBER.finditer(heads[i])
        for match in matches:
            if int(match[0]) == item.rank and _form(heads[i], match, has_step[i]) in places:
                heads[i] = f"{heads[i][: match.start()]}{_RANK}{heads[i][match.end() :]}"
                break
    saved = {head for head, is_save in zip(heads, has_step, strict=True) if is_save}
    names = []
    for file, head, step in zip(files, heads, steps, strict=True):
        counted = _COUNTER.search(head) if step is not None else None
        base = head if counted is None else head[: counted.start()]
        is_counted = counted is not None and (base.endswith(_RANK) or base in saved)
        counter = int(counted[1]) if counted is not None and is_counted else None
        names.append(SaveName(base if is_counted else head, counter, step, file.path.suffix))
    is_single = len(files) == len({item.path.parent for item in files}) == len(ranks)
    if is_single and len({(name.step, name.suffix) for name in names}) == 1:
        names = [name._replace(prefix=names[0].prefix) for name in names]
    return names


def _with_placeholder(rank: int, match: re.Match[str]) -> str:
    return f"rank_{_RANK}" if int(match[1]) == rank else match[0]


def _rank_places(
    files: Sequence[RankFile], heads: Sequence[str], has_step: Sequence[bool]
) -> Set[tuple[str, str]]:
    ranks = {item.rank for item in files}
    own: dict[tuple[str, str], set[int]] = defaultdict(set)
    of_others = set()
    for item, head, is_save in zip(files, heads, has_step, strict=True):
        for match in () if _RANK in head else NUMBER.finditer(head):
            form = _form(head, match, is_save)
            if int(match[0]) == item.rank:
                own[form].add(item.rank)
            else:
                of_others.add(form)
    return {
        form
        for form, having in own.items()
        if form not in of_others and len(having) > 1 and (0 in having or having == ranks)
    }


def _form(head: str, number: re.Match[str], has_step: bool) -> tuple[str, str]:
    tail = head[number.end() :]
    return head[: number.start()], _COUNTER.sub("", tail) if has_step else tail


def numbers_in(name: str) -> Iterator[tuple[tuple[str, str], re.Match[str]]]:
    """Yield the numbers in a file's name before the step, each with the name around it."""
    yield from (
        (form_around(name, match), match) for match in NUMBER.finditer(name, 0, len(run_of(name)))
    )


def form_around(name: str, number: re.Match[str]) -> tuple[str, str]:
    """Return the text around a number in a file's name, with the step and without a counter."""
    head = run_of(name)
    before, after = _form(head, number, step_of(name) is not None)
    return before, after + name[len(head) :]


def find_numbered(names: Iterable[str], *, are_files: bool) -> list[Mapping[int, str]]:
    """Return names that differ in one number, by this number, if it may be that of a rank.

    The numbers go from 0 to at least 1 without a gap.  They are not in the step of a file's name,
    and no word before them says that they count epochs, runs or folds.  Counters of files may
    differ, steps not; of several files with a number the last one counts.

    Examples
    --------
    >>> find_numbered(["net_0-1_2.ckpt", "net_1-1_2.ckpt", "net_1-2_2.ckpt"], are_files=True)
    [{0: 'net_0-1_2.ckpt', 1: 'net_1-1_2.ckpt'}]
    >>> find_numbered(["net_0_1-1_2.ckpt", "net_1-1_2.ckpt"], are_files=True)
    [{0: 'net_0_1-1_2.ckpt', 1: 'net_1-1_2.ckpt'}]
    >>> find_numbered(["fold_0", "fold_1", "10.0.0.4"], are_files=False)
    []
    """
    forms: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    doubtful = set[tuple[str, str]]()  # card2 and card02: one number of two folders
    for name in names:
        for match in NUMBER.finditer(name, 0, len(run_of(name)) if are_files else len(name)):
            form = name[: match.start()], name[match.end() :]
            form = form_around(name, match) if are_files else form
            number, names_of = int(match[0]), forms[form]
            if not are_files and names_of.get(number, name) != name:
                doubtful.add(form)
            names_of[number] = name
    certain = (form for form in forms if form not in doubtful)
    return [forms[form] for form in certain if _may_be_ranks(form[0], forms[form])]


def ranks_in_names(names: Iterable[str]) -> Mapping[str, int]:
    """Return the ranks of files in one folder whose names lack the word; empty if it is not clear.

    Names of one form have a number that may be that of a rank, as in `find_numbered`.  Steps and
    counters may differ.

    Examples
    --------
    >>> ranks_in_names(["a2_0-1_2.ckpt", "a2_1-1_2.ckpt", "a2_1_1-3_2.ckpt", "best.ckpt"])
    {'a2_0-1_2.ckpt': 0, 'a2_1-1_2.ckpt': 1, 'a2_1_1-3_2.ckpt': 1}
    """
    forms: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name in names:
        head = run_of(name)
        for match in NUMBER.finditer(head):
            before, after = _form(head, match, step_of(name) is not None)
            forms[before, after + Path(name).suffix][name] = int(match[0])
    groups = [ranks for (head, _), ranks in forms.items() if _may_be_ranks(head, ranks.values())]
    merged = {name: rank for ranks in groups for name, rank in ranks.items()}
    return merged if len(merged) == sum(map(len, groups)) else {}


def _may_be_ranks(head: str, numbers: Iterable[int]) -> bool:
    different = set(numbers)
    return different == set(range(max(2, len(different)))) and not _OTHER_COUNT.search(head)


def step_of(name: str) -> Step | None:
    """Return the step at the end of a file's name, or None."""
    match = STEP_IN_NAME.search(_stem(name))
    return Step(int(match[1]), int(match[2]), bool(match[3])) if match else None


def run_of(name: str) -> str:
    """Return the part of a name before the step, which differs between training runs."""
    return STEP_IN_NAME.sub("", _stem(name))


def as_save(name: str) -> str:
    """Return a name as MindSpore writes it, of one that keeps the best: ``PREFIX_EPOCH_STEP``.

    Examples
    --------
    >>> as_save("net_3_300.ckpt"), as_save("net-3_300.ckpt"), as_save("best.ckpt")
    ('net-3_300.ckpt', 'net-3_300.ckpt', 'best.ckpt')
    """
    return name if step_of(name) is not None else _OF_BEST.sub(r"\1-\2_\3\4", name)


def base_of(name: str) -> str:
    """Return the part of a name before counter and step; a rank's number may look like a counter.

    Examples
    --------
    >>> base_of("net_rank_3_1-10_2.ckpt"), base_of("net_3.ckpt")
    ('net_rank_3', 'net_3')
    """
    return run_of(name) if step_of(name) is None else _COUNTER.sub("", run_of(name))


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name  # of thousands of names: `Path` is too slow


def label_of(name: str) -> str | None:
    """Return the step in a name as people write it, or None."""
    step = step_of(name)
    return None if step is None else step.label


def is_step(step: Step | None, wanted: str) -> bool:
    """Return whether a text means a step: as in names (``10_2``), or by one of its numbers.

    Examples
    --------
    >>> step = Step(10, 2, False)
    >>> is_step(step, "10_2"), is_step(step, "2"), is_step(step, "10_20")
    (True, True, False)
    """
    if step is None or STEP_IN_NAME.fullmatch("-" + wanted):
        return step is not None and step_of("-" + wanted) == step
    return NUMBER.fullmatch(wanted) is not None and int(wanted) in (step.epoch, step.step)
