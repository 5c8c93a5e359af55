"""What a path is: one file, or a folder of ranks of which some are damaged."""

import pytest

from ckpttool.discovery.scan import scan
from ckpttool.problems import FormatError


def test_a_file_is_rank_zero_and_nothing_else_is_looked_for(make_run):
    src = make_run("rank_3/net-1_10.ckpt", "rank_3/net-2_10.ckpt")
    catalog = scan(f"{src}/rank_3/net-1_10.ckpt")
    assert list(catalog.files) == [0]
    assert catalog.is_merged
    assert not scan(src).is_merged


def test_a_missing_folder_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        scan(str(tmp_path / "none"))


def test_a_damaged_file_alone_is_an_error_and_of_several_is_collected(make_run, tmp_path):
    src = make_run(*(f"rank_{rank}/a.ckpt" for rank in range(4)))
    for rank in (1, 3):
        (tmp_path / "run" / f"rank_{rank}" / "a.ckpt").write_bytes(b"\xff")
    catalog = scan(src)
    assert list(catalog.files) == [0, 2]
    assert list(catalog.damaged) == [1, 3]
    assert f"{src}/rank_3/a.ckpt: byte 0:" in str(catalog.damaged[3])
    with pytest.raises(FormatError):
        scan(f"{src}/rank_1/a.ckpt")
