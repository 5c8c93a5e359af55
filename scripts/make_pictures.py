"""Draw the pictures of the documentation.

- ``reshard.svg``: which rows each rank holds, on 8 ranks and on 4;
- ``fused.svg``: what becomes of weights that each rank fused for itself;
- ``inspect.svg``: a screen of ``inspect``;
- ``layout.png``: the page of ``inspect --plot``, as Chromium shows it;
- ``speed.svg``: times from the table in ``docs/reference/performance.md``.

The screen and the ranks are what ckpttool finds in a checkpoint that is part of the repository.
``--check`` compares the words of the pictures with those in ``docs/pictures``; each version of rich
draws them in its own way.  A PNG has no words; the tests open the page itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping
from html import escape, unescape
from pathlib import Path

from rich.console import Console
from rich.text import Text

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "reshard_8_to_4"
PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 80
PARAMETER = "lm_head.weight"
STRATEGIES = ("strategy.ckpt", "new_strategy.ckpt")

GREY = "#6e7781"  # readable on white and on black
COLOURS = ("#4e79a7", "#c96a12", "#3f8a3a", "#95618a")  # of the quarters of the rows
SIZES = ("4 GiB", "8 GiB")
CASES = {"cp -r": "#9aa0a6", "merge, .ckpt": "#4e79a7", "reshard 8 -> 6, .ckpt": "#59a14f"}
WIDTH, HEIGHT = 760, 250
BOX_WIDTH, BOX_HEIGHT, GAP = 68, 72, 12
LINE = "fill='none' stroke='currentColor'"
FONT = "font-family='system-ui, sans-serif'"


def prepare(folder: Path) -> None:
    """Write the files that the commands of the pictures name."""
    shutil.copytree(GOLDEN / "src", folder / "checkpoint")
    shutil.copy(GOLDEN / "src_strategy.ckpt", folder / "strategy.ckpt")
    shutil.copy(GOLDEN / "dst_strategy.ckpt", folder / "new_strategy.ckpt")


def draw_screen(folder: Path, command: str) -> str:
    """Return what a command shows on a terminal."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 200, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-m", *command.split()]
    quiet = subprocess.DEVNULL  # notes and progress
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=its, stderr=quiet) as process:
        os.close(its)
        printed = b"".join(read_all(ours))
    os.close(ours)
    if process.returncode:
        sys.exit(printed.decode())
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text.from_ansi(printed.decode().replace("\r", "").strip("\n")))
        console.print()  # the picture ends in the middle of its last line
    svg = console.export_svg(title=command, unique_id="screen")
    return re.sub(r" *@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # from the network


def read_all(terminal: int) -> Iterator[bytes]:
    """Yield what a process writes to its terminal, until it ends."""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # EIO: nobody has the other side open
            return
        if not data:
            return
        yield data


def draw_reshard(folder: Path) -> str:
    """Return a picture: the rows of a parameter on 8 ranks, and on 4 after `reshard`."""
    old, new = (ckpttool.read_strategy([str(folder / name)]) for name in STRATEGIES)
    before = find_regions(folder / "checkpoint", old)
    ckpttool.reshard(folder / "checkpoint", old, new, folder / "new", progress=False)
    after = find_regions(folder / "new", new)
    rows = max(region.stop[0] for region in after.values())
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' color='{GREY}'>",
        f"<title>{PARAMETER} on {len(before)} ranks and on {len(after)} ranks</title>",
        *draw_ranks(20, before, rows),
        draw_text(385, 128, "reshard", size=14, anchor="middle"),
        f"<path d='M350 142 h66 m-9 -6 l9 6 l-9 6' {LINE} stroke-width='2'/>",
        *draw_ranks(440, after, rows),
        "</svg>\n",
    ]
    return "\n".join(parts)


def find_regions(folder: Path, strategy: Strategy) -> dict[int, Region]:
    """Return which elements of the parameter each rank holds."""
    catalog = ckpttool.scan(str(folder))
    tensors = ckpttool.resolve(catalog, strategy).tensors
    (tensor,) = (one for one in tensors if one.name == PARAMETER)
    return {rank: tensor.slicing.bounds(rank) for rank in sorted(catalog.files)}


def draw_ranks(left: int, regions: Mapping[int, Region], rows: int) -> Iterator[str]:
    """Yield a box for each rank, four in a row, with the rows of the parameter that it holds."""
    yield draw_text(left, 26, f"{PARAMETER} on {len(regions)} ranks", size=15, weight=600)
    for rank, region in regions.items():
        x = left + rank % 4 * (BOX_WIDTH + GAP)
        y = 62 + rank // 4 * (BOX_HEIGHT + 26)
        yield draw_text(x, y - 6, f"rank {rank}")
        for number, colour in enumerate(COLOURS):
            start, stop = (rows * one // len(COLOURS) for one in (number, number + 1))
            is_held = region.start[0] <= start and stop <= region.stop[0]
            band = BOX_HEIGHT // len(COLOURS)
            fill = colour if is_held else "none"
            yield (
                f"<rect x='{x}' y='{y + number * band}' width='{BOX_WIDTH}' height='{band}' "
                f"fill='{fill}' stroke='currentColor' stroke-opacity='0.35'/>"
            )
            if is_held:
                middle = x + BOX_WIDTH // 2
                words = f"{start}-{stop - 1}"
                yield draw_text(middle, y + number * band + 13, words, 11, "middle", colour="white")


def shoot_layout(folder: Path) -> bytes:
    """Return a PNG of the page that ``inspect --plot`` writes."""
    words = ["inspect", "checkpoint/", "-s", "strategy.ckpt", "--plot", "layout.html", "-q"]
    subprocess.run([sys.executable, "-m", "ckpttool", *words], cwd=folder, check=True)
    look = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1180,760"]
    command = ["chromium", *look, "--screenshot=layout.png", f"file://{folder}/layout.html"]
    subprocess.run(command, cwd=folder, check=True, timeout=120, stderr=subprocess.DEVNULL)
    return (folder / "layout.png").read_bytes()


def draw_fused() -> str:
    """Return a picture: the rows of gate and up that two ranks fused, and four ranks get."""
    quarters = len(COLOURS)
    gate, up = ([f"{name} {n}" for n in range(quarters)] for name in ("gate", "up"))
    fused = {
        ranks: [
            [
                part[n]
                for part in (gate, up)
                for n in range(quarters)
                if n * ranks // quarters == rank
            ]
            for rank in range(ranks)
        ]
        for ranks in (2, quarters)
    }
    joined = [row for held in fused[2] for row in held]
    new = Layout((quarters,), ((0,),))
    regions = [new.region(rank, (len(joined),)) for rank in new.ranks]
    cut = [joined[region.start[0] : region.stop[0]] for region in regions]
    columns = {"fused by two ranks": fused[2], "joined, cut in four": cut}
    columns["what four ranks need"] = fused[quarters]
    parts = []
    left = 20
    for title, ranks in columns.items():
        parts.append(draw_text(left, 24, title, size=14, weight=600))
        for rank, rows in enumerate(ranks):
            x = left + rank * 58
            parts.append(draw_text(x, 48, f"rank {rank}"))
            for at, row in enumerate(rows):
                colour = COLOURS[0] if row in gate else COLOURS[1]
                box = f"x='{x}' y='{54 + 24 * at}' width='52' height='24'"
                parts.append(f"<rect {box} fill='{colour}' stroke='white'/>")
                parts.append(draw_text(x + 26, 70 + 24 * at, row, 11, "middle", colour="white"))
        left += max(58 * len(ranks), 9 * len(title)) + 36
    view = f"viewBox='0 0 {left} 164' color='{GREY}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {view}>"
    return "\n".join([head, "<title>Weights that each rank fused</title>", *parts, "</svg>\n"])


def draw_speed() -> str:
    """Return the picture of the times that the page about performance lists."""
    page = (ROOT / "docs" / "reference" / "performance.md").read_text(encoding="utf-8")
    table = [line.strip("| \n").split(" | ") for line in page.splitlines() if line.startswith("|")]
    sizes = next(row for row in table if SIZES[0] in row)
    parts = []
    y = 20
    for size in SIZES:
        parts.append(draw_text(20, y, size, size=14, weight=600))
        column = sizes.index(size) + 1  # the first cell of the heading is empty
        for case, colour in CASES.items():
            cells = next(row for row in table[table.index(sizes) :] if row[0] == case)
            seconds = float(cells[column].split()[0])
            y += 22
            width = round(seconds * 20)
            parts += [
                draw_text(150, y + 4, case, anchor="end"),
                f"<rect x='160' y='{y - 7}' width='{width}' height='14' fill='{colour}'/>",
                draw_text(166 + width, y + 4, f"{seconds:.1f} s"),
            ]
        y += 36
    view = f"viewBox='0 0 620 {y - 20}' color='{GREY}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {view}>"
    return "\n".join([head, "<title>Seconds beside cp -r</title>", *parts, "</svg>\n"])


def draw_text(
    x: int,
    y: int,
    text: str,
    size: int = 12,
    anchor: str = "start",
    weight: int = 400,
    colour: str = "currentColor",
) -> str:
    """Return a line of text."""
    place = f"x='{x}' y='{y}' text-anchor='{anchor}'"
    return (
        f"<text {place} font-size='{size}' font-weight='{weight}' fill='{colour}' {FONT}>"
        f"{escape(text)}</text>"
    )


def words_of(svg: str) -> list[str]:
    """Return the words of a picture."""
    texts = re.findall(r"<(?:text|title)[^>]*>(.*?)</(?:text|title)>", svg, re.DOTALL)
    return unescape(" ".join(texts)).split()


def main() -> None:
    """Draw the pictures, or compare them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        pictures = {
            "fused.svg": draw_fused(),
            "inspect.svg": draw_screen(folder, "ckpttool inspect checkpoint/ -s strategy.ckpt"),
            "reshard.svg": draw_reshard(folder),
            "speed.svg": draw_speed(),
        }
        if sys.argv[1:] != ["--check"]:
            (PICTURES / "layout.png").write_bytes(shoot_layout(folder))
    for file, svg in pictures.items():
        path = PICTURES / file
        if sys.argv[1:] != ["--check"]:
            path.write_text(svg, encoding="utf-8")
        elif words_of(path.read_text(encoding="utf-8")) != words_of(svg):
            sys.exit(
                f"{path.relative_to(ROOT)} is not what ckpttool shows now: run scripts/pictures"
            )


if __name__ == "__main__":
    main()
