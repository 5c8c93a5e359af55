"""The index files of a merged checkpoint in several files: tensor name to file.

It reads and writes the index alone.  Discovery, which knows the folder, checks that the files are
there and have what the index names.

Bytes
-----
A JSON object in UTF-8, of any indentation::

    {
      "metadata": {"total_size": <bytes of all tensors that are named>},
      "weight_map": {"<name of a tensor>": "<path of its file, from the folder of the index>", ...}
    }

* ``param_name_map.json`` is MindSpore's, for ``part0.safetensors``, ``part1.safetensors``, ... of
  ``unified_safetensors``.  An object without ``weight_map`` is the map itself, as for MindSpore's
  loader.
* ``model.safetensors.index.json`` is Hugging Face's, for ``model-00001-of-00003.safetensors``, ...;
  MindFormers also calls it ``ms-model.safetensors.index.json``.  Any ``NAME.index.json`` is read
  where ``NAME`` ends like a checkpoint.
* Paths MUST stay inside the folder.  Every name comes once.
* ``total_size`` is not checked: the header of each file determines its tensors, and tools that omit
  tensors or convert their element type often keep the old number.
* A ``crc_num`` in MindSpore's shard files is not checked: it was copied from the file of a rank.
* ``hyper_param.safetensors`` in the folder of an index belongs to it, even if the index does not
  name it.  It holds the tensors that MindSpore did not merge: those of rank 0's file that the
  strategy does not list.  It also holds rank 0's slices of ``accu_grads.*`` and of parameters that
  were not chosen.  MindSpore's loader gives every rank this file unchanged; tensors of the map go
  to ranks whose strategy lists them.

Both indexes are written with the same content, so either loader finds all tensors in the same
files.  Names are sorted, and the indentation is two.

Limits: an index of at most `MAX_INDEX_BYTES`, read and written.

Source
------
MindSpore 2.10 ``parallel/transform_safetensors.py`` (``_save_parameter_map_json``,
``_save_hyper_param``, ``_load_parallel_checkpoint``); Hugging Face Transformers
``modeling_utils.py`` and ``huggingface_hub`` ``serialization/_base.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct

from ckpttool.formats import format_of_suffix, suffix_of
from ckpttool.formats.local import identify_file
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import FormatError

MAP_NAME = "param_name_map.json"
SINGLE_FILE = "model.safetensors"  # what Hugging Face calls a checkpoint in one file
_INDEX_SUFFIX = ".index.json"
INDEX_OF_PARTS = SINGLE_FILE + _INDEX_SUFFIX  # and one in several
COMMON_STEM = "hyper_param"  # stem of the file that goes to every rank
# The most tensors that were reported, 1.29 million, take 200 MB; stops hostile files.
MAX_INDEX_BYTES = 256 << 20


class WeightIndex(Struct, frozen=True):
    """The content of an index file; ``files`` has the file of each tensor, from its folder."""

    file: StoredFile
    files: Mapping[str, str]
    total_size: int | None = None

    @property
    def path(self) -> str:
        """Path of the index file."""
        return self.file.path


def is_index_name(name: str) -> bool:
    """Return whether a file of this name is an index of checkpoint files.

    >>> is_index_name("model.safetensors.index.json"), is_index_name("pytorch_model.bin.index.json")
    (True, False)
    """
    if name == MAP_NAME:
        return True
    return name.endswith(_INDEX_SUFFIX) and bool(format_of_suffix(name.removesuffix(_INDEX_SUFFIX)))


def read_index_file(path: str) -> WeightIndex:
    """Return the content of an index file without comparing it with the checkpoint files.

    Raises
    ------
    FormatError
        The file is not an index.
    OSError
        The file cannot be read.
    """
    file = identify_file(path)
    document = read_json_object(path, MAX_INDEX_BYTES)
    files = document.get("weight_map", document if Path(path).name == MAP_NAME else None)
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise FormatError(path, None, "not an index: weight_map does not map names to files")
    metadata = document.get("metadata")
    recorded = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = int(recorded) if isinstance(recorded, int | float) and math.isfinite(recorded) else None
    paths = {at: str(PurePosixPath(at)) for at in {*files.values()}}
    return WeightIndex(file, {name: paths[at] for name, at in files.items()}, total)


def is_inside(name: str) -> bool:
    """Return whether a path in an index stays inside the folder of the index.

    >>> is_inside("sub/part0.safetensors"), is_inside("../part0.safetensors"), is_inside("/etc/a")
    (True, False, False)
    """
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and not {"..", "\0"} & {*path.parts, *name}


def index_text(files: Mapping[str, str], total_size: int) -> str:
    """Return the text of an index file; ``total_size`` are the bytes of all tensors."""
    document = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(document, indent=2) + "\n"


def index_names(format: str) -> tuple[str, str]:
    """Return the names of the two index files of a checkpoint in several files of a format.

    >>> index_names("ckpt")
    ('param_name_map.json', 'model.ckpt.index.json')
    """
    return MAP_NAME, f"model{suffix_of(format)}{_INDEX_SUFFIX}"


def shard_file_name(number: int | None, count: int, format: str) -> str:
    """Return the name of a numbered file, from 0; None is for the file that goes to every rank.

    >>> shard_file_name(0, 3, "safetensors"), shard_file_name(None, 3, "ckpt")
    ('model-00001-of-00003.safetensors', 'hyper_param.ckpt')
    """
    stem = COMMON_STEM if number is None else f"model-{number + 1:05d}-of-{count:05d}"
    return stem + suffix_of(format)
