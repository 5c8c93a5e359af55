"""The command line as it was perhaps meant, in the user's own words.

A shell expands ``-s stages/*`` to many words and ``-s $UNSET`` to none.  Other programs take
outputs and options without a flag or with one dash, and each program has its own word for a thing.
What was typed is taken apart as click does it, and put together again with each path at the option
that it is for: all that is seen of a line is mended at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from shlex import join

import click
from msgspec import Struct, field

from ckpttool.cli.groups import WORDS, walk_commands, words_of
from ckpttool.cli.params import StrategyFile
from ckpttool.formats.local import is_folder, list_folder, list_readable, url_problem
from ckpttool.problems import CkptToolError

OPTIONS: Mapping[str, str] = {  # of other programs -> ours
    **dict.fromkeys(("-f", "-y", "--yes"), "--overwrite"),
    **dict.fromkeys(("-w", "-t", "--threads", "--workers", "--num-workers"), "-j"),
    **dict.fromkeys(("--out", "--out-dir", "--output-dir", "--save-dir", "--dst"), "-o"),
    **dict.fromkeys(("--dst-strategy-file", "--target-strategy"), "-d"),
    "--src-strategy-file": "-s",
}
EXPANDED = "the shell has expanded the pattern"
NAMED: Mapping[str, str] = {  # options of what need not be there yet, and what says so
    "-o": "The output is named with -o.",
    "--tensor": "Tensors are named with --tensor.",
}


class Line(Struct):
    """What was typed: all words, and which of them are paths and values of options.

    Attributes
    ----------
    words
        The words, of which some have been put right.
    paths, values
        Where paths stand, and the values of options.
    given
        The options that were typed.
    renamed
        The names that no option has, as typed, and the right ones.
    lost
        The options whose value is not there.
    dropped
        Where words stand that are left out.
    """

    words: list[str]
    paths: list[int] = []
    values: dict[int, click.Option] = {}
    given: list[click.Option] = []
    renamed: dict[str, str] = {}
    lost: list[click.Option] = []
    dropped: set[int] = field(default_factory=set)

    def has(self, flag: str) -> bool:
        """Return whether an option was typed."""
        return any(flag in one.opts for one in self.given)


def typed_words(ctx: click.Context) -> list[str]:
    """Return the words behind the name of the program; none outside of a run."""
    return list(ctx.meta.get(WORDS, ()))


def command_line(words: Iterable[str]) -> str:
    """Return a command line as a shell reads it."""
    return f"ckpttool {join(words)}"


def replaced(ctx: click.Context, old: Collection[str], new: str | None) -> str:
    """Return the command line with an option in place of others.

    Their values are paths without an option if ``new`` is empty, and left out if it is None.  If no
    ``old`` is a word of its own, as in ``-qf``, return ``new`` alone.
    """
    words, changed = typed_words(ctx), list[str]()
    is_value = False
    for word in words:
        name, is_joined, value = word.partition("=")
        if is_value:
            is_value = False
        elif name not in old:
            changed.append(word)
        elif new is None:
            is_value = not is_joined
        elif is_joined and new.startswith("--"):
            changed.append(f"{new}={value}")
        else:
            changed += [new] * bool(new) + [value] * bool(is_joined)
    return _mended(ctx, changed) if changed != words else new or ""


def under(ctx: click.Context, name: str) -> str:
    """Return the command line with another command in place of its own."""
    others = dict(walk_commands(ctx.find_root()))
    words = typed_words(ctx)
    at = words.index(words_of(ctx))
    return _mended(others[name], [*words[:at], name, *words[at + 1 :]])


def repeated(ctx: click.Context, flag: str, value: str, word: str) -> str:
    """Return the command line with the option before a second value, too."""
    words = typed_words(ctx)
    at = next(i for i in range(len(words)) if words[i : i + 3] == [flag, value, word])
    return command_line([*words[: at + 2], flag, *words[at + 2 :]])


def take_apart(ctx: click.Context, words: Sequence[str] = ()) -> Line:
    """Return what was typed, or other words, as click's parser takes them.

    Names that no option has are put right: those of other programs, and one dash in place of two,
    where ``-src-strategy`` would be ``-s rc-strategy``.  A path that begins with a dash gets its
    folder.  A value that is not there gets the word for it.
    """
    line = Line([*(words or typed_words(ctx))])
    options = {name: one for one in _options(ctx) for name in one.opts}
    at = _behind_names(ctx, line.words)
    while at < len(line.words):
        word = line.words[at]
        if word == "--":
            line.paths += range(at + 1, len(line.words))
            break
        name, is_joined, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            line.paths.append(at)
        elif name not in options and (right := _right_name(name, options)):
            line.renamed[name] = right
            is_parted = is_joined and len(right) == 2
            line.words[at : at + 1] = [right, value] if is_parted else [right + word[len(name) :]]
            continue
        elif name not in options and os.path.lexists(word):
            line.words[at] = line.renamed[word] = f"./{word}"
            continue
        else:
            at = _take_option(line, at, options)
        at += 1
    return line


def place_of(option: click.Parameter) -> str:
    """Return what stands for the value of an option: an example, or the word of ``--help``."""
    return getattr(option.type, "example", option.metavar or option.type.name.upper())


def as_meant(
    ctx: click.Context,
    words: Sequence[str] = (),
    most: int | None = None,
    *,
    completes: bool = False,
) -> tuple[str, str]:
    """Return the command line with paths at their options, and why; ("", "") if nothing shows it.

    A strategy belongs to the option before it, from which the shell has parted it, or else to the
    first that takes strategies and was not typed.  A path that is not there is the output if -o was
    not typed, or the name of a tensor.  Ranks and files of a checkpoint are the checkpoint.

    Parameters
    ----------
    ctx
        The context of the command.
    words
        The words behind the name of the program; those that were typed by default.
    most
        Largest number of paths; that of the arguments by default.
    completes
        Whether options that are required and missing are enough for an answer.
    """
    line = take_apart(ctx, words)
    wanted = [one for one in ctx.command.params if isinstance(one, click.Argument)]
    meant, why = _place_strategies(ctx, line)
    for at, flag in _find_named(ctx, line):
        meant[at], why = flag, why or NAMED[flag]
    left = [at for at in line.paths if at not in meant]
    if most is None and all(one.nargs == 1 for one in wanted):
        most = len(wanted)
    if most is not None and len(left) > most:
        homes, of_pattern = _collapse([line.words[at] for at in left], most)
        if not homes:
            return "", ""
        for at, home in zip(left, homes, strict=False):
            line.words[at] = home
        line.dropped, why = {*left[len(homes) :]}, why or of_pattern
    elif homes := expanded([line.words[at] for at in left]) if most is None else []:
        for at, home in zip(left, homes, strict=False):
            line.words[at] = home
        line.dropped, why = {*left[len(homes) :]}, why or EXPANDED
    takes_both = any(isinstance(one.type, StrategyFile) for one in wanted[1:])
    is_mended = len(left) > 1 and takes_both and _order_source_first(line, left)
    missing = [
        one
        for one in _options(ctx)
        if one.required and not line.has(one.opts[0]) and one.opts[0] not in meant.values()
    ]
    is_mended |= bool(meant or line.dropped or line.lost or line.renamed)
    least = sum(one.required for one in wanted)
    if len(left) - len(line.dropped) < least or not (is_mended or (missing and completes)):
        return "", ""
    rest = (word for one in reversed(missing) for word in (one.opts[0], place_of(one)))
    return command_line([*_put_together(line, meant), *rest]), why


def expanded(paths: Sequence[str]) -> list[str]:
    """Return the checkpoints of which some folders are the ranks; none if no folder is one."""
    homes = [_checkpoint_of(path) if is_folder(path) else path for path in paths]
    return [*dict.fromkeys(homes)] if homes != [*paths] else []


def _mended(ctx: click.Context, words: Sequence[str]) -> str:
    """Return other words than those that were typed, with all that is seen of them mended."""
    return as_meant(ctx, words, completes=True)[0] or command_line(words)


def _options(ctx: click.Context) -> list[click.Option]:
    return [one for one in ctx.command.get_params(ctx) if isinstance(one, click.Option)]


def _behind_names(ctx: click.Context, words: Sequence[str]) -> int:
    """Return where the words of a command begin, behind its name and that of its group."""
    at = 0
    for name in ctx.command_path.removeprefix(ctx.find_root().command_path).split():
        at = words.index(name, at) + 1 if name in words[at:] else len(words)
    return at


def _right_name(name: str, options: Collection[str]) -> str:
    """Return the option that a name without one stands for; "" if nothing shows it.

    The beginning of a name is enough behind one dash, ``-out``, unless there is a file of the rest.
    """
    if (usual := OPTIONS.get(name, "")) in options:
        return usual
    if name.startswith("--") or len(name) < 3:
        return ""
    meant = [one for one in options if one.startswith(f"-{name}")]
    if f"-{name}" in meant:
        return f"-{name}"
    return meant[0] if len(name) > 3 and len(meant) == 1 and not os.path.lexists(name[2:]) else ""


def _take_option(line: Line, at: int, options: Mapping[str, click.Option]) -> int:
    """Take the option at a place, and its value; return the place of the last word of it."""
    word = line.words[at]
    name = word.partition("=")[0]
    letters = [name] if word.startswith("--") else [f"-{letter}" for letter in word[1:]]
    for number, letter in enumerate(letters, 1):
        one = options.get(letter)
        line.given += [] if one is None else [one]
        if one is not None and not one.is_flag and not one.count:
            if number == len(letters) and name == word:
                at += 1
                line.values[at] = one
                if at == len(line.words) or line.words[at].partition("=")[0] in options:
                    line.words.insert(at, place_of(one))
                    line.lost.append(one)
            break
    return at


def _place_strategies(ctx: click.Context, line: Line) -> tuple[dict[int, str], str]:
    """Return the option of each strategy among the paths, and whether the shell has parted any."""
    takers = [one.opts[0] for one in _options(ctx) if isinstance(one.type, StrategyFile)]
    found = [at for at in line.paths if takers and _is_strategy(line.words[at])]
    untyped = [flag for flag in takers if not line.has(flag)]
    meant: dict[int, str] = {}
    groups: list[list[int]] = []
    why = ""
    for _, row in groupby(enumerate(found), lambda one: one[1] - one[0]):
        rest = [at for _, at in row]
        before = line.values.get(rest[0] - 1)
        if before is not None and (flag := before.opts[0]) in takers:
            together = [rest[0] - 1, *rest]
            number = len(_of_one(line, together)) - 1 if untyped else len(rest)
            meant |= dict.fromkeys(rest[:number], flag)
            why, rest = f"{EXPANDED} behind {flag}" if number else why, rest[number:]
        while rest:
            groups.append(_of_one(line, rest))
            rest = rest[len(groups[-1]) :]
    for number, group in enumerate(groups if untyped else []):
        meant |= dict.fromkeys(group, untyped[min(number, len(untyped) - 1)])
    return meant, why


def _of_one(line: Line, places: Sequence[int]) -> list[int]:
    """Return the first strategies of a row that make one strategy: the first, or all its stages."""
    from ckpttool.strategy_files.reader import read_strategy

    folder = Path(line.words[places[0]]).parent
    near = sum(Path(line.words[at]).parent == folder for at in places)
    for number in sorted({len(places), len(places) - 1, near} - {0, 1}, reverse=True):
        try:
            read_strategy([line.words[at] for at in places[:number]])
        except (CkptToolError, OSError):
            continue
        return [*places[:number]]
    return [places[0]]


def _is_strategy(path: str) -> bool:
    from ckpttool.operations.inspect import are_strategies

    return os.path.lexists(path) and are_strategies([path])


def _find_named(ctx: click.Context, line: Line) -> Iterator[tuple[int, str]]:
    """Yield where the output or a tensor stands without its option, and that option.

    It is the last path, if it alone is not there.
    """
    known = {name for one in _options(ctx) for name in one.opts}
    flag = next((flag for flag in NAMED if flag in known), "")
    if flag and not line.has(flag):
        absent = [at for at in line.paths if _is_absent(ctx, line.words[at])]
        if len(absent) == 1 and absent == line.paths[-1:]:
            yield absent[0], flag


def _is_absent(ctx: click.Context, path: str) -> bool:
    """Return whether a path is not there, or empty, and no argument of the command takes it."""
    if path == "-" or url_problem(path) is not None:
        return False
    if os.path.lexists(path):
        return is_folder(path) and not list_folder(path)
    for one in ctx.command.params:
        if isinstance(one, click.Argument) and one.nargs != 1:
            try:
                one.type.convert(path, one, ctx)
            except click.UsageError:
                continue
            return False
    return True


def _order_source_first(line: Line, places: Sequence[int]) -> bool:
    """Put the one path that is no strategy before the others; return whether it was not there."""
    sources = [at for at in places if not _is_strategy(line.words[at])]
    if len(sources) != 1 or sources[0] == places[0]:
        return False
    words = [line.words[at] for at in (*sources, *(at for at in places if at not in sources))]
    for at, word in zip(places, words, strict=True):
        line.words[at] = word
    return True


def _put_together(line: Line, meant: Mapping[int, str]) -> Iterator[str]:
    """Yield the words with each path at its option; all paths of a folder are the folder."""
    words, dropped = dict(enumerate(line.words)), {*line.dropped}
    for flag in {*meant.values()} - {"-o"}:
        group = sorted(at for at, of in meant.items() if of == flag)
        if flag in getattr(line.values.get(group[0] - 1), "opts", ()):
            group.insert(0, group[0] - 1)
        if folder := folder_of([words[at] for at in group]):
            words[group[0]] = folder
            dropped |= {*group[1:]}
    for at, word in words.items():
        if at not in dropped:
            yield from (meant[at], word) if at in meant else (word,)


def _collapse(paths: Sequence[str], most: int) -> tuple[Sequence[str], str]:
    """Return the checkpoints of which the paths are ranks and files, ``most`` of them, and why.

    Several checkpoints of a folder are a choice; the first ones stand for it.
    """
    homes = [*dict.fromkeys(map(_checkpoint_of, paths))]
    folders = {str(Path(path).parent) for path in paths}
    if len(homes) <= most:
        return homes, EXPANDED if len({*paths}) == len(paths) else ""
    if homes == [*paths] and len(folders) == 1 and all(map(is_folder, paths)):
        if any(map(_is_checkpoint, paths)):
            return homes[:most], f"{EXPANDED}; each is a checkpoint"
        return [*folders], EXPANDED
    return (), ""


def _checkpoint_of(path: str) -> str:
    """Return the checkpoint of which a path is a rank or a file; the path if it is one itself."""
    if is_folder(path) and _is_checkpoint(path):
        return path
    above = [str(one) for one in Path(path).parents[:2]]
    return next(filter(_is_checkpoint, above), path)


def _is_checkpoint(folder: str) -> bool:
    """Return whether there is one checkpoint in a folder, by the names of its files."""
    from ckpttool.discovery.scan import SourceOptions, find

    try:
        find(folder, SourceOptions())
    except (CkptToolError, OSError):
        return False
    return True


def folder_of(paths: Sequence[str]) -> str:
    """Return the folder of which several paths are all; "" if they are not."""
    folder = Path(paths[0]).parent if len(paths) > 1 else Path()
    return str(folder) if folder.name and {*map(Path, paths)} == {*list_readable(folder)} else ""
