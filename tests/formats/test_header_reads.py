"""What a header says that it took to read, against the calls that the system saw."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.checkpoints import noise, write_file
from tests.support.commands import SUFFIXES
from tests.support.programs import need

READ = """
import sys
import ckpttool
for index in map(ckpttool.read_index, sys.argv[1:]):
    print(index.reads.requests, index.reads.nbytes)
"""
CALL = re.compile(r"(?:read|pread64|readv)\(\d+<(?P<path>[^>]+)>.* = (?P<nbytes>\d+)$")


@pytest.mark.parametrize("format", SUFFIXES)
def test_reads_of_a_header_are_counted_as_the_system_sees_them(tmp_path, format):
    need("strace")
    path = tmp_path / f"net{SUFFIXES[format]}"
    write_file(path, {f"w{i}": noise(f"w{i}", "Float32", (8, i + 1)) for i in range(50)}, format)
    trace = tmp_path / "calls"
    command = ["strace", "-ff", "-y", "-o", trace, "-e", "trace=read,pread64,readv"]
    command += [sys.executable, "-c", READ, path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    texts = [one.read_text(errors="replace") for one in tmp_path.glob("calls.*")]
    lines = (line for text in texts for line in text.splitlines())
    calls = [call for line in lines if (call := CALL.search(line)) and call["path"] == str(path)]
    assert calls
    counted = [int(word) for word in done.stdout.split()]
    assert counted == [len(calls), sum(int(call["nbytes"]) for call in calls)]
