"""What the names of files say about rank, run and step."""

from pathlib import Path

import pytest

from ckpttool.discovery.file_names import RankFile, read_names


def parts(names):
    """Return the parts of names, which are given as ``{rank: [name, ...]}``."""
    files = [RankFile(rank, Path(f"rank_{rank}", n), n) for rank in names for n in names[rank]]
    return {
        (item.rank, item.name): (name.prefix, name.counter, name.step and name.step.label)
        for item, name in zip(files, read_names(files), strict=True)
    }


def ranks(count, *names):
    return {rank: [name.format(rank) for name in names] for rank in range(count)}


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("llama_rank_{rank}", "llama_rank_{}"),
        ("alpha-2B6_{rank}", "alpha-2B6_{}"),
        ("code-13B7_{rank}", "code-13B7_{:02}"),
        ("net{rank}", "net{}"),
        ("7b_{rank}of8", "7b_{}of8"),
    ],
)
def test_the_number_of_the_rank_is_found_with_and_without_the_word(prefix, name):
    names = parts(ranks(12, f"{name}-9_2.ckpt", f"{name}_1-10_2.ckpt"))
    assert list(names.values()) == [(prefix, None, "9_2"), (prefix, 1, "10_2")] * 12


def test_a_number_that_is_the_ranks_on_some_ranks_alone_is_part_of_the_name():
    names = ranks(3, "alpha-2B6-1_2.ckpt", "net_1-1_2.ckpt", "net_2-1_2.ckpt")
    assert {prefix for prefix, *_ in parts(names).values()} == {"alpha-2B6", "net_1", "net_2"}


def test_ranks_of_a_run_may_have_different_counters():
    """MindSpore counts in the folder of each rank, and rank 1's was new in the second run."""
    names = {0: ["net-3_2.ckpt", "net_1-3_2.ckpt"], 1: ["net-3_2.ckpt"], 2: ["net_1-3_2.ckpt"]}
    assert set(parts(names).values()) == {("net", None, "3_2"), ("net", 1, "3_2")}


def test_a_rank_without_a_counter_still_has_its_number():
    names = {0: ["a_0_1-2_2.ckpt"], 1: ["a_1-2_2.ckpt"], 2: ["a_2-2_2.ckpt", "a_2_1-2_2.ckpt"]}
    assert {(prefix, counter) for prefix, counter, _ in parts(names).values()} == {
        ("a_{rank}", 1),
        ("a_{rank}", None),
    }


def test_a_run_on_fewer_ranks_has_their_numbers():
    names = ranks(4, "old_{}-1_2.ckpt")
    names[0].append("new_0-2_2.ckpt")
    names[1].append("new_1-2_2.ckpt")
    assert {prefix for prefix, *_ in parts(names).values()} == {"old_{rank}", "new_{rank}"}


def test_counters_that_happen_to_be_the_ranks_are_counters():
    """There is no counter 0, and rank 0 has a file without a counter alone."""
    names = {r: ["net-1_2.ckpt", f"net_{r}-2_2.ckpt"] for r in (1, 2)}
    files = parts({0: ["net-1_2.ckpt", "net-2_2.ckpt"], **names})
    assert files[2, "net_2-2_2.ckpt"] == ("net", 2, "2_2")


def test_a_number_before_the_step_is_no_counter_without_a_name_that_it_counts():
    assert set(parts(ranks(2, "pangu_2-1_2.ckpt", "net_1.ckpt", "net.ckpt")).values()) == {
        ("pangu_2", None, "1_2"),
        ("net_1", None, None),
        ("net", None, None),
    }
    assert parts(ranks(2, "pangu_2-1_2.ckpt", "pangu_2_1-1_2.ckpt"))[1, "pangu_2_1-1_2.ckpt"] == (
        "pangu_2",
        1,
        "1_2",
    )


def test_one_file_for_each_rank_is_one_checkpoint_whatever_the_names():
    assert len({prefix for prefix, *_ in parts({0: ["a.ckpt"], 1: ["b.ckpt"]}).values()}) == 1
    names = {0: ["a-1_2.ckpt"], 1: ["b-1_2.ckpt"]}
    assert {prefix for prefix, *_ in parts(names).values()} == {"a"}
    names = {0: ["a-1_2.ckpt"], 1: ["b-1_2.ckpt", "c-1_2.ckpt"]}
    assert len({prefix for prefix, *_ in parts(names).values()}) == 3
