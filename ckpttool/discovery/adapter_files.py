"""The files of an adapter (``--lora``): its tensors, and the configuration beside them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from ckpttool.discovery.scan import find
from ckpttool.formats.foreign import NAME_CHECKPOINT
from ckpttool.formats.local import is_file, is_folder, list_folder
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.adapters import Adapter, AdapterConfig, more_of
from ckpttool.model.catalog import Catalog
from ckpttool.problems import Diagnostic, ForeignError, FormatError, PlanError
from ckpttool.typed import parse_scaled
from ckpttool.wording import shorten

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_FILE = "a .safetensors, .ckpt or .h5 file of the adapter"
_MAX_BYTES = 16 << 20


def read_adapter(text: str) -> Adapter:
    """Return an adapter from ``PATH`` or ``PATH:SCALE``: a file, or the folder that PEFT writes.

    Raises
    ------
    PlanError
        It is not one file of full tensors, or the scale is not finite.
    FormatError
        A file is malformed.
    OSError
        A file cannot be read.
    """
    path, scale = parse_scaled(text)
    if scale is not None and not math.isfinite(scale):
        message = f"the scale {scale:g} is not finite"
        raise PlanError([Diagnostic("lora", message, hint="another number", where=path)])
    folder = Path(path if is_folder(path) else Path(path).parent)
    if is_folder(path) or Path(path).name == CONFIG:
        path = _file_in(folder)
    try:
        catalog = find(path)
    except FormatError as error:
        if not isinstance(error, ForeignError) and error.hint != NAME_CHECKPOINT:
            raise
        raise error.with_hint(f"--lora with {_FILE}") from error
    if not isinstance(catalog, Catalog) or not catalog.is_merged or catalog.damaged:
        message, hint = "an adapter is one file of full tensors", "`ckpttool merge` it before"
        raise PlanError([Diagnostic("lora", message, hint=hint, where=path)])
    beside = folder / CONFIG
    return Adapter(catalog, _read_config(os.fspath(beside)) if is_file(beside) else None, scale)


def _file_in(folder: Path) -> str:
    """Return the file that PEFT writes to a folder."""
    if is_file(folder / _WEIGHTS):
        return os.fspath(folder / _WEIGHTS)
    paths = [*list_folder(folder)]
    facts = f"it holds {shorten([path.name for path in paths], 3)}" if paths else ""
    message, hint = f"no {_WEIGHTS} in the folder", f"--lora with {_FILE}"
    raise PlanError([Diagnostic("lora", message, facts=facts, hint=hint, where=str(folder))])


def _read_config(path: str) -> AdapterConfig:
    document = read_json_object(path, _MAX_BYTES)
    try:
        return msgspec.convert({**document, "more": more_of(document)}, AdapterConfig)
    except msgspec.ValidationError as error:
        raise FormatError(path, None, str(error)) from error
