"""Numbers, shapes, ranks and names, written for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, product, zip_longest
from typing import TypeVar

from ckpttool.lazy import compile_late

K = TypeVar("K", bound=Hashable)

LEAST_IN_STRIDE = 4  # numbers that are written as a range with a step


def format_ranks(ranks: Sequence[int], word: str = "rank", most: int | None = None) -> str:
    """Format numbers of ranks, or of what ``word`` names, like `format_numbers`.

    Examples
    --------
    >>> format_ranks([0])
    'rank 0'
    >>> format_ranks([0, 3, 4, 5, 7])
    'ranks 0, 3-5, 7'
    >>> format_ranks(range(0, 64, 2))
    'ranks 0-62/2'
    """
    return f"{word}{'s' if len(ranks) > 1 else ''} {format_numbers(ranks, most)}"


def format_numbers(numbers: Iterable[int], most: int | None = None, separator: str = ", ") -> str:
    """Format distinct numbers with ranges: the first ``most``, and the number of other numbers.

    ``0-62/2`` has every second number.  A single other number is written, too.

    Examples
    --------
    >>> format_numbers([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7, 8'
    >>> format_numbers([0, 3, 4, 5, 7, 8], most=2)
    '0, 3-5 and 2 more'
    >>> format_numbers([0, 3, 4, 5, 7], most=2)
    '0, 3-5, 7'
    >>> format_numbers([0, 1, 2, 4, 6, 8, 10, 13])
    '0-2, 4-10/2, 13'
    """
    ranges = _join_strides(find_runs(numbers))
    more = 0 if most is None else sum(map(len, ranges[most:]))
    shown = ranges[:most] if more > 1 else ranges
    texts = (
        f"{run[0]}-{run[-1]}{f'/{run.step}' if run.step > 1 else ''}"
        if len(run) > 2
        else separator.join(map(str, run))
        for run in shown
    )
    return separator.join(texts) + (f" and {more} more" if more > 1 else "")


def _join_strides(runs: Sequence[range]) -> list[range]:
    """Join single numbers at equal distances to ranges, if there are enough of them."""
    joined: list[range] = []
    at = 0
    while at < len(runs):
        end, is_single = at + 1, len(runs[at]) == 1
        step = runs[end].start - runs[at].start if end < len(runs) else 0
        while is_single and end < len(runs) and len(runs[end]) == 1:
            if runs[end].start - runs[end - 1].start != step:
                break
            end += 1
        if end - at >= LEAST_IN_STRIDE:
            joined.append(range(runs[at].start, runs[end - 1].stop, step))
        else:
            end = at + 1
            joined.append(runs[at])
        at = end
    return joined


def find_runs(numbers: Iterable[int]) -> list[range]:
    """Return distinct numbers as ranges without a gap, as few as possible.

    Examples
    --------
    >>> find_runs([0, 1, 2, 5, 7, 8])
    [range(0, 3), range(5, 6), range(7, 9)]
    """
    runs: list[range] = []
    for number in sorted(set(numbers)):
        start = runs.pop().start if runs and runs[-1].stop == number else number
        runs.append(range(start, number + 1))
    return runs


def parse_numbers(value: str) -> tuple[int, ...]:
    """Return the numbers that a text lists, ascending and unique, as `format_numbers` writes them.

    Raises
    ------
    ValueError
        A part of the text is neither a number of up to 7 digits nor a range; the error quotes it.

    Examples
    --------
    >>> parse_numbers("7,0-2,10-14/2")
    (0, 1, 2, 7, 10, 12, 14)
    """
    numbers: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7})(?:/([1-9]\d{0,6}))?)?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(repr(part))
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1)))
    return tuple(sorted(numbers))


def format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Format groups of ranks: the first four, and the number of the others.

    Examples
    --------
    >>> format_groups([[0, 1, 4], [2]])
    'ranks 0, 1, 4 | rank 2'
    """
    more = f" | {len(groups) - 4} more" if len(groups) > 4 else ""
    return " | ".join(map(format_ranks, groups[:4])) + more


def format_difference(groups: Sequence[Sequence[int]]) -> str:
    """Say which ranks differ, in groups of equal ranks; the smaller of two groups comes first.

    Examples
    --------
    >>> format_difference([[3, 6, 7], [2]]), format_difference([[0], [1], [2]])
    ('rank 2 differs from ranks 3, 6, 7', 'ranks 0-2 all differ')
    >>> format_difference([[0, 3], [1, 4], [2]])
    'ranks 0, 3 | ranks 1, 4 | rank 2 differ from each other'
    """
    if len(groups) == 2:
        few, many = sorted(groups, key=len)
        return f"{format_ranks(few)} differ{'s' if len(few) == 1 else ''} from {format_ranks(many)}"
    if len(groups) > 2 and all(len(ranks) == 1 for ranks in groups):
        return f"{format_ranks([rank for (rank,) in groups], most=4)} all differ"
    return format_groups(groups) + (" differ from each other" if len(groups) > 2 else "")


_SINGULAR = {"are": "is", "were": "was", "have": "has", "": ""}  # of verbs; others end with an s


def count(number: int, noun: str, verb: str = "") -> str:
    """Return a number and its noun, and the verb in the form that goes with it.

    Examples
    --------
    >>> count(1, "parameter"), count(2, "parameter", "are"), count(1, "parameter", "differ")
    ('1 parameter', '2 parameters are', '1 parameter differs')
    """
    if number == 1:
        verb = _SINGULAR.get(verb, f"{verb}s")
    return f"{number} {noun}{'' if number == 1 else 's'} {verb}".rstrip()


def any_of(words: Iterable[str]) -> str:
    """Return words as alternatives in a sentence.

    Examples
    --------
    >>> any_of([".h5", ".ckpt", ".safetensors"])
    '.h5, .ckpt or .safetensors'
    """
    *rest, last = words
    return " or ".join(filter(None, (", ".join(rest), last)))


def shorten(names: Iterable[str], most: int = 5) -> str:
    """Return a list of names for a message: the first ``most``, and the number of the others.

    Examples
    --------
    >>> shorten("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    all_names = list(names)
    more = f" and {len(all_names) - most} more" if len(all_names) > most else ""
    return ", ".join(all_names[:most]) + more


MAX_NUMBERS = 8  # of a name that are numbers of layers
MOST_RANGES = 8  # of numbers, in one place of a pattern
# The number of a layer; what is longer, or has leading zeros, is a part of the name.
NUMBER = compile_late(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")


def fold_names(kinds: Mapping[str, K]) -> Iterator[tuple[str, K]]:
    """Yield the names that differ only in their numbers, and are of one kind, as one name each.

    Examples
    --------
    >>> list(fold_names({"layers.0.w": "a", "layers.1.w": "a", "head": "a"}))
    [('layers.{0,1}.w', 'a'), ('head', 'a')]
    """
    for folded, names in fold_members(kinds):
        yield folded, kinds[names[0]]


def fold_members(
    kinds: Mapping[str, K], most: int | None = None
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the names as `fold_names` does, each with the names that it stands for.

    ``most`` is that of `format_numbers`, in each place.
    """
    alike: dict[tuple[str, K], dict[tuple[int, ...], str]] = {}
    for name, kind in kinds.items():
        numbers = tuple(map(int, NUMBER.findall(name)[:MAX_NUMBERS]))
        alike.setdefault((NUMBER.sub("#", name, MAX_NUMBERS), kind), {})[numbers] = name
    for names in alike.values():
        for ways in factor(names):
            members = [names[numbers] for numbers in product(*ways)]
            yield join_numbers(members[0], ways, most), members


def shorten_folded(names: Iterable[str], most: int) -> str:
    """Return names for a message: the first ``most`` as folded, and the number of other names.

    Examples
    --------
    >>> shorten_folded(["l.0.w", "l.1.w", "a", "l.0.b", "l.1.b"], 2)
    'l.{0,1}.w, a and 2 more'
    """
    folded = [*fold_members(dict.fromkeys(names, ""))]
    more = sum(len(members) for _, members in folded[most:])
    return ", ".join(name for name, _ in folded[:most]) + (f" and {more} more" if more else "")


def fold_subtrees(names: Collection[str], among: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield names as patterns, and how many of them each stands for.

    ``prefix.*`` stands for all names of ``among`` that begin so, if ``names`` has each of them.

    Examples
    --------
    >>> names = ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.2.a", "head"]
    >>> list(fold_subtrees(names[:5], [*names, "layers.2.b"]))
    [('layers.{0,1}.*', 4), ('layers.2.a', 1)]
    """
    if not names:
        return
    has, all_of = (Counter(chain.from_iterable(map(_prefixes, each))) for each in (names, among))
    members = Counter(
        next((f"{p}.*" for p in _prefixes(name) if 1 < has[p] == all_of[p]), name) for name in names
    )
    for folded, patterns in fold_members(dict.fromkeys(members, ""), MOST_RANGES):
        yield folded, sum(members[pattern] for pattern in patterns)


def _prefixes(name: str) -> Iterator[str]:
    return accumulate(name.split(".")[:-1], "{}.{}".format)


def join_numbers(name: str, ways: Sequence[tuple[int, ...]], most: int | None = None) -> str:
    """Return a name with the numbers of ``ways`` in the places of its own, ``most`` in each."""
    shown = (format_numbers(numbers, most, ",") for numbers in ways)
    texts = [numbers if numbers.isdigit() else f"{{{numbers}}}" for numbers in shown]
    between = NUMBER.split(name, MAX_NUMBERS)
    return "".join(chain(*zip_longest(between, texts, fillvalue="")))


def factor(tuples: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Write a set of tuples as products of sets, in the order of their first tuples.

    Examples
    --------
    >>> factor([(0, 0), (0, 1), (1, 0), (1, 1), (2, 5)])
    [((0, 1), (0, 1)), ((2,), (5,))]
    """
    tuples = list(tuples)
    if not tuples[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for head, *rest in tuples:
        rests.setdefault(head, []).append(tuple(rest))
    heads: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for head, tails in rests.items():
        heads.setdefault(frozenset(tails), []).append(head)
    return [
        (tuple(values), *ways) for values in heads.values() for ways in factor(rests[values[0]])
    ]


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes for people.

    Examples
    --------
    >>> format_bytes(999), format_bytes(5 * 1024**3 // 2)
    ('999 B', '2.5 GiB')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_number(number: int) -> str:
    """Format a large number for people, in thousands, millions and so on.

    Examples
    --------
    >>> format_number(999), format_number(10_400), format_number(7_240_000_000)
    ('999', '10.4 K', '7.2 B')
    """
    size = float(number)
    for unit in ("", "K", "M", "B"):
        if size < 999.95:
            return f"{size:.1f} {unit}" if unit else str(number)
        size /= 1000
    return f"{size:.1f} T"


_LONGEST_WORD = 1024  # no terminal has room for more


def printable(message: str) -> str:
    r"""Return a text with unprintable characters spelled out, such as escape sequences.

    Cut the middle out of words of more than a thousand letters: names in a file may be that long.

    Examples
    --------
    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    >>> printable("b\udcff.ckpt")  # a byte of a path that is not UTF-8
    'b\\xff.ckpt'
    >>> len(printable(65536 * "x" + ": no such tensor"))
    633
    """
    if len(message) > _LONGEST_WORD:
        message = re.sub(rf"\S{{{_LONGEST_WORD},}}", _shorten_word, message)
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else _spell(c) for c in message)


def encodable(message: str) -> str:
    r"""Return a text with characters that UTF-8 cannot encode spelled out, as by `printable`.

    Examples
    --------
    >>> encodable("b\udcff.ckpt")
    'b\\xff.ckpt'
    """
    return re.sub("[\ud800-\udfff]", lambda match: _spell(match[0]), message)


def _spell(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # a byte that is not UTF-8, as Python decodes it
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return ascii(letter)[1:-1]


def _shorten_word(match: re.Match[str]) -> str:
    word = match[0]
    return f"{word[:400]}...({len(word) - 600} more)...{word[-200:]}"


def format_shape(sizes: Sequence[int]) -> str:
    """Format sizes, or an index, for people."""
    return f"({', '.join(map(str, sizes))})"


def format_sizes(*shapes: Sequence[int]) -> str:
    """Format shapes as one for a table, with the smallest and the largest size of each axis.

    Examples
    --------
    >>> format_sizes((16, 8)), format_sizes((6, 8), (10, 8)), format_sizes(())
    ('16 x 8', '6-10 x 8', 'scalar')
    """
    sizes = [sorted({min(axis), max(axis)}) for axis in zip(*shapes, strict=True)]
    return " x ".join("-".join(map(str, axis)) for axis in sizes) or "scalar"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name that was perhaps meant, or an empty text.

    Examples
    --------
    >>> nearest("s.ckpt", ["C", "S.ckpt", "m.ckpt"]), nearest("bogus", ["verbose"])
    ('S.ckpt', '')
    """
    from difflib import get_close_matches

    by_word = {name.lower().lstrip("-"): name for name in names}
    near = get_close_matches(name.lower().lstrip("-"), by_word, 1, 0.65)
    return by_word[near[0]] if near else ""


MAX_BRIEF_ROWS = 20  # of a table in a notebook, or of what `print` shows

_OTHER_BYTE = compile_late("[\udc80-\udcff]")  # in a path, a byte that is not UTF-8


def as_typed(value: str) -> str:
    r"""Return a command line whose paths that are not UTF-8 are written as shells read them.

    Examples
    --------
    >>> print(as_typed("'a b\udce4/c' as SRC, or -s d"))
    $'a b\xe4/c' as SRC, or -s d
    """
    if not _OTHER_BYTE.search(value):
        return value
    return re.sub(r"'[^']*'|[^\s'`,;]+", _spell_bytes, value)


def _spell_bytes(word: re.Match[str]) -> str:
    if not _OTHER_BYTE.search(word[0]):
        return word[0]
    spelled = word[0].strip("'").replace("\\", r"\\")
    return "$'" + _OTHER_BYTE.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", spelled) + "'"


class Brief:
    """A record of much, whose ``repr`` is one line; `print` and a notebook show its rows."""

    __slots__ = ()

    def _texts(self) -> Iterable[str]:
        raise NotImplementedError

    def _rows(self) -> Iterable[Sequence[str]]:
        return ()

    def _remarks(self) -> Iterable[str]:
        return ()

    def _shown(self) -> tuple[list[Sequence[str]], str]:
        """Return the head and the first rows, and how many there are more."""
        rows = [*self._rows()]
        rows = rows if rows[1:] else []  # the head alone says nothing
        more = len(rows) - 1 - MAX_BRIEF_ROWS
        return rows[: 1 + MAX_BRIEF_ROWS], f"{more} more" if more > 0 else ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(filter(None, self._texts()))}>"

    def __str__(self) -> str:
        rows, more = self._shown()
        widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
        indent = "\n" + " " * sum(width + 3 for width in widths)
        table = []
        for *cells, last in rows:  # the last may have several lines
            begin = map(str.ljust, map(printable, cells), widths)
            lines = map(printable, last.split("\n"))
            table.append("   ".join((*begin, indent.join(lines))).rstrip())
        lead = ", ".join(filter(None, self._texts()))
        return "\n".join(filter(None, (lead, *table, more, *self._remarks())))

    def _repr_html_(self) -> str:
        from html import escape  # late, since `ckpttool --help` needs none

        rows, more = self._shown()
        style = "text-align:left;white-space:pre-wrap"
        styles = style, f"{style};font-family:monospace"  # several lines may be columns of numbers
        cells = [
            "".join(
                f"<{tag} style='{styles[len(cell.splitlines()) > 1]}'>{escape(cell)}</{tag}>"
                for cell in row
            )
            for tag, row in zip(("th", *["td"] * len(rows)), rows, strict=False)
        ]
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        table = f"<table>{table}</table>" if rows else ""
        below = "\n".join(filter(None, (more, *self._remarks())))
        below = f"<div style='white-space:pre-wrap'>{escape(below)}</div>" if below else ""
        return f"<div>{escape(repr(self))}</div>{table}{below}"
