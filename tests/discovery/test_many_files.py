"""Folders with many files that are none of a checkpoint's."""

from __future__ import annotations

import os

import pytest

import ckpttool
from ckpttool.formats.local import exists, is_file, is_folder, is_link, list_folder, listing_once
from tests.support.checkpoints import ONE_STAGE, noise, write_file
from tests.support.commands import run_well

MANY = 3_000


@pytest.mark.parametrize("place", ["rank_{}/net.ckpt", "net_rank_{}.ckpt"])
def test_unrelated_files_are_listed_once_and_not_looked_up(place, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    for rank in range(4):
        tensor = noise(f"w{rank // 2}", "Float32", (4, 3))
        write_file(folder / place.format(rank), {"w": tensor}, "ckpt")
    ckpttool.write_strategy(ONE_STAGE, str(tmp_path / "s.ckpt"))
    for number in range(MANY):
        (folder / f"log_{number}.txt").touch()
    calls = {"stat": [], "scandir": [], "listdir": []}
    for name, seen in calls.items():
        call = getattr(os, name)

        def counted(path=".", *args, call=call, seen=seen, **keywords):
            seen.append(os.fspath(path))
            return call(path, *args, **keywords)

        monkeypatch.setattr(os, name, counted)
    shown = run_well("inspect", folder, "-s", tmp_path / "s.ckpt").stdout
    assert "4 ranks" in shown
    assert len(calls["stat"]) < MANY / 2
    assert calls["scandir"].count(str(folder)) == 1
    assert calls["listdir"].count(str(folder)) <= 1


@pytest.mark.parametrize("name", ["file", "folder", "link", "broken"])
def test_a_listing_says_what_the_system_says(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "broken").symlink_to("none")
    (path,) = (entry for entry in list_folder(tmp_path) if entry.name == name)
    answers = [ask(path) for ask in (exists, is_file, is_folder, is_link)]
    with listing_once():
        assert list_folder(tmp_path) == list_folder(str(tmp_path)) == sorted(tmp_path.iterdir())
        assert [ask(path) for ask in (exists, is_file, is_folder, is_link)] == answers
        (tmp_path / "later").touch()
        assert "later" not in {entry.name for entry in list_folder(tmp_path)}
    assert "later" in {entry.name for entry in list_folder(tmp_path)}
