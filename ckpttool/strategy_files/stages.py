"""Merge the strategy files of pipeline stages, as MindSpore's ``merge_pipeline_strategys`` does.

It copies the items of files and knows no layout.  Reading is left to
`ckpttool.strategy_files.reader`, which also proves that the merged file says the same.

Items are copied as they are in the files, so that nothing of them is lost: the strategies of
operators, ``opt_weight_shard_step``, fields of later versions.  Changed are only

- the name of each parameter, which gets ``"<stage>-"`` in front;
- ``current_stage``, which becomes 1.

::

    protobuf   current_stage, the items of operators of all stages, those of parameters
    JSON       one object with the keys in this order, and a blank behind each , and :

Stages are in the order of the files, and the first file of a stage counts, as in MindSpore; there
the folder gives the order.  In JSON an operator of the same name in two stages is there once, with
the values of the later stage.  Contradicting files of one stage and a missing stage are errors;
MindSpore writes a file that it cannot read.  A merged file among them is not copied.

Source
------
MindSpore 2.10 ``parallel/_parallel_serialization.py`` (``_merge_protobuf_strategy``,
``_merge_json_strategy``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.formats.local import is_folder, read_file
from ckpttool.formats.strict_json import parse_as
from ckpttool.formats.wire import WireReader, copy_field, encode_bytes, encode_number
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import (
    IGNORED,
    Items,
    Paths,
    find_stage,
    parse_strategy,
    read_strategy,
)
from ckpttool.wording import shorten


def merge_stages(paths: Paths, path: str) -> tuple[Strategy, bytes]:
    """Return the strategy in the files of pipeline stages, and the bytes of the merged file.

    ``path`` is the name of the merged file, for messages; nothing is written.

    Raises
    ------
    StrategyError
        As `read_strategy`; or a file that is named would be ignored, is hand-written, lacks
        operators, or has another form than the others or ``path``; or only a merged file has a
        stage.
    OSError
        A file cannot be read.
    """
    strategy = read_strategy(paths)
    _check_named([paths] if isinstance(paths, str | os.PathLike) else paths, strategy)
    _check_forms(strategy.files, path)
    first: dict[int, str] = {}
    merged: list[str] = []
    for file in strategy.files:
        stage = find_stage(file)
        if stage is None:
            merged.append(file)
        else:
            first.setdefault(stage, file)
    if len(first) < strategy.stages:
        hint = "`ckpttool strategy convert`, which reads it"
        raise StrategyError(shorten(merged, 3), "merged already", hint)
    if path.endswith(".json"):
        data = _merge_json(first)
    else:
        data = b"".join((encode_number(1, 1), *_copy(first, 2), *_copy(first, 3)))
    again = parse_strategy(data, path)
    same = (again.layouts, again.stages) == (strategy.layouts, strategy.stages)
    assert same, f"{path} would be read as another strategy"
    return strategy, data


def _check_named(paths: Iterable[str | os.PathLike[str]], strategy: Strategy) -> None:
    # A folder may have files that are ignored.
    named = [os.fspath(path) for path in paths if not is_folder(os.fspath(path))]
    if ignored := [path for path in named if path not in strategy.files]:
        message = "merged already, and it contradicts the other files or cannot be read"
        hint = "the files of one run, without a merged one"
        notes = (note.message for note in strategy.notes if note.where in ignored)
        facts = "; ".join(message.removeprefix(f"{IGNORED}: ") for message in notes)
        raise StrategyError(shorten(ignored, 3), message, hint, facts)


def _check_forms(files: Sequence[str], path: str) -> None:
    is_json = [file for file in files if file.endswith(".json")]
    protobuf = [file for file in files if not file.endswith(".json")]
    if is_json and protobuf:
        message = "JSON, and others are protobuf; merge copies the items as they are"
        hint = "`ckpttool strategy convert`, which reads both"
        raise StrategyError(shorten(is_json, 3), message, hint, shorten(protobuf, 3))
    if path.endswith(".json") != bool(is_json):
        form = "JSON" if is_json else "protobuf"
        message = f"the files of the stages are {form}, and merge copies the items as they are"
        raise StrategyError(path, message, f"a name that ends in {'.json' if is_json else '.ckpt'}")


def _copy(files: dict[int, str], number: int) -> Iterator[bytes]:
    """Yield the items of a number in all files; the names of parameters get their stage."""
    for stage, path in files.items():
        with WireReader(StoredFile(path)) as reader:
            for item in reader.fields(0, reader.size):
                if item.number != number:
                    continue
                if number == 2:
                    yield copy_field(reader, item)
                    continue
                fields = [
                    encode_bytes(1, f"{stage}-".encode() + reader.read(field.start, field.stop))
                    if field.number == 1
                    else copy_field(reader, field)
                    for field in reader.fields(item.start, item.stop)
                ]
                yield encode_bytes(3, b"".join(fields))


def _merge_json(files: dict[int, str]) -> bytes:
    operators: dict[str, object] = {}
    layouts: dict[str, object] = {}
    for stage, path in files.items():
        items = parse_as(Items, read_file(path))
        operators |= items.parallel_strategy_item
        of_stage = items.parallel_layout_item.items()
        layouts |= {f"{stage}-{name}": item for name, item in of_stage}
    merged = {
        "current_stage": 1,
        "parallel_strategy_item": operators,
        "parallel_layout_item": layouts,
    }
    return json.dumps(merged).encode()
