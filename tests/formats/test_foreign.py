"""Files that lie beside checkpoints: group information, rank tables, graphs, exported models."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import zipfile
from pathlib import Path

import pytest

from ckpttool import formats
from ckpttool.discovery.scan import scan
from ckpttool.formats import read_index
from ckpttool.formats.foreign import Device, identify_foreign, read_rank_table
from ckpttool.operations.plot import TEMPLATE
from ckpttool.problems import ForeignError, FormatError
from tests.support.commands import mentions, run, run_well
from tests.support.commands import message as said
from tests.support.corpus import SAMPLES
from tests.support.file_bytes import (
    layout,
    message,
    number,
    operator,
    packed,
    record,
    safetensors,
    strategy,
)

GROUP_INFO = SAMPLES / "files" / "group_info.pb"
GRAPH = (SAMPLES / "files" / "net-graph.meta").read_bytes()
# The first fields of what `export` of MindSpore 2.10 writes for a Dense.
MINDIR = message(1, b"1.1") + message(2, b"MindSpore") + message(5, b"2.10.0") + message(7, b"")


def archive(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr(zipfile.ZipInfo(name), b"contents")  # of 1980, not of now: it is in names
    return file.getvalue()


def group(name: str, *ranks: int, spell=number) -> bytes:
    return message(1, message(1, name.encode()), message(2, spell(1, *ranks)))


# ------------------------------------------------------------------------- group information


@pytest.mark.parametrize("spell", [number, packed])
def test_groups_are_recognised_with_ranks_packed_or_not(spell, tmp_path):
    path = tmp_path / "g.pb"
    path.write_bytes(group("a", 3, 300, spell=spell) + message(2, spell(1, 0, 4)))
    kind = identify_foreign(str(path))
    assert kind is not None
    assert kind.kind == "group_info"


@pytest.mark.parametrize(
    "data",
    [
        group("a", 0),  # without ckpt_restore_rank_list
        number(1, 4) + message(2, number(1, 0)),
        message(1, message(2, number(1, 0))) + message(2, number(1, 0)),  # a group without a name
        message(1, message(1, b"a")) + message(2, number(1, 0)),
        message(1, message(1, b"a"), number(3, 0)) + message(2, number(1, 0)),
        message(2, number(2, 0)),
        record(),
    ],
)
def test_what_is_no_group_information_is_not_recognised_as_it(data, tmp_path):
    path = tmp_path / "g.pb"
    path.write_bytes(data)
    kind = identify_foreign(str(path))
    assert kind is None or kind.kind != "group_info"


def test_group_information_cut_short_is_not_recognised(tmp_path):
    data = GROUP_INFO.read_bytes()
    path = tmp_path / "g.pb"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        kind = identify_foreign(str(path))
        assert kind is None or kind.kind != "group_info"


# ------------------------------------------------------------------------------- recognising


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (GRAPH, "graph"),
        (number(1, 1) + message(2, b"domain") + number(3, 7) + message(4, b""), "graph"),
        (MINDIR, "mindir"),
        (GROUP_INFO.read_bytes(), "group_info"),
        (strategy(layout("w", (2,), (0,))), "strategy"),
        (strategy(operator(0)), "strategy"),
        (b'{"parallel_layout_item": {}}', "strategy"),
        (b' {"server_list": []}', "rank_table"),
        (b'{"group_list": 3}', "rank_table"),
        (b'{"metadata": {}, "weight_map": {"w": "pytorch_model-1.bin"}}', "index"),
        (b"PK\3\4" + bytes(30), "zip"),
        (archive("arr_0.npy"), "numpy"),
        (b"\x93NUMPY\1\0v\0{", "numpy"),
        (archive("metadata.json"), "keras"),
        (archive("pytorch_model/data.pkl"), "pytorch"),
        (archive("n" * 1000 + "/data.pkl"), "pytorch"),
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps({}, 2), "pytorch"),
        (gzip.compress(record(), mtime=0), "gzip"),
        (bz2.compress(record()), "bzip2"),
        (lzma.compress(record()), "xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "zstd"),
        (b"net.ckpt".ljust(257, b"\0") + b"ustar\x0000", "tar"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "lfs"),
        (b"\n <!DOCTYPE html>\n<html><body>404</body></html>", "page"),
        (TEMPLATE.read_bytes(), "page of plot"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "page"),
        (b"#!/usr/bin/env python\nimport mindspore as ms\n", "python"),
        (b"loss 0.1\n", "text"),
        (b"\n# python\nimport mindspore\n", "python"),
        (b"\n\n\n\nloss 0.1\n", "text"),
        ("Übung ".encode() * 20_000, "text"),
        (b'{"0": {}}', "json"),
        (b'{"last_ckpt_file": "a"}', "json"),
    ],
)
@pytest.mark.parametrize("name", ["a.ckpt", "a.bin", "a.safetensors"])
def test_files_of_other_kinds_are_recognised_whatever_their_name(name, data, kind, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    other = identify_foreign(str(path))
    assert other is not None
    assert other.kind == kind
    with pytest.raises(ForeignError) as caught:
        read_index(str(path))
    assert caught.value.reason == f"{other.noun}, not a MindSpore checkpoint"
    assert caught.value.hint == other.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b" \n",
        b"loss 0",
        b"\nd\n\x0blayer.weigh",  # of a .ckpt, cut in the first name
        b"{" + bytes(10),
        "Übung".encode("latin-1"),
        pickle.dumps({"w": 1}),
        record(),
        record()[:-1],
        record("1.1"),
        number(1, 2),
        safetensors({}),
        b"{" + bytes(200),
        message(1, b"\xff") + message(2, b""),
    ],
)
def test_other_files_are_not_taken_for_any_kind(data, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    assert identify_foreign(str(path)) is None


@pytest.mark.parametrize(("data", "kind"), [(GRAPH, "graph"), (MINDIR, "mindir")])
def test_inspect_says_what_a_graph_is_and_merge_that_it_is_none(data, kind, tmp_path):
    path = tmp_path / "net"
    path.write_bytes(data)
    document = json.loads(run_well("inspect", path, "--json").stdout)
    assert document == {"schema": 2, "path": str(path), "kind": kind, "nbytes": len(data)}
    noun = {"graph": "a graph that MindSpore dumped", "mindir": "an exported model"}[kind]
    assert noun in said(run_well("inspect", path))
    result = run("merge", path, "-o", tmp_path / "out.h5")
    assert result.exit_code == 3
    assert not mentions(said(result), noun, ", not a MindSpore checkpoint Try: the checkpoint")


# ------------------------------------------------------------------------------- rank tables


def devices(count: int, per_server: int = 8) -> list[Device]:
    return [
        Device(r, f"10.0.0.{r // per_server}", r % per_server, f"192.{r % 4}.0.{r}")
        for r in range(count)
    ]


def server_table(wanted: list[Device], spell=str, **entries) -> dict:
    """The form of MindSpore 1.x and later, as hccl_tools writes it."""
    servers: dict[str, list[dict]] = {}
    for d in wanted:
        device = {"device_id": spell(d.device), "device_ip": d.ip, "rank_id": spell(d.rank)}
        servers.setdefault(d.server, []).append(device)
    return {
        "version": "1.0",
        "server_count": spell(len(servers)),
        "server_list": [
            {"server_id": name, "device": inside, "host_nic_ip": "reserve"}
            for name, inside in servers.items()
        ],
        "status": "completed",
        **entries,
    }


def group_table(wanted: list[Device], spell=str, rank_key: str = "rank_id", **entries) -> dict:
    """The older form, as MindSpore's first tutorials have it."""
    group = {
        "device_num": spell(len(wanted)),
        "server_num": spell(len({d.server for d in wanted})),
        "group_name": "",
        "instance_count": spell(len(wanted)),
        "instance_list": [
            {
                "devices": [{"device_id": spell(d.device), "device_ip": d.ip}],
                rank_key: spell(d.rank),
                "server_id": d.server,
            }
            for d in wanted
        ],
    }
    return {
        "board_id": "0x0000",
        "chip_info": "910",
        "deploy_mode": "lab",
        "group_count": "1",
        "group_list": [group],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": ["eth0"],
        "para_plane_nic_num": "1",
        "status": "completed",
        **entries,
    }


@pytest.fixture
def table(tmp_path):
    def write(document: object, name: str = "rank_table_8pcs.json") -> str:
        (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("spell", [str, int])
@pytest.mark.parametrize("make", [server_table, group_table])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_rank_tables_of_both_forms_are_read(make, spell, count, table):
    wanted = devices(count)
    read = read_rank_table(table(make(wanted, spell)))
    assert read.devices == tuple(wanted)
    assert len({device.server for device in read.devices}) == (count + 7) // 8
    assert read.version == ("1.0" if make is server_table else None)


def test_the_name_of_a_pod_may_be_its_rank(table):
    assert read_rank_table(table(group_table(devices(4), rank_key="pod_name"))).devices == tuple(
        devices(4)
    )


def test_ranks_need_not_be_in_order_and_addresses_may_be_missing(table):
    document = server_table(devices(4)[::-1])
    document["server_list"][0]["device"][0]["device_ip"] = ""
    del document["server_list"][0]["device"][1]["device_ip"]
    document["server_list"][0]["device"][2]["device_ip"] = "fe80::1"
    read = read_rank_table(table(document))
    assert [d.rank for d in read.devices] == [0, 1, 2, 3]
    assert [d.ip for d in read.devices] == ["192.0.0.0", "fe80::1", None, None]


def test_a_table_with_pods_of_servers_is_read(table):
    document = server_table(devices(4), version="1.2", super_pod_list=[{"super_pod_id": "0"}])
    assert read_rank_table(table(document)).version == "1.2"


def spoil(path: str, value: object, make=server_table):
    """A table with one entry replaced, or dropped with ``...``."""
    document = make(devices(10))
    *parents, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
    inside = document
    for key in parents:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "not a JSON object"),
        ({"version": "1.0"}, "group_list: expected a list of objects, found None"),
        (spoil("server_list", {}), "server_list: expected a list of objects, found {}"),
        (spoil("server_list/1/device", ...), "device: expected a list of objects, found None"),
        (spoil("server_list/0/device/3/rank_id", "x"), "rank_id: expected a number, found 'x'"),
        (spoil("server_list/0/device/3/device_id", True), "device_id: expected a number, f.*True"),
        (spoil("server_list/0/device/3/device_id", -1), "device_id: expected a number, found -1"),
        (spoil("server_list/0/device/3/rank_id", "4"), "lists a rank twice"),
        (
            spoil("group_list/0/instance_list/2/rank_id", ..., group_table),
            "pod_name: expected a number, found None",
        ),
        (
            spoil("group_list/0/instance_list/2", 7, group_table),
            "instance_list: expected a list of objects",
        ),
    ],
)
def test_a_wrong_rank_table_is_refused_and_the_key_named(document, reason, table):
    path = table(document)
    with pytest.raises(FormatError, match=reason) as caught:
        read_rank_table(path)
    assert caught.value.path == path


def test_a_rank_table_that_is_no_json_or_too_large_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "rank_table.json"
    path.write_text("{")
    with pytest.raises(FormatError, match="not valid JSON"):
        read_rank_table(str(path))
    monkeypatch.setattr("ckpttool.formats.foreign._MAX_JSON_BYTES", 100)
    path.write_text(json.dumps(server_table(devices(2))))
    with pytest.raises(FormatError, match="at most 100 bytes"):
        read_rank_table(str(path))


@pytest.mark.parametrize("make", [server_table, group_table])
def test_inspect_shows_servers_devices_and_ranks(make, table):
    path = table(make(devices(9)))
    document = json.loads(run_well("inspect", path, "--json").stdout)
    assert document["kind"] == "rank_table"
    assert document["ranks"][8] == {
        "rank": 8,
        "server": "10.0.0.1",
        "device": 0,
        "device_ip": "192.0.0.8",
    }
    text = said(run_well("inspect", path))
    assert not mentions(text, "9 ranks on 2 servers", r"8 +10\.0\.0\.1 +0 +192\.0\.0\.8")
    result = run("merge", path, "-o", "out.h5")
    assert result.exit_code == 3
    assert "a rank table, not a MindSpore checkpoint" in said(result)


# ---------------------------------------------------------------- beside the ranks they name


@pytest.fixture
def ranks(tmp_path):
    for rank in range(2):
        path = tmp_path / "run" / f"rank_{rank}" / "net.ckpt"
        path.parent.mkdir(parents=True)
        path.write_bytes(record())
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["rank_table_8pcs.json", "hccl_2p_01_10.0.0.1.json"])
@pytest.mark.parametrize("place", ["run", "."])
def test_inspect_shows_server_and_device_of_every_rank(place, name, ranks, table):
    table(server_table(devices(2, per_server=1)), f"{place}/{name}")
    document = json.loads(run_well("inspect", ranks, "--json").stdout)
    places = [(e["rank"], e["server"], e["device"]) for e in document["ranks"]]
    assert places == [(0, "10.0.0.0", 0), (1, "10.0.0.1", 0)]
    assert not mentions(
        run_well("inspect", ranks, "--ranks").stdout, r"1 +10\.0\.0\.1:0 +rank_1/net\.ckpt"
    )


def test_a_rank_that_the_table_does_not_name_has_no_server(ranks, table):
    table(server_table(devices(1)))
    document = json.loads(run_well("inspect", ranks, "--json").stdout)
    assert (document["ranks"][1]["server"], document["ranks"][1]["device"]) == (None, None)
    assert not mentions(run_well("inspect", ranks, "--ranks").stdout, r"  1 +rank_1/net\.ckpt")


def test_tables_that_differ_and_broken_ones_are_notes(ranks, table):
    table(server_table(devices(2)), "run/rank_table_8pcs.json")
    table(server_table(devices(1)), "rank_table_1p.json")
    table({}, "rank_table_16p.json")
    result = run_well("inspect", ranks, "--json")
    document = json.loads(result.stdout)
    assert "server" not in document["ranks"][0]
    texts = [note["text"] for note in document["notes"] if note["code"] == "doubt"]
    assert len(texts) == 2
    assert not mentions(
        "; ".join(texts), "rank tables contradict each other", "rank_table_16p.json: the rank"
    )


def test_a_table_beside_the_output_folder_of_a_run_is_found(tmp_path, ranks, table):
    (tmp_path / "output").mkdir()
    ranks.rename(tmp_path / "output" / "checkpoint")
    table(group_table(devices(2)))
    document = json.loads(run_well("inspect", tmp_path / "output", "--json").stdout)
    assert document["ranks"][1]["server"] == "10.0.0.0"


def test_a_damaged_file_that_is_deleted_before_it_is_identified_is_named(tmp_path, monkeypatch):
    whole, damaged = tmp_path / "rank_0" / "a.ckpt", tmp_path / "rank_1" / "a.ckpt"
    identify_foreign = formats.identify_foreign

    def delete_first(path):
        Path(path).unlink()
        return identify_foreign(path)

    monkeypatch.setattr(formats, "identify_foreign", delete_first)
    for path, data in ((whole, record()), (damaged, record()[:-1])):
        path.parent.mkdir()
        path.write_bytes(data)
    catalog = scan(str(tmp_path))
    assert list(catalog.files) == [0]
    assert str(catalog.damaged[1]) == f"{damaged}: No such file or directory"
    damaged.write_bytes(record()[:-1])
    result = run("inspect", damaged)
    assert result.exit_code == 3
    assert said(result) == f"error[unreadable]: {damaged}: No such file or directory"


@pytest.mark.parametrize(
    "names",
    [
        ["pytorch_model.bin"],
        ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
        ["weights.pt", "readme.bin"],
    ],
)
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_a_folder_of_pytorch_is_called_so_and_the_way_round_is_told(names, command, tmp_path):
    for name in names:
        is_archive = name != "readme.bin" and not name.endswith(".json")
        (tmp_path / name).write_bytes(archive("archive/data.pkl") if is_archive else b"{}")
    out = ["-o", tmp_path / "m.h5"] if command == "merge" else []
    result = run(command, tmp_path, *out)
    assert result.exit_code == 3
    listed = ", ".join(name for name in names if name != "readme.bin")
    told = rf"\]: {tmp_path}: a PyTorch checkpoint, not a MindSpore checkpoint {listed} Try: load"
    assert not mentions(said(result), told, r"safetensors\.torch\.save_file")
    result = run(command, tmp_path / names[0], *out)
    assert result.exit_code == 3
    assert "a PyTorch checkpoint, not a MindSpore checkpoint" in said(result)
