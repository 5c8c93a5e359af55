"""Group information: the communication groups of one rank, and whose checkpoint can replace its.

Bytes
-----
The protobuf message ``mindspore.straspb.ParallelGroupMap``; repeated numbers come packed or not::

    1 parallel_group_item            one for each group
        1 group_name                 "{size}-{hash}", perhaps with a word behind it
        2 parallel_group_ranks       1 dim: the ranks in it
    2 ckpt_restore_rank_list         MUST be there
        1 dim                        ranks whose checkpoint holds the same as this rank's

Nothing in the file says which rank wrote it.  Fields of other numbers are errors: a checkpoint, a
strategy and a graph are protobuf messages, too, and this one has no mark of its own.

Source
------
MindSpore 2.10 ``utils/node_strategy.proto``, ``parallel/_parallel_serialization.py``
(``_restore_group_info_list``); written to ``GROUP_INFO_FILE``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpttool.errors import FormatError
from ckpttool.formats.wire import LENGTH, Field, WireReader

MAX_NAME_BYTES = 1 << 20  # a name is read into memory; none in the field comes near


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What the file says.

    Attributes
    ----------
    groups
        Names and ranks of the groups, in the order of the file.
    restore_ranks
        Ranks whose checkpoint can stand in for that of the rank that wrote the file.
    """

    groups: tuple[tuple[str, tuple[int, ...]], ...]
    restore_ranks: tuple[int, ...]


def read_group_info(path: str) -> GroupInfo:
    """Return the groups in a file.

    Raises
    ------
    FormatError
        It is not what the format says.
    OSError
        It cannot be opened or read.
    """
    groups: list[tuple[str, tuple[int, ...]]] = []
    restore: tuple[int, ...] | None = None
    with WireReader(path) as reader:
        for field in reader.fields(0, reader.size):
            if field.number == 1 and field.wire_type == LENGTH:
                groups.append(_read_group(reader, field))
            elif field.number == 2 and field.wire_type == LENGTH:
                restore = _read_ranks(reader, field)
            else:
                raise FormatError(path, field.start, f"field {field.number}: no group information")
    if restore is None:
        raise FormatError(path, None, "group information without ckpt_restore_rank_list")
    return GroupInfo(tuple(groups), restore)


def _read_group(reader: WireReader, group: Field) -> tuple[str, tuple[int, ...]]:
    name: str | None = None
    ranks: tuple[int, ...] | None = None
    for field in reader.fields(group.start, group.stop):
        if field.number == 1:
            name = reader.text(field, MAX_NAME_BYTES)
        elif field.number == 2 and field.wire_type == LENGTH:
            ranks = _read_ranks(reader, field)
        else:
            raise FormatError(reader.path, field.start, f"field {field.number} of a group")
    if name is None or ranks is None:
        raise FormatError(reader.path, group.start, "a group without name or ranks")
    return name, ranks


def _read_ranks(reader: WireReader, message: Field) -> tuple[int, ...]:
    ranks: list[int] = []
    for field in reader.fields(message.start, message.stop):
        if field.number != 1:
            raise FormatError(reader.path, field.start, f"field {field.number} among ranks")
        ranks += reader.numbers(field)
    return tuple(ranks)
