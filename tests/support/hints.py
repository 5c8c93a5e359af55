"""Whether the text of a diagnostic can be typed in Python as it stands."""

import ast
import re

from ckpttool import api
from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.discovery.scan import SourceOptions
from ckpttool.execution.executors import RunOptions
from ckpttool.problems import Diagnostic
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import with_keywords

COMMANDS = re.compile(r"`[^`]*`|\b(?:ckpttool [a-z]|cp |ln |dask |aws |h5repack )[^;)]*")
OPTION = re.compile(r"(?<![\w/.'\"=-])(?:--[a-z][a-z-]+|-[sdo]\b)")
KEYWORD = re.compile(r"\b([a-z_]+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|True|\d+)")
WITHOUT_A_KEYWORD = {  # options of commands that are no calls
    *("--rows", "--plot", "--relative-to", "--steps", "--ranks", "--json"),
}
LIKE_OPTIONS = "run -s old --step 5"  # a name from outside, in tests
OPTIONS = SourceOptions, ResolveOptions, OutputOptions, RunOptions


def untypable(one: Diagnostic) -> str:
    """Return what of a diagnostic is an option, or a keyword whose value is refused; "" if none."""
    if one.code in ("usage", "internal"):  # the command line's own
        return ""
    hint = with_keywords(one.hint)
    said = COMMANDS.sub("", f"{one.message} {one.facts}".replace(LIKE_OPTIONS, ""))
    left = {
        *OPTION.findall(said),
        *OPTION.findall(COMMANDS.sub("", hint.replace(LIKE_OPTIONS, ""))),
    }
    if left := left - WITHOUT_A_KEYWORD:
        return f"{left} in {one.lines}"
    for name, value in KEYWORD.findall(hint):
        if name == "key":
            continue
        given = api._Keywords("merge", {name: ast.literal_eval(value)})
        for options in OPTIONS:
            given.take(options)
    return ""
