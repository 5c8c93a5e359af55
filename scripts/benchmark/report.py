"""Medians and ratios, as a table and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmark.cases import Case
from benchmark.stopwatch import Run

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the rounds of one case; ratios are medians of the ratios of each round.

    Attributes
    ----------
    ratio
        Time for each byte written against the yardstick's (for each run, where nothing is
        written); None without a yardstick.
    synced_ratio
        The same, both with the time until all of it is on disk.
    read_ratio
        Time for each byte of the sources against the yardstick's; None if the case has none.
    other_ratio
        Time for each run against that of the other installation; None if that does not run it.
    """

    size: str
    case: str
    nbytes: int
    seconds: float
    synced_seconds: float
    gb_per_second: float
    cpu_seconds: float
    peak_bytes: int
    ratio: float | None
    synced_ratio: float | None
    read_ratio: float | None
    other_ratio: float | None
    stdout: str
    error: str


def summarize(runs: Sequence[Run], cases: Iterable[Case]) -> list[Summary]:
    """A summary of each case of one size, in order."""
    return [_summary([run for run in runs if run.case == case.name], case, runs) for case in cases]


def _summary(mine: Sequence[Run], case: Case, runs: Sequence[Run]) -> Summary:
    pairs, others = (
        [
            (run, other)
            for run in mine
            for other in runs
            if (other.case, other.round) == (name, run.round) and not other.error
        ]
        for name in (case.yardstick, case.run_by("").name)
    )
    seconds = median(run.seconds for run in mine)
    nbytes = mine[0].nbytes
    return Summary(
        size=mine[0].size,
        case=case.name,
        nbytes=nbytes,
        seconds=seconds,
        synced_seconds=median(map(_synced, mine)),
        gb_per_second=nbytes / seconds / 1e9,
        cpu_seconds=median(run.cpu_seconds for run in mine),
        peak_bytes=max(run.peak_bytes for run in mine),
        ratio=_median_ratio(pairs, lambda run: run.seconds / (run.nbytes or 1)),
        synced_ratio=_median_ratio(pairs, lambda run: _synced(run) / (run.nbytes or 1)),
        read_ratio=_median_ratio(pairs, lambda run: run.seconds / run.read_bytes)
        if case.read_bytes
        else None,
        other_ratio=_median_ratio(others, lambda run: run.seconds),
        stdout=mine[0].stdout,
        error=next((run.error for run in mine if run.error), ""),
    )


def _synced(run: Run) -> float:
    """Seconds until all of it is on disk."""
    return run.seconds + run.sync_seconds


def _median_ratio(pairs: Iterable[tuple[Run, Run]], cost: Callable[[Run], float]) -> float | None:
    ratios = [cost(run) / cost(other) for run, other in pairs]
    return median(ratios) if ratios else None


COLUMNS = (
    ("size", 6),
    ("case", -44),
    ("MiB written", 12),
    ("seconds", 8),
    ("GB/s", 6),
    ("ratio", 6),
    ("+ sync", 7),
    ("per read", 8),
    ("other", 6),
    ("cpu s", 7),
    ("peak MiB", 9),
)


def table(summaries: Iterable[Summary]) -> Iterable[str]:
    """Lines of a table."""
    yield _line(tuple(name for name, _ in COLUMNS))
    for one in summaries:
        if one.error:
            yield f"{one.size:>6} {one.case:44} failed: {one.error}"
            continue
        yield _line(
            (
                one.size,
                one.case,
                f"{one.nbytes / MIB:.0f}" if one.nbytes else "",
                f"{one.seconds:.3f}",
                f"{one.gb_per_second:.2f}" if one.nbytes else "",
                "" if one.ratio is None else f"{one.ratio:.2f}",
                "" if one.synced_ratio is None or not one.nbytes else f"{one.synced_ratio:.2f}",
                "" if one.read_ratio is None else f"{one.read_ratio:.2f}",
                "" if one.other_ratio is None else f"{one.other_ratio:.2f}",
                f"{one.cpu_seconds:.2f}",
                f"{one.peak_bytes / MIB:.0f}",
            )
        )


def _line(cells: Sequence[str]) -> str:
    return " ".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, width) in zip(cells, COLUMNS, strict=True)
    )


def readme_lines(facts: Mapping[str, str | int], summaries: Sequence[Summary]) -> Iterable[str]:
    """Lines for a README: a row for each case, a column for each size."""
    gib = int(facts["memory_bytes"]) / (1 << 30)
    yield (
        f"{facts['processor']}, {facts['processors']} processors, {gib:.0f} GiB, "
        f"{facts['file_system']}; Python {facts['python']}, numpy {facts['numpy']}, h5py "
        f"{facts['h5py']}; page cache {facts['page_cache']}. Each cell: seconds, ratio to `cp -r`, "
        "the same when both wait for the disk, and peak memory in MiB."
    )
    for is_sized in (True, False):
        shown = [one for one in summaries if bool(one.size) == is_sized]
        if not shown:
            continue
        sizes = list(dict.fromkeys(one.size for one in shown))
        yield ""
        yield "| | " + " | ".join(size or "seconds, ratio, MiB" for size in sizes) + " |"
        yield "|---|" + "---|" * len(sizes)
        for case in dict.fromkeys(one.case for one in shown):
            cells = {one.size: _cell(one) for one in shown if one.case == case}
            yield f"| {case} | " + " | ".join(cells.get(size, "") for size in sizes) + " |"


def _cell(one: Summary) -> str:
    if one.error:
        return "failed"
    written = one.synced_ratio if one.nbytes else None
    ratios = [f"x {ratio:.2f}" for ratio in (one.ratio, written) if ratio is not None]
    return ", ".join((f"{one.seconds:.2f} s", *ratios, f"{one.peak_bytes / MIB:.0f}"))


def machine(work: Path) -> dict[str, str | int]:
    """What it was measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system(work),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "h5py", "click")},
    }


def _file_system(path: Path) -> str:
    """Type of the file system that holds ``path``: the mount with the longest name above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(Path(point))]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else "unknown"


def document(
    about: dict[str, object], runs: Iterable[Run], summaries: Iterable[Summary]
) -> dict[str, object]:
    """Everything, for programs."""
    return {
        "schema": 1,
        **about,
        "summaries": [asdict(one) for one in summaries],
        "runs": [asdict(run) for run in runs],
    }
