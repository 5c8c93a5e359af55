"""Rank folders and files of every spelling, and ``--pattern`` for all others."""

import shutil
from pathlib import Path
from shlex import quote

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from tests.support.corpus import GOLDEN
from tests.support.scans import fails, found, notes_of

# ------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize(
    "folder",
    [
        "rank_{}",
        "rank_{:02}",
        "rank{}",
        "rank-{}",
        "node{}",
        "node_{}",
        "ckpt_{}",
        "device{}",
        "device_{}",
        "rank_{}_ckpt",
    ],
)
def test_rank_folders_of_every_spelling_are_found(make_run, folder):
    names = {rank: f"{folder.format(rank)}/net-1_10.ckpt" for rank in (0, 1, 2, 10)}
    assert found(make_run(*names.values())) == names


def test_ranks_are_ascending_numbers(make_run):
    names = [f"rank_{rank}/net.ckpt" for rank in (10, 9, 2, 1, 0)]
    assert list(scan(make_run(*names)).files) == [0, 1, 2, 9, 10]


@pytest.mark.parametrize(
    "folder", ["device{0}/ckpt_{0}", "rank_{0}/rank_{0}", "device{0}/rank_{0}/ckpt_{0:02}"]
)
def test_the_files_of_a_rank_may_lie_in_one_folder_of_that_rank_in_its_folder(make_run, folder):
    names = {rank: f"{folder.format(rank)}/net-2_10.ckpt" for rank in (0, 1, 2, 10)}
    src = make_run(*names.values(), f"{folder.format(1)}/net-1_5.ckpt")
    make_run(f"{folder.format(0).partition('/')[0]}/train.log")
    assert found(src) == names
    assert found(src, step="2_10") == names


def test_nested_folders_of_another_rank_are_not_taken(make_run):
    src = make_run("device0/ckpt_8/a.ckpt", "device1/ckpt_9/a.ckpt")
    fails(src, "no checkpoint file in the folders of ranks 0, 1", "ckpt_8/a.ckpt", "ln -s")
    names = {8: "device0/ckpt_8/a.ckpt", 9: "device1/ckpt_9/a.ckpt"}
    assert found(src, pattern="device*/ckpt_{rank}/*") == names


def test_folders_that_are_all_of_rank_0_are_not_taken_for_lost_ranks(make_run):
    """Rank 0 was found, and the others passed for lost: --replicated wrote slices as a whole."""
    names = [f"device{rank}/ckpt_0/a.ckpt" for rank in range(3)]
    said = "paths name two ranks", "\n  device1/ckpt_0/a.ckpt, ", "Try: --pattern with {rank} for"
    fails(make_run(*names), *said)
    assert found(make_run(*names), pattern="device{rank}/ckpt_0/*") == dict(enumerate(names))


def test_a_file_in_the_rank_folder_goes_before_those_in_a_folder_in_it(make_run):
    src = make_run("rank_0/a.ckpt", "rank_0/ckpt_0/a.ckpt", "rank_1/ckpt_1/a.ckpt")
    assert found(src) == {0: "rank_0/a.ckpt", 1: "rank_1/ckpt_1/a.ckpt"}


def test_two_folders_of_the_same_rank_in_a_rank_folder_are_a_question(make_run):
    names = [f"device{r}/{kind}_{r}/a.ckpt" for r in range(2) for kind in ("ckpt", "rank")]
    src = make_run(*names)
    fails(src, "file in the folders of ranks 0, 1", "found device0/ckpt_0/a.ckpt, ")
    assert found(src, pattern="device{rank}/ckpt_{rank}/*.ckpt") == dict(enumerate(names[::2]))


def test_folders_of_devices_in_those_of_hosts_are_not_taken_for_ranks(make_run):
    src = make_run(*(f"node{n}/device{d}/a.ckpt" for n in range(2) for d in range(4)))
    (problem,) = fails(src, "file in the folders of ranks 0, 1", "node0/device1/a.ckpt")
    assert "ln -s" in problem
    assert "--pattern" not in problem


def test_another_rank_folder_without_files_changes_nothing(make_run):
    src = make_run("device0/ckpt_0/a.ckpt", "device0/rank_7/train.log", "device1/ckpt_1/a.ckpt")
    assert found(src) == {rank: f"device{rank}/ckpt_{rank}/a.ckpt" for rank in range(2)}


def test_a_strategy_beside_the_folder_with_the_files_is_that_of_the_rank(make_run, tmp_path):
    src = make_run("device0/ckpt_0/a.ckpt", "device1/ckpt_1/a.ckpt")
    strategy = (GOLDEN / "reshard_8_to_4" / "src_strategy.ckpt").read_bytes()
    for rank in range(2):
        (tmp_path / "run" / f"device{rank}" / "strategy.ckpt").write_bytes(strategy)
    assert found(src) == {rank: f"device{rank}/ckpt_{rank}/a.ckpt" for rank in range(2)}
    assert notes_of(src) == []
    paths = [str(tmp_path / "run" / f"device{rank}" / "strategy.ckpt") for rank in range(2)]
    assert scan(str(src)).strategy_files == tuple(paths)


def test_what_lies_with_nested_files_is_told_as_elsewhere(make_run):
    src = make_run("device0/ckpt_0/a.ckpt", "device1/ckpt_1/a.ckpt.tmp")
    assert scan(src).missing_ranks == (1,)
    assert any("device1/ckpt_1" not in text and "rank 1" in text for text in notes_of(src))


def test_folders_that_only_look_like_a_ranks_are_passed_over_with_a_note(make_run):
    src = make_run("rank_0/a.ckpt", "rank_0x/a.ckpt", "xrank_1/a.ckpt", "rank_/a.ckpt", "log/a.txt")
    assert found(src) == {0: "rank_0/a.ckpt"}
    (note,) = notes_of(src)
    assert note == (
        f"{src}: other files or folders among the ranks: ignored\n  log, rank_, rank_0x and 1 more"
    )


def test_two_folders_of_one_rank_are_an_error(make_run):
    src = make_run("rank_3/a.ckpt", "rank_03/a.ckpt", "rank_0/a.ckpt")
    fails(src, f"{src}: two folders for rank 3\n  rank_03 and rank_3\n  Try: move one")


def test_rank_folders_of_several_kinds_are_an_error(make_run):
    src = make_run("rank_0/a.ckpt", "rank_1/a.ckpt", "node0/a.ckpt")
    fails(src, "rank folders of several kinds\n  node0, rank_0\n  Try: --pattern")
    assert found(src, pattern="rank_{rank}/*") == {0: "rank_0/a.ckpt", 1: "rank_1/a.ckpt"}


def test_a_rank_folder_without_a_file_is_that_of_a_missing_rank(make_run, tmp_path):
    src = make_run("rank_0/a.ckpt", "rank_1/a.ckpt.tmp", "rank_3/a.ckpt")
    (tmp_path / "run" / "rank_4").mkdir()
    assert scan(src).missing_ranks == (1, 2, 4)
    assert notes_of(src) == [
        f"{src}: files of a save that did not finish: rank_1/a.ckpt.tmp",
        f"ranks 1, 2, 4: no checkpoint file found in {src}",
    ]


def test_rank_folders_that_are_all_without_a_file_are_named(make_run, tmp_path):
    src = make_run("rank_0/a.ckpt.tmp")
    (tmp_path / "run" / "rank_1").mkdir()
    hint = "copy the files into these folders; `ckpttool help source` explains"
    assert fails(src) == (
        f"{src}: no checkpoint file in the folders of ranks 0, 1\n  rank_0, rank_1\n  Try: {hint}",
        f"{src}: files of a save that did not finish: rank_0/a.ckpt.tmp",
    )


def test_files_that_are_no_finished_checkpoint_are_passed_over(make_run, tmp_path):
    others = [
        "net-9_9.ckpt.tmp",
        "net-9_9.tmp",
        "net-graph.meta",
        "net-9_9.h5.partial",
        "meta.json",
    ]
    src = make_run("rank_0/net-1_10.ckpt", *(f"rank_0/{name}" for name in others))
    (tmp_path / "run" / "rank_0" / "net-9_9.ckpt").mkdir()
    assert found(src) == {0: "rank_0/net-1_10.ckpt"}


def test_a_folder_without_checkpoints_says_what_is_looked_for(make_run):
    src = make_run("notes.txt", "x/a.txt")
    (problem,) = fails(src, "no rank folders (rank_0, rank_1, ...)", "it holds notes.txt, x/\n")
    assert problem.endswith("as SRC; `ckpttool help source` explains")
    src = make_run("a.ckpt")
    assert fails(src) == (f"{src}: no ranks in it, but one file\n  Try: {src}/a.ckpt as SRC",)


@pytest.mark.parametrize("names", [["s.ckpt"], ["strategy_0.ckpt", "strategy_1.ckpt"]])
def test_a_folder_of_strategies_is_called_that(tmp_path, names):
    for name in names:
        shutil.copy(GOLDEN / "tutorial_8_to_8_retrain" / "src_strategy.ckpt", tmp_path / name)
    (problem,) = fails(tmp_path)
    text = f"{tmp_path}: strategy files, not a checkpoint\n  {', '.join(names)}\n"
    assert problem == f"{text}  Try: the checkpoint as SRC, and -s {quote(str(tmp_path))}"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("net_rank_{rank}-1_2.ckpt", "ckpt_strategy_rank_{rank}.ckpt"),
        ("w_{rank}.ckpt", "strategy_{rank}.ckpt"),
        ("pod{host}/w_rank{rank}.ckpt", "pod{host}/train_rank{rank}.ckpt"),
        ("rank_{rank}/net.ckpt", "rank_{rank}/strategy.ckpt"),
    ],
)
def test_strategies_beside_the_files_of_ranks_are_no_candidates(make_run, name, strategy):
    names = [name.format(rank=rank, host=rank // 2) for rank in range(4)]
    root = make_run(*names)
    for rank in range(4):
        path = Path(root, strategy.format(rank=rank, host=rank // 2))
        shutil.copy(GOLDEN / "tutorial_8_to_8_retrain" / "src_strategy.ckpt", path)
    assert found(root) == dict(enumerate(names))


@pytest.mark.parametrize(("suffix", "tool"), [(".gz", "gunzip"), (".zst", "unzstd")])
@pytest.mark.parametrize("place", ["rank_{}/net-1_1.ckpt", "net_rank_{}.safetensors"])
def test_the_command_that_unpacks_files_is_named(make_run, suffix, tool, place):
    names = [place.format(rank) + suffix for rank in range(2)]
    src = make_run(*names)
    (problem,) = fails(src)
    folder = "*/" * place.count("/")
    assert problem.endswith(f"found {', '.join(names)}\n  Try: {tool} {src}/{folder}*{suffix}")


# ------------------------------------------------------------------ folders of hosts and processes


@pytest.mark.parametrize(
    ("name", "ranks_of_a_host"),
    [
        ("LOG{rank}/ckpt_{rank}/net-3_5.ckpt", 1),
        ("node-{host}/rank_{rank}/net-3_5.ckpt", 4),
        ("node_{host}/device{rank}/ckpt_{rank}/net-3_5.ckpt", 4),
        ("10.0.{host}.7/rank_{rank}/net_rank_{rank}-3_5.ckpt", 2),
        ("gpu-{host}/output/checkpoint/rank_{rank}/net-3_5.ckpt", 3),
        ("worker{host}/proc{local}/ckpt_{rank}/net-3_5.ckpt", 2),
        ("pod-{host}/net_rank_{rank}-3_5.ckpt", 5),
        ("card{rank}/net-3_5.ckpt", 1),
        ("host{host}/net_{rank}-3_5.ckpt", 2),
        ("gpu-{host}/w{rank:03}.ckpt", 4),
        ("process_{rank:02}/saved/x_{rank}.ckpt", 1),
        ("{rank}/x.ckpt", 1),
        ("rank_{rank}/ckpt/net-3_5.ckpt", 1),
        ("rank_{rank}/out/code-13B7_{rank}_1-3_5.ckpt", 1),
    ],
)
def test_folders_of_different_ranks_are_one_checkpoint(make_run, name, ranks_of_a_host):
    names = [
        name.format(rank=r, host=r // ranks_of_a_host, local=r % ranks_of_a_host)
        for r in range(ranks_of_a_host * 12)
    ]
    assert found(make_run(*names, "log/train.txt")) == dict(enumerate(names))


@pytest.mark.parametrize(
    "names",
    [
        ("a/rank_0/x.ckpt", "a/rank_1/x.ckpt", "b/rank_0/x.ckpt", "b/rank_1/x.ckpt"),
        ("exp0/ckpt_0/x.ckpt", "exp1/ckpt_0/x.ckpt"),
    ],
)
def test_folders_that_all_have_a_rank_0_are_several_checkpoints(make_run, names):
    fails(make_run(*names), "not a checkpoint, but a folder of 2 checkpoints", "as SRC")


def test_the_only_folder_of_a_host_is_named(make_run):
    src = make_run("host-0/rank_0/x.ckpt", "host-0/rank_1/x.ckpt")
    fails(src, f"a folder of 1 checkpoint\n  host-0\n  Try: {src}/host-0 as SRC")


def test_a_rank_in_the_folders_of_two_hosts_is_an_error(make_run):
    names = [f"host-{host}/rank_{rank}/x.ckpt" for host, rank in ((0, 0), (1, 1), (7, 1))]
    fails(make_run(*names), "two folders for rank 1\n  host-1/rank_1 and host-7/rank_1\n")


@pytest.mark.parametrize(
    ("names", "repeated"),
    [
        (
            [f"host{host}/net_{device}-2_10.ckpt" for host in (0, 1) for device in (0, 1)],
            "host0/net_0-2_10.ckpt, host1/net_0-2_10.ckpt",
        ),
        (
            [f"h{rank // 2}/net_rank_{rank}-2_10.ckpt" for rank in range(4)]
            + [f"h1_bak/net_rank_{rank}-2_10.ckpt" for rank in (2, 3)],
            "h1/net_rank_2-2_10.ckpt, h1_bak/net_rank_2-2_10.ckpt",
        ),
    ],
)
def test_numbers_that_repeat_in_the_folders_of_hosts_are_said(make_run, names, repeated):
    (problem,) = fails(make_run(*names), "of one rank by their names in several folders", repeated)
    assert "--pattern" not in problem
    assert "--step" not in problem


def test_a_folder_of_a_rank_may_have_several_names_counters_and_steps(make_run):
    names = [f"card{rank}/net{end}.ckpt" for rank in (0, 1) for end in ("-1_2", "-2_2", "_1-3_2")]
    assert found(make_run(*names)) == {rank: f"card{rank}/net_1-3_2.ckpt" for rank in (0, 1)}


@pytest.mark.parametrize("word", ["epoch_", "fold", "Seed-", "run", "net_v"])
def test_folders_whose_numbers_count_something_else_are_not_those_of_ranks(make_run, word):
    fails(make_run(*(f"{word}{number}/x.ckpt" for number in range(3))), "no rank folders")


def test_the_numbers_of_folders_and_of_names_with_the_word_must_agree(make_run):
    src = make_run("card0/net_rank_1.ckpt", "card1/net_rank_0.ckpt")
    assert found(src) == {0: "card1/net_rank_0.ckpt", 1: "card0/net_rank_1.ckpt"}
    fails(make_run("card0/a_rank_0.ckpt"), "no rank folders")


def test_a_host_and_a_rank_folder_without_a_file_are_missing_ranks(make_run, tmp_path):
    src = make_run("h0/rank_0/a.ckpt", "h0/rank_1/a.ckpt.tmp", "h1/rank_2/a.ckpt")
    (tmp_path / "run" / "h1" / "rank_3").mkdir()
    assert scan(src).missing_ranks == (1, 3)
    assert "files of a save that did not finish: h0/rank_1/a.ckpt.tmp" in "".join(notes_of(src))


def test_folders_inside_those_of_ranks_must_have_one_name(make_run):
    """One file of each rank would be taken, and they are of different steps."""
    src = make_run("rank_0/it_100/x.ckpt", "rank_1/it_200/x.ckpt")
    fails(
        src, "lie in folders of different names", "rank_0/it_100, rank_1/it_200\n  Try: --pattern"
    )
    src = make_run("rank_0/it_200/x.ckpt")  # which of two folders is meant, is not known
    fails(src, "lie in folders of different names", "rank_0/it_100, rank_0/it_200\n")


# ----------------------------------------------------------------------------------- ranks in names


@pytest.mark.parametrize(
    "name",
    [
        "llama_rank_{}-10_2.ckpt",
        "llama_7b_rank_{}_1-10_2.ckpt",
        "ttp_rank_{}-10_2.ckpt",
        "rank_{}.ckpt",
        "rank{}-10_2.safetensors.ckpt",
        "checkpoint_{}-10_2.ckpt",
        "checkpoint_{}.ckpt",
        "net{}_part0.ckpt",
        "net.ckpt",
    ],
)
@pytest.mark.parametrize("ranks", [range(1), range(3), range(9, 12)])
def test_files_with_their_rank_in_the_name_are_found_in_rank_folders(make_run, name, ranks):
    names = {rank: f"rank_{rank}/{name.format(rank)}" for rank in ranks}
    assert found(make_run(*names.values())) == names


@pytest.mark.parametrize("name", ["llama_rank_{}-10_2.ckpt", "ttp_rank_{}-10_2.ckpt", "rank{}.h5"])
def test_files_with_their_rank_in_the_name_are_found_without_folders(make_run, name):
    names = {rank: name.format(rank) for rank in (0, 1, 2, 10)}
    if name.endswith(".h5"):
        src = make_run(*names.values())
        assert set(scan(src).damaged) == set(names)  # found, though they are no HDF5
    else:
        assert found(make_run(*names.values())) == names


@pytest.mark.parametrize("name", ["filerted_{}.ckpt", "code-13B7_{}-5_2.ckpt", "w{:03}-1_2.ckpt"])
def test_flat_files_that_differ_in_one_number_are_those_of_ranks(make_run, name):
    names = [name.format(rank) for rank in range(12)]
    assert found(make_run(*names, "best.ckpt")) == dict(enumerate(names))


def test_flat_files_without_the_word_may_have_steps_and_counters(make_run):
    names = [f"net2_{rank}-{step}_9.ckpt" for rank in range(3) for step in (1, 2)]
    src = make_run(*names, "net2_2_1-3_9.ckpt")
    assert found(src, step="1_9") == {rank: f"net2_{rank}-1_9.ckpt" for rank in range(3)}
    fails(src, "step 3_9 is not on ranks 0, 1", step="3_9")


@pytest.mark.parametrize(
    "names",
    [
        ["epoch_0.ckpt", "epoch_1.ckpt"],
        ["fold0.ckpt", "fold1.ckpt", "fold2.ckpt"],
        ["net-1_2.ckpt", "net-2_2.ckpt", "net_1-1_2.ckpt"],
        ["net_0.ckpt", "net_2.ckpt"],
        ["a_0_0.ckpt", "a_0_1.ckpt", "a_1_0.ckpt"],
    ],
)
def test_flat_files_that_differ_in_another_number_are_not_those_of_ranks(make_run, names):
    fails(make_run(*names), "no rank folders")


def test_other_flat_files_do_no_harm(make_run):
    src = make_run("llama_rank_0-1_1.ckpt", "llama_rank_1-1_1.ckpt", "merged.ckpt", "frank_2.ckpt")
    assert list(found(src)) == [0, 1]


def test_a_number_in_a_name_is_its_rank_only_if_it_is_the_folders(make_run):
    src = make_run("rank_0/part_7.ckpt", "rank_1/part_7.ckpt")
    assert found(src) == {0: "rank_0/part_7.ckpt", 1: "rank_1/part_7.ckpt"}
    fails(
        make_run("rank_2/part_2.ckpt", "rank_2/part_7.ckpt", "rank_3/part_7.ckpt"),
        "several checkpoints in the folder of rank 2",
    )


# ----------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("node{rank}/CKP_1-4_32.ckpt", ["node0/CKP_1-4_32.ckpt", "node1/CKP_1-4_32.ckpt"]),
        ("*{rank}/*", ["a0/x.ckpt", "a1/x.ckpt"]),
        ("{rank}.ckpt", ["0.ckpt", "1.ckpt"]),
        ("part{rank}of2.*", ["part0of2.ckpt", "part1of2.ckpt"]),
        ("d/{rank}/w_{rank}.ckpt", ["d/0/w_0.ckpt", "d/1/w_1.ckpt"]),
        ("*/rank_{rank}/a.ckpt", ["x/rank_0/a.ckpt", "y/rank_1/a.ckpt"]),
        ("a+b.{rank}.bin", ["a+b.0.bin", "a+b.1.bin"]),
    ],
)
def test_patterns_say_where_the_files_are(make_run, pattern, names):
    src = make_run(*names, "rank_7/other/a.ckpt", "notes.txt", "d/0/w_1.ckpt")
    assert found(src, pattern=pattern) == dict(enumerate(names))


def test_wildcards_stand_for_finished_checkpoints_only(make_run):
    others = ["a.ckpt.tmp", "a-graph.meta", "meta.json", "b.h5.partial"]
    src = make_run("n0/a.ckpt", *(f"n0/{name}" for name in others))
    assert found(src, pattern="n{rank}/*") == {0: "n0/a.ckpt"}


def test_a_pattern_may_leave_steps_to_choose_from(make_run):
    src = make_run(*(f"n{r}/CKP-{step}.ckpt" for r in range(2) for step in ("9_1", "10_1")))
    assert scan(src, SourceOptions(pattern="n{rank}/CKP-*")).step == "10_1"
    assert scan(src, SourceOptions(pattern="n{rank}/CKP-*", step="9_1")).step == "9_1"


def test_a_pattern_that_matches_nothing_or_has_no_rank_is_an_error(make_run):
    src = make_run("rank_0/a.ckpt")
    said = "no file matches --pattern 'x{rank}/a.ckpt'\n  found rank_0/a.ckpt"
    fails(src, said, pattern="x{rank}/a.ckpt")
    fails(src, "--pattern rank_0/a.ckpt lacks {rank}", pattern="rank_0/a.ckpt")


def test_two_files_of_one_rank_by_a_pattern_are_an_error(make_run):
    src = make_run("x/rank_0/a.ckpt", "y/rank_0/a.ckpt", "y/rank_1/a.ckpt")
    fails(src, "two files of one step for rank 0", pattern="*/rank_{rank}/a.ckpt")


@pytest.mark.parametrize(
    "name",
    [
        "host{0}/x.ckpt",
        "run_{0}/checkpoints/net-1_10.ckpt",
        "net_{0}-1_10.ckpt",
        "slice {0}/x.ckpt",
        "w{0}/d{0}/x_{0}.ckpt",
    ],
)
def test_files_without_ranks_are_listed(make_run, name):
    """Folders whose numbers do not begin at 0 may be anything."""
    names = [name.format(rank) for rank in range(1, 9)]
    listed = f"found {', '.join(names[:3])} and 5 more\n  Try: --pattern, or the folder of"
    fails(make_run(*names), "no rank folders", listed)


@pytest.mark.parametrize("folder", ["exp2024", "a/b/c"])
@pytest.mark.parametrize("name", ["card{}/ckpt/net-1_10.ckpt", "rank_{}/x.ckpt"])
def test_checkpoints_further_below_are_listed(make_run, folder, name):
    src = make_run(*(f"{folder}/{name.format(rank)}" for rank in range(4)))
    fails(src, f"a folder of 1 checkpoint\n  {folder}\n  Try: {src}/{folder} as SRC")


@pytest.mark.parametrize("name", ["host{0}/dev{1}/r{2}/net.ckpt", "10.0.0.{0}/card{2}/net.ckpt"])
def test_numbered_folders_in_those_of_hosts_are_those_of_ranks(make_run, name):
    """Ranks of two hosts: the numbers of devices begin anew, those of ranks do not."""
    names = [name.format(r // 4, r % 4, r) for r in range(8)]
    assert found(make_run(*names)) == dict(enumerate(names))


def test_numbered_folders_that_two_hosts_have_are_not_those_of_ranks(make_run):
    names = [f"host{host}/card{card}/net.ckpt" for host in (0, 1) for card in range(4)]
    fails(make_run(*names), "a folder of 2 checkpoints\n  host0, host1")


# -------------------------------------------------------------------- names of another rank


@pytest.mark.parametrize(
    ("names", "misplaced", "hint"),
    [
        (
            ["rank_0/l_rank_0-2_10.ckpt", "rank_1/l_rank_0-2_10.ckpt"]
            + [f"rank_{rank}/l_rank_{rank}-2_10.ckpt" for rank in (2, 3)],
            "rank_1/l_rank_0-2_10.ckpt",
            "Try: move it away; `ckpttool help source` explains",
        ),
        (
            [f"device{rank}/net_rank{rank}.safetensors" for rank in (0, 1, 3)]
            + ["device1/net_rank2.safetensors", "device2/note.txt"],
            "device1/net_rank2.safetensors",
            "mv {}/device1/net_rank2.safetensors {}/device2/",
        ),
        (
            [f"rank_{rank}/l_rank_{rank}-1_1.ckpt" for rank in range(5)]
            + ["rank_4/l_rank_9-1_1.ckpt", "rank_3/l_rank_1-1_2.ckpt"],
            "rank_3/l_rank_1-1_2.ckpt, rank_4/l_rank_9-1_1.ckpt",
            "Try: move them away; `ckpttool help source` explains",
        ),
        (
            ["rank_0/l_rank_0-1_1.ckpt", "rank_0/l_rank_1-1_1.ckpt", "rank_1/l_rank_0-1_1.ckpt"],
            "rank_0/l_rank_1-1_1.ckpt, rank_1/l_rank_0-1_1.ckpt",
            "Try: move them away; `ckpttool help source` explains",
        ),
        (
            [f"rank_{rank}/l_rank_{other}.ckpt" for rank in (0, 1) for other in (0, 1)]
            + [f"rank_{rank}/l_rank_0.ckpt" for rank in (2, 3, 4)],
            "rank_2/l_rank_0.ckpt, rank_3/l_rank_0.ckpt, rank_4/l_rank_0.ckpt",
            "Try: move them away; `ckpttool help source` explains",
        ),
        (
            [f"rank_0/l_rank_{rank}.ckpt" for rank in range(4)],
            "rank_0/l_rank_1.ckpt, rank_0/l_rank_2.ckpt, rank_0/l_rank_3.ckpt",
            "Try: {}/rank_0 as SRC",
        ),
    ],
)
def test_a_file_in_the_folder_of_another_rank_than_it_names_is_said(
    make_run, names, misplaced, hint
):
    """Else the advice is to copy files that are there."""
    root = make_run(*names)
    texts = fails(root, "in the folder of another rank than the name says", misplaced)
    assert hint.format(root, root) in "\n".join(texts)
    assert "copy the missing files" not in "\n".join(texts)


@pytest.mark.parametrize(
    "names",
    [
        ["rank_0/l_rank_0-2_10.ckpt", "rank_1/l_rank_0-2_10.ckpt"],
        [f"rank_{rank}/net_rank_0.ckpt" for rank in range(4)],
    ],
)
def test_a_name_that_is_the_same_in_all_folders_says_no_rank(make_run, names):
    assert found(make_run(*names)) == dict(enumerate(names))


@pytest.mark.parametrize(
    ("names", "by_name", "by_folder"),
    [
        (
            ["rank_0/l_rank_1-2_10.ckpt", "rank_1/l_rank_0-2_10.ckpt"],
            "*/l_rank_{rank}*.ckpt",
            "rank_{rank}/*.ckpt",
        ),
        (
            [f"10.0.0.{r}/device{r}/w_rank{(r + 1) % 4}.ckpt" for r in range(4)],
            "*/*/w_rank{rank}*.ckpt",
            "*/device{rank}/*.ckpt",
        ),
        (
            ["node0/o/rank_02-1_1.ckpt", "node1/o/rank_01-1_1.ckpt", "node2/o/rank_00-1_1.ckpt"],
            "*/*/rank_{rank}*.ckpt",
            "node{rank}/*/*.ckpt",
        ),
    ],
)
def test_names_that_say_the_ranks_in_another_order_are_a_question(
    make_run, names, by_name, by_folder
):
    """The halves of a tensor would be exchanged."""
    root = make_run(*names)
    fails(
        root,
        f"another rank than the name says\n  {names[0]}, ",
        f"Try: --pattern '{by_name}' if the names are right, or --pattern '{by_folder}'",
    )
    assert set(found(root, pattern=by_name).values()) == set(names)
    assert found(root, pattern=by_folder) == dict(enumerate(names))


def test_numbers_of_devices_in_names_are_no_exchanged_ranks(make_run):
    names = [f"rank_{rank}/net_rank_{rank % 4}.ckpt" for rank in range(8)]
    assert found(make_run(*names)) == dict(enumerate(names))


def test_counters_do_not_hide_that_ranks_are_exchanged(make_run):
    names = ["rank_0/l_rank_1-2_10.ckpt", "rank_1/l_rank_0_1-2_10.ckpt"]
    fails(make_run(*names), "another rank than the name says", ", ".join(names))


@pytest.mark.parametrize(
    "name", ["rank_{}/llama_rank_{}-2_10.ckpt", "10.0.0.{0}/device{0}/net_rank{1}.ckpt"]
)
def test_files_of_all_ranks_in_the_folder_of_each_are_copies(make_run, name):
    root = make_run(*(name.format(rank, other) for rank in range(3) for other in range(3)))
    assert found(root) == {rank: name.format(rank, rank) for rank in range(3)}
    (note,) = notes_of(root, "skipped")
    assert "6 files of other ranks than their folders: ignored" in note


@pytest.mark.parametrize(
    "names", [("net_1-3_2", "net_0-3_2", "net_2-3_2"), ("a1_1-2_2", "a1_0-2_2")]
)
def test_numbers_in_names_that_are_those_of_other_ranks_are_refused(make_run, names):
    root = make_run(*(f"rank_{rank}/{name}.ckpt" for rank, name in enumerate(names)))
    fails(root, "2 files in the folder of another rank than the name says")
    assert len(found(root, pattern="rank_{rank}/*")) == len(names)
