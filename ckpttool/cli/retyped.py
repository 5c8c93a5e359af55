"""The command line as it was perhaps meant, in the user's own words.

A shell expands ``-s stages/*`` to many words, other programs take outputs and options without a
flag or with one dash, and each program has its own word for a thing.  What was typed is taken apart
as click does it, and put together again with each path at the option that it is for.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join

import click

from ckpttool.cli.groups import WORDS
from ckpttool.formats.local import url_problem

OPTIONS: Mapping[str, str] = {  # of other programs -> ours
    **dict.fromkeys(("-f", "-y", "--yes"), "--overwrite"),
    **dict.fromkeys(("-w", "-t", "--threads", "--workers", "--num-workers"), "-j"),
    **dict.fromkeys(("--out", "--out-dir", "--output-dir", "--save-dir", "--dst"), "-o"),
    **dict.fromkeys(("--dst-strategy-file", "--target-strategy"), "-d"),
    "--src-strategy-file": "-s",
}
_OUTPUT = "The output is named with -o."


@dataclass
class _Line:
    """What was typed: all words, and which of them are paths, options, and values of options."""

    words: list[str]
    paths: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)
    values: dict[int, click.Option] = field(default_factory=dict)
    given: list[click.Option] = field(default_factory=list)
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


def replaced(ctx: click.Context, old: Collection[str], new: str) -> str:
    """Return the command line with an option in place of others; without these if it is empty.

    If no ``old`` is a word of its own, as in ``-qf``, return ``new`` alone.
    """
    words, changed = typed_words(ctx), list[str]()
    for word in words:
        name, is_joined, value = word.partition("=")
        if name not in old:
            changed.append(word)
        elif is_joined and new.startswith("--"):
            changed.append(f"{new}={value}")
        else:
            changed += [new] * bool(new) + [value] * bool(is_joined)
    return command_line(changed) if changed != words else new


def repeated(ctx: click.Context, flag: str, value: str, word: str) -> str:
    """Return the command line with the option before a second value, too."""
    words = typed_words(ctx)
    at = next(i for i in range(len(words)) if words[i : i + 3] == [flag, value, word])
    return command_line([*words[: at + 2], flag, *words[at + 2 :]])


def find_single_dash(ctx: click.Context) -> tuple[str, str] | None:
    """Return an option with one dash in place of two, and the right name; None without one.

    ``-src-strategy`` would be ``-s rc-strategy``.  The beginning of a name is enough, ``-out``,
    unless there is a file of the rest.
    """
    line = _take_apart(ctx)
    names = [name for one in _options(ctx) for name in one.opts if name.startswith("--")]
    for at in line.options:
        word = line.words[at].partition("=")[0]
        meant = [name for name in names if name.startswith(f"-{word}")]
        is_whole = f"-{word}" in meant
        is_begun = len(word) > 3 and len(meant) == 1 and not os.path.lexists(word[2:])
        if not word.startswith("--") and len(word) > 2 and (is_whole or is_begun):
            return word, f"-{word}" if is_whole else meant[0]
    return None


def as_meant(ctx: click.Context) -> tuple[str, str]:
    """Return the command line with paths at their options, and why; ("", "") if nothing shows it.

    A strategy belongs to the option before it, from which the shell has parted it, or else to -s
    and -d if these were not typed.  A path that does not exist is the output if -o was not typed.
    """
    line = _take_apart(ctx)
    flags = [flag for flag in ("-s", "-d", "-o") if any(flag in one.opts for one in _options(ctx))]
    wanted = [one for one in ctx.command.params if isinstance(one, click.Argument)]
    meant: dict[int, str] = {}
    takes_strategies = [flag for flag in flags if flag != "-o"]
    found = [at for at in line.paths if takes_strategies and _is_strategy(line.words[at])]
    for at in found:
        of_option = getattr(line.values.get(at - 1), "opts", ())
        parted = [flag for flag in takes_strategies if flag in of_option]
        if flag := next(iter(parted), meant.get(at - 1, "")):
            meant[at] = flag
    why = f"the shell has expanded the pattern behind {next(iter(meant.values()))}" if meant else ""
    untyped = [flag for flag in takes_strategies if not line.has(flag)]
    if (rest := [at for at in found if at not in meant]) and untyped:
        meant |= dict.fromkeys(rest, untyped[0])
        meant |= {rest[-1]: untyped[-1]} if len(rest) > 1 else {}
    last = line.paths[-1] if line.paths else -1
    absent = [at for at in line.paths if _is_absent(ctx, line.words[at])]
    if "-o" in flags and not line.has("-o") and absent == [last]:
        meant[last], why = "-o", why or _OUTPUT
    left = [at for at in line.paths if at not in meant]
    if len(left) > len(wanted) and all(one.nargs == 1 for one in wanted):
        if len(wanted) > 1 or not (folder := _common_folder([line.words[at] for at in left])):
            return "", ""
        line.words[left[0]], line.dropped = folder, {*left[1:]}
        why = why or "the shell has expanded the pattern"
    if (wanted and not left) or not (meant or line.dropped):
        return "", ""
    return command_line(_put_together(line, meant)), why


def _options(ctx: click.Context) -> list[click.Option]:
    return [one for one in ctx.command.get_params(ctx) if isinstance(one, click.Option)]


def _take_apart(ctx: click.Context) -> _Line:
    """Return what was typed, as click's parser takes it."""
    line = _Line(typed_words(ctx))
    by_name = {name: one for one in _options(ctx) for name in one.opts}
    names = ctx.command_path.removeprefix(ctx.find_root().command_path).split()
    at = 0
    for name in names:
        at = line.words.index(name, at) + 1 if name in line.words[at:] else len(line.words)
    while at < len(line.words):
        word = line.words[at]
        if word == "--":
            line.paths += range(at + 1, len(line.words))
            break
        if not word.startswith("-") or word == "-":
            line.paths.append(at)
            at += 1
            continue
        line.options.append(at)
        name, _, value = word.partition("=")
        letters = [name] if word.startswith("--") else [f"-{letter}" for letter in word[1:]]
        for number, letter in enumerate(letters, 1):
            one = by_name.get(letter)
            line.given += [] if one is None else [one]
            if one is not None and not one.is_flag and not one.count:
                if not value and number == len(letters) and "=" not in word:
                    at += 1
                    line.values[at] = one
                break
        at += 1
    return line


def _is_strategy(path: str) -> bool:
    from ckpttool.operations.inspect import are_strategies

    return os.path.lexists(path) and are_strategies([path])


def _is_absent(ctx: click.Context, path: str) -> bool:
    """Return whether a path does not exist, and no argument of the command takes it."""
    if os.path.lexists(path) or path == "-" or url_problem(path) is not None:
        return False
    for one in ctx.command.params:
        if isinstance(one, click.Argument) and one.nargs != 1:
            try:
                one.type.convert(path, one, ctx)
            except click.UsageError:
                continue
            return False
    return True


def _put_together(line: _Line, meant: Mapping[int, str]) -> Iterator[str]:
    """Yield the words with each path at its option; all paths of a folder are the folder."""
    words, dropped = dict(enumerate(line.words)), {*line.dropped}
    for flag in ("-s", "-d"):
        group = sorted(at for at, of in meant.items() if of == flag)
        if group and flag in getattr(line.values.get(group[0] - 1), "opts", ()):
            group.insert(0, group[0] - 1)
        if folder := _folder_of([words[at] for at in group]):
            words[group[0]] = folder
            dropped |= {*group[1:]}
    for at, word in words.items():
        if at not in dropped:
            yield from (meant[at], word) if at in meant else (word,)


def _common_folder(paths: Sequence[str]) -> str:
    """Return the innermost folder that all paths lie in; "" if they have none but the current."""
    first, *others = (Path(path).parents for path in paths)
    common = next((folder for folder in first if all(folder in one for one in others)), Path())
    return str(common) if common.name else ""


def _folder_of(paths: Sequence[str]) -> str:
    """Return the folder of which several paths are all; "" if they are not."""
    from ckpttool.formats.local import list_readable

    folder = Path(paths[0]).parent if len(paths) > 1 else Path()
    return str(folder) if folder.name and {*map(Path, paths)} == {*list_readable(folder)} else ""
