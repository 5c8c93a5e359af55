"""Sets of some ranks alone (--rank); what is said of them is in ``e2e/sessions``."""

from __future__ import annotations

import json

from tests.support.checkpoints import noise, write_file
from tests.support.commands import run_well, verify_document


def test_the_data_of_tensors_that_are_not_all_there_are_looked_at(tmp_path):
    layout = {"dev_matrix": [2], "tensor_map": [0, -1]}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": {"w": layout}}))
    entry = noise("w", "Float32", (2, 4))
    nan = b"\0\0\xc0\x7f"
    write_file(tmp_path / "m.ckpt", {"w": type(entry)("Float32", (2, 4), nan * 8)}, "ckpt")
    words = ["split", tmp_path / "m.ckpt", "-d", tmp_path / "s.json", "-o", tmp_path / "out"]
    run_well(*words, "--format", "ckpt", "--rank", "1")
    words = [tmp_path / "out", "-s", tmp_path / "s.json", "--deep", "--ignore", "zero"]
    (finding,) = verify_document(*words)["findings"]
    assert (finding["code"], finding["ranks"], finding["count"]) == ("nan", [1], 4)
