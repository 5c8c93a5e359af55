"""Devices of several hosts, which only a rank table makes ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scans import fails, found, notes_of

PER_HOST = 4


def table(**first_ranks):
    """Return a rank table with the devices of servers; ``_`` in a name stands for a dot."""
    servers = [
        {
            "server_id": server.removeprefix("s_").replace("_", "."),
            "device": [
                {"device_id": str(i), "rank_id": str(first + i), "device_ip": f"1.1.1.{first + i}"}
                for i in range(PER_HOST)
            ],
        }
        for server, first in first_ranks.items()
    ]
    return json.dumps({"version": "1.0", "status": "completed", "server_list": servers})


def names_of(*hosts, inside="device{device}/net-1_2.ckpt"):
    """Return the file of each rank; hosts are in the order of ranks."""
    return [
        f"{host}/{inside.format(device=device, rank=PER_HOST * i + device)}"
        for i, host in enumerate(hosts)
        for device in range(PER_HOST)
    ]


@pytest.mark.parametrize(
    "inside",
    [
        "device{device}/net-1_2.ckpt",
        "device{device}/ckpt_{device}/net-1_2.ckpt",
    ],
)
@pytest.mark.parametrize(
    ("hosts", "ranks_of"),
    [
        (("10.0.0.2", "10.0.0.1"), table(s_10_0_0_2=0, s_10_0_0_1=PER_HOST)),
        (("h0", "h1"), table(s_10_0_0_9=0, s_10_0_0_10=PER_HOST)),
        (("node1", "node2"), table(x=0, y=PER_HOST)),
    ],
)
def test_a_table_beside_the_hosts_says_which_ranks_their_devices_are(
    make_run, hosts, ranks_of, inside
):
    names = names_of(*hosts, inside=inside)
    src = Path(make_run(*names))
    (src / "rank_table_8pcs.json").write_text(ranks_of)
    assert found(src) == dict(enumerate(names))
    assert notes_of(src)[:1] == [f"ranks by the rank table: {hosts[1]}/device0 is rank {PER_HOST}"]


def test_each_host_may_have_the_table_of_its_own_devices(make_run):
    names = names_of("b", "a")
    src = Path(make_run(*names))
    (src / "b" / "hccl_4p.json").write_text(table(x=0))
    (src / "a" / "hccl_4p.json").write_text(table(y=PER_HOST))
    assert found(src) == dict(enumerate(names))


@pytest.mark.parametrize(
    ("hosts", "tables"),
    [
        (("host0", "host1"), []),
        (("host0", "host2"), [("rank_table.json", table(x=0, y=4))]),
        (("host0", "host1"), [("rank_table.json", table(x=0))]),
        (("host0", "host1"), [("rank_table.json", table(s_10_0_0_2=0, s_10_0_0_1=4))]),
        (("a", "b"), [("rank_table.json", table(x=0, y=4))]),
        (("a", "b"), [("a/hccl.json", table(x=0)), ("b/hccl.json", table(y=0))]),
    ],
)
def test_without_a_table_that_tells_hosts_apart_each_is_a_checkpoint(make_run, hosts, tables):
    src = Path(make_run(*names_of(*hosts)))
    for name, content in tables:
        (src / name).write_text(content)
    fails(src, "not a checkpoint, but a folder of 2 checkpoints")


def test_files_under_the_rank_tables_order_are_not_hidden_by_names(make_run):
    """Names of files that have their rank agree with the table."""
    names = names_of("host0", "host1", inside="device{device}/net_rank_{rank}-1_2.ckpt")
    src = Path(make_run(*names))
    (src / "rank_table.json").write_text(table(x=0, y=PER_HOST))
    assert found(src) == dict(enumerate(names))
