"""The ``config.json`` of a model: where it lies, and what it says of the language model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ckpttool.formats.local import is_file, is_folder
from ckpttool.formats.strict_json import read_json_object

CONFIG = "config.json"
MAX_CONFIG_BYTES = 16 << 20
_TIED = "tie_word_embeddings"
_LANGUAGE = ("text_config", "llm_config", "language_config")  # beside the parts for images


def find_config(path: str | os.PathLike[str]) -> str | None:
    """Return the ``config.json`` in a folder, or beside a file; None if there is none."""
    folder = path if is_folder(path) else Path(path).parent
    config = os.fspath(Path(folder, CONFIG))
    return config if is_file(config) else None


def read_config(path: str | os.PathLike[str]) -> Mapping[str, object]:
    """Return the configuration of a model; of several parts that of the language model.

    Raises
    ------
    FormatError
        The file is not a JSON object, or too large.
    """
    config = read_json_object(os.fspath(path), MAX_CONFIG_BYTES)
    inner = next((part for key in _LANGUAGE if isinstance(part := config.get(key), dict)), {})
    # Either may tie: transformers 5 goes by the outer part, 4 by that of the language.
    tied = {_TIED: True} if inner and config.get(_TIED) else {}
    return {**config, **inner, **tied}
