"""Finding the rank files of one step in folders of every shape."""

import shlex

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.errors import FormatError
from ckpttool.model.catalog import MergedCatalog
from tests.support.corpus import GOLDEN
from tests.support.file_bytes import record
from tests.support.scans import notes_of, problems_of


@pytest.fixture
def make(tmp_path):
    """A function that makes files, with their own path as the name of a tensor; gives the root."""

    def made(*names):
        for name in names:
            path = tmp_path / "run" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record(name))
        return str(tmp_path / "run")

    return made


def found(src, **how):
    """Rank -> path of its file below the root, from the tensor in it."""
    catalog = scan(src, SourceOptions(**how))
    assert not catalog.damaged
    return {rank: next(iter(file.tensors)) for rank, file in catalog.files.items()}


def fails(src, *reasons, **how):
    problems = problems_of(src, **how)
    text = "\n".join(problems)
    for reason in reasons:
        assert reason in text, text
    return problems


# ------------------------------------------------------------------------ folders


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
def test_rank_folders_of_every_spelling_are_found(make, folder):
    names = {rank: f"{folder.format(rank)}/net-1_10.ckpt" for rank in (0, 1, 2, 10)}
    assert found(make(*names.values())) == names


def test_ranks_are_ascending_numbers(make):
    names = [f"rank_{rank}/net.ckpt" for rank in (10, 9, 2, 1, 0)]
    assert list(scan(make(*names)).files) == [0, 1, 2, 9, 10]


@pytest.mark.parametrize(
    "folder", ["device{0}/ckpt_{0}", "rank_{0}/rank_{0}", "device{0}/rank_{0}/ckpt_{0:02}"]
)
def test_the_files_of_a_rank_may_lie_in_one_folder_of_that_rank_in_its_folder(make, folder):
    names = {rank: f"{folder.format(rank)}/net-2_10.ckpt" for rank in (0, 1, 2, 10)}
    src = make(*names.values(), f"{folder.format(1)}/net-1_5.ckpt")
    make(f"{folder.format(0).partition('/')[0]}/train.log")
    assert found(src) == names
    assert found(src, step="2_10") == names


def test_nested_folders_of_another_rank_are_not_taken(make):
    src = make("device0/ckpt_8/a.ckpt", "device1/ckpt_9/a.ckpt")
    (problem,) = fails(src, "ranks 0, 1: no checkpoint file in", "device0/ckpt_8/a.ckpt")
    pattern = problem.partition("--pattern '")[2].partition("'")[0]
    assert found(src, pattern=pattern)


def test_folders_that_are_all_of_rank_0_are_not_taken_for_lost_ranks(make):
    """Rank 0 was found, and the others passed for lost: --replicated wrote slices as a whole."""
    names = [f"device{rank}/ckpt_0/a.ckpt" for rank in range(3)]
    (problem,) = fails(make(*names), "device1/ckpt_0/a.ckpt, ", "the path names two ranks")
    pattern = problem.partition("--pattern '")[2].partition("'")[0]
    assert found(make(*names), pattern=pattern) == dict(enumerate(names))


def test_a_file_in_the_rank_folder_goes_before_those_in_a_folder_in_it(make):
    src = make("rank_0/a.ckpt", "rank_0/ckpt_0/a.ckpt", "rank_1/ckpt_1/a.ckpt")
    assert found(src) == {0: "rank_0/a.ckpt", 1: "rank_1/ckpt_1/a.ckpt"}


def test_two_folders_of_the_same_rank_in_a_rank_folder_are_a_question(make):
    names = [f"device{r}/{kind}_{r}/a.ckpt" for r in range(2) for kind in ("ckpt", "rank")]
    src = make(*names)
    (problem,) = fails(
        src, "ranks 0, 1: no checkpoint file in", "'device{rank}/ckpt_{rank}/*.ckpt'"
    )
    assert problem.count("--pattern") == 1
    assert found(src, pattern="device{rank}/ckpt_{rank}/*.ckpt") == dict(enumerate(names[::2]))


def test_folders_of_devices_in_those_of_hosts_are_not_taken_for_ranks(make):
    src = make(*(f"node{n}/device{d}/a.ckpt" for n in range(2) for d in range(4)))
    (problem,) = fails(src, "ranks 0, 1: no checkpoint file in", "node0/device1/a.ckpt")
    assert "ln -s" in problem
    assert "--pattern" not in problem


def test_another_rank_folder_without_files_changes_nothing(make):
    src = make("device0/ckpt_0/a.ckpt", "device0/rank_7/train.log", "device1/ckpt_1/a.ckpt")
    assert found(src) == {rank: f"device{rank}/ckpt_{rank}/a.ckpt" for rank in range(2)}


def test_a_strategy_beside_the_folder_with_the_files_is_passed_over(make, tmp_path):
    src = make("device0/ckpt_0/a.ckpt", "device1/ckpt_1/a.ckpt")
    strategy = (GOLDEN / "reshard_8_to_4" / "src_strategy.ckpt").read_bytes()
    for rank in range(2):
        (tmp_path / "run" / f"device{rank}" / "strategy.ckpt").write_bytes(strategy)
    assert found(src) == {rank: f"device{rank}/ckpt_{rank}/a.ckpt" for rank in range(2)}
    (note,) = notes_of(src)
    assert note.endswith(
        "device0/strategy.ckpt, device1/strategy.ckpt: strategy files; -s takes them"
    )


def test_what_lies_with_nested_files_is_told_as_elsewhere(make):
    src = make("device0/ckpt_0/a.ckpt", "device1/ckpt_1/a.ckpt.tmp")
    assert scan(src).missing_ranks == (1,)
    assert any("device1/ckpt_1" not in text and "rank 1" in text for text in notes_of(src))


def test_folders_that_only_look_like_a_ranks_are_passed_over_with_a_note(make):
    src = make("rank_0/a.ckpt", "rank_0x/a.ckpt", "xrank_1/a.ckpt", "rank_/a.ckpt", "log/a.txt")
    assert found(src) == {0: "rank_0/a.ckpt"}
    assert notes_of(src) == [f"{src}: passed over log, rank_, rank_0x, xrank_1"]


def test_two_folders_of_one_rank_are_an_error(make):
    src = make("rank_3/a.ckpt", "rank_03/a.ckpt", "rank_0/a.ckpt")
    fails(src, f"rank 3: two folders, {src}/rank_03 and {src}/rank_3")


def test_rank_folders_of_several_kinds_are_an_error(make):
    src = make("rank_0/a.ckpt", "rank_1/a.ckpt", "node0/a.ckpt")
    fails(src, "rank folders of several kinds (node0, rank_0); say which with --pattern")
    assert found(src, pattern="rank_{rank}/*") == {0: "rank_0/a.ckpt", 1: "rank_1/a.ckpt"}


def test_a_rank_folder_without_a_file_is_that_of_a_missing_rank(make, tmp_path):
    src = make("rank_0/a.ckpt", "rank_1/a.ckpt.tmp", "rank_3/a.ckpt")
    (tmp_path / "run" / "rank_4").mkdir()
    assert scan(src).missing_ranks == (1, 2, 4)
    assert notes_of(src) == [
        f"{src}: left over from a save that did not finish: rank_1/a.ckpt.tmp",
        f"ranks 1, 2, 4: no checkpoint file found in {src}",
    ]


def test_rank_folders_that_are_all_without_a_file_are_named(make, tmp_path):
    src = make("rank_0/a.ckpt.tmp")
    (tmp_path / "run" / "rank_1").mkdir()
    assert fails(src) == (
        f"ranks 0, 1: no checkpoint file in {src}/rank_0, {src}/rank_1",
        f"{src}: left over from a save that did not finish: rank_0/a.ckpt.tmp",
    )


def test_files_that_are_no_finished_checkpoint_are_passed_over(make, tmp_path):
    others = [
        "net-9_9.ckpt.tmp",
        "net-9_9.tmp",
        "net-graph.meta",
        "net-9_9.h5.partial",
        "meta.json",
    ]
    src = make("rank_0/net-1_10.ckpt", *(f"rank_0/{name}" for name in others))
    (tmp_path / "run" / "rank_0" / "net-9_9.ckpt").mkdir()
    assert found(src) == {0: "rank_0/net-1_10.ckpt"}


def test_a_folder_without_checkpoints_says_what_is_looked_for(make):
    fails(make("notes.txt"), "no rank folders (rank_0, rank_1, ...)", "--pattern")
    fails(make("a.ckpt"), "to use one file, name it:", "a.ckpt")


def test_a_file_is_rank_zero_and_nothing_else_is_looked_for(make):
    src = make("rank_3/net-1_10.ckpt", "rank_3/net-2_10.ckpt")
    catalog = scan(f"{src}/rank_3/net-1_10.ckpt")
    assert list(catalog.files) == [0]
    assert isinstance(catalog, MergedCatalog)
    assert not isinstance(scan(src), MergedCatalog)


def test_a_missing_folder_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        scan(str(tmp_path / "none"))


def test_a_damaged_file_alone_is_an_error_and_of_several_is_collected(make, tmp_path):
    src = make(*(f"rank_{rank}/a.ckpt" for rank in range(4)))
    for rank in (1, 3):
        (tmp_path / "run" / f"rank_{rank}" / "a.ckpt").write_bytes(b"\xff")
    catalog = scan(src)
    assert list(catalog.files) == [0, 2]
    assert list(catalog.damaged) == [1, 3]
    assert f"{src}/rank_3/a.ckpt: byte 0:" in str(catalog.damaged[3])
    with pytest.raises(FormatError):
        scan(f"{src}/rank_1/a.ckpt")


# ------------------------------------------------------------------------ MindFormers, own outputs


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
        "net.ckpt",
    ],
)
@pytest.mark.parametrize("ranks", [range(1), range(3), range(9, 12)])
def test_files_with_their_rank_in_the_name_are_found_in_rank_folders(make, name, ranks):
    names = {rank: f"rank_{rank}/{name.format(rank)}" for rank in ranks}
    assert found(make(*names.values())) == names


@pytest.mark.parametrize("name", ["llama_rank_{}-10_2.ckpt", "ttp_rank_{}-10_2.ckpt", "rank{}.h5"])
def test_files_with_their_rank_in_the_name_are_found_without_folders(make, name):
    names = {rank: name.format(rank) for rank in (0, 1, 2, 10)}
    if name.endswith(".h5"):
        src = make(*names.values())
        assert set(scan(src).damaged) == set(names)  # found, though they are no HDF5
    else:
        assert found(make(*names.values())) == names


def test_the_steps_of_flat_files_are_told_apart(make):
    names = [f"llama_rank_{rank}-{step}_2.ckpt" for rank in range(2) for step in (9, 10)]
    assert found(make(*names)) == {rank: f"llama_rank_{rank}-10_2.ckpt" for rank in range(2)}


def test_other_flat_files_do_no_harm(make):
    src = make("llama_rank_0-1_1.ckpt", "llama_rank_1-1_1.ckpt", "merged.ckpt", "frank_2.ckpt")
    assert list(found(src)) == [0, 1]


def test_a_number_in_a_name_is_its_rank_only_if_it_is_the_folders(make):
    src = make("rank_0/part_7.ckpt", "rank_1/part_7.ckpt")
    assert found(src) == {0: "rank_0/part_7.ckpt", 1: "rank_1/part_7.ckpt"}
    fails(make("rank_2/part_2.ckpt", "rank_2/part_7.ckpt", "rank_3/part_7.ckpt"), "several files")


# ------------------------------------------------------------------------ steps


def steps(make, *labels, ranks=2, suffix=".ckpt"):
    return make(*(f"rank_{r}/CKP-{step}{suffix}" for r in range(ranks) for step in labels))


def test_steps_are_compared_as_numbers(make):
    src = steps(make, "9_5", "10_2", "10_10", "2_99")
    assert found(src)[1] == "rank_1/CKP-10_10.ckpt"
    assert scan(src).step == "10_10"
    assert notes_of(src) == ["step 10_10, the newest of 4"]


def test_a_single_step_needs_no_note(make):
    src = steps(make, "9_5")
    assert (scan(src).step, notes_of(src)) == ("9_5", [])


def test_names_without_a_step_have_none(make):
    assert scan(make("rank_0/net.ckpt")).step is None


def test_the_newest_step_that_every_rank_has_is_taken_and_newer_ones_are_noted(make):
    src = steps(make, "9_5", "10_2")
    make("rank_0/CKP-11_1.ckpt", "rank_0/CKP-12_1.ckpt")
    assert scan(src).step == "10_2"
    assert notes_of(src) == [
        "step 10_2, the newest that every rank has (step 12_1 is not in rank 1)"
    ]


def test_a_save_on_a_breakdown_is_newer_than_the_same_step(make):
    assert scan(steps(make, "10_2", "10_2_breakpoint")).step == "10_2_breakpoint"


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("9_5", "9_5"),
        ("CKP-9_5", "9_5"),
        ("10_2", "10_2"),
        ("2", "10_2"),  # a number of one step alone will do
        ("9", "9_5"),
        ("10_5_breakpoint", "10_5_breakpoint"),
    ],
)
def test_a_step_is_chosen_in_several_spellings(make, wanted, taken, suffix):
    src = steps(make, "9_5", "10_2", "10_5", suffix=suffix)
    make(*(f"rank_{r}/CKP-10_5_breakpoint{suffix}" for r in range(2)))
    catalog = scan(src, SourceOptions(step=wanted))
    assert catalog.step == taken
    assert scan(src, SourceOptions(step=f"CKP-{taken}{suffix}")).step == taken


def test_a_number_that_several_steps_have_is_an_error(make):
    fails(steps(make, "1_1", "10_1", "1_10"), "10_1, 1_1, 1_10; give epoch and step", step="1")


def test_steps_of_different_training_runs_are_not_compared(make):
    names = ("actor-9_1", "critic-12_1")
    src = make(*(f"rank_{rank}/{name}.ckpt" for rank in range(2) for name in names))
    fails(src, "nothing says which is meant", "actor-9_1.ckpt", "critic-12_1.ckpt")
    assert scan(src, SourceOptions(step="9_1")).step == "9_1"


def test_of_rivals_the_files_of_one_rank_are_named(make):
    src = make("rank_0/net_rank_0-1_1.ckpt", *(f"rank_1/net_rank_{r}-1_1.ckpt" for r in (1, 2)))
    fails(src, "several files for rank 1,", "meant: net_rank_1-1_1.ckpt, net_rank_2-1_1.ckpt;")


def test_a_file_of_flat_names_is_chosen_by_any_ranks_name(make):
    names = [f"net_rank_{rank}-{step}_2.ckpt" for rank in range(2) for step in (9, 10)]
    src = make(*names)
    for wanted in ("9_2", "net_rank_0-9_2.ckpt", "net_rank_1-9_2"):
        assert found(src, step=wanted) == {r: f"net_rank_{r}-9_2.ckpt" for r in range(2)}


def test_a_step_that_is_not_there_names_those_that_are(make):
    fails(steps(make, "9_5", "10_2"), "no file of step 3_3; there are 10_2, 9_5", step="3_3")


@pytest.mark.parametrize("step", ["9" * 5000, f"1_{'9' * 5000}"])
def test_a_step_of_more_digits_than_python_reads_is_not_there(make, step):
    src = steps(make, "9_5", "10_2")
    fails(src, f"no file of step {step}; there are 10_2, 9_5", step=step)


def test_no_step_that_every_rank_has_names_the_ranks(make):
    src = make("rank_0/CKP-1_1.ckpt", "rank_1/CKP-2_1.ckpt", "rank_2/CKP-2_1.ckpt")
    fails(
        src,
        "CKP-1_1.ckpt is not in ranks 1, 2",
        "CKP-2_1.ckpt is not in rank 0",
        "no step is in every rank",
    )


def test_a_chosen_step_that_a_rank_lacks_is_an_error(make):
    src = steps(make, "9_5")
    make("rank_0/CKP-10_2.ckpt")
    fails(src, "CKP-10_2.ckpt is not in rank 1; every rank has CKP-9_5.ckpt", step="10_2")


@pytest.mark.parametrize(
    "names",
    [
        ("CKP-1_1.ckpt", "CKP_1-1_1.ckpt"),
        ("CKP-1_1.ckpt", "CKP-1_1.safetensors"),
        ("CKP-1_1.ckpt", "best.ckpt"),
        ("a.ckpt", "b.ckpt"),
    ],
)
def test_several_files_of_a_rank_without_an_order_are_an_error(make, names):
    src = make(*(f"rank_{rank}/{name}" for rank in range(2) for name in names))
    problems = fails(src, "several files for ranks 0, 1", "--pattern or --step", *names)
    assert len(problems) == 1
    chosen = found(src, step=names[1]) if names[1].endswith(".ckpt") else found(src, step=names[0])
    assert len(chosen) == 2 or names[0].startswith("CKP-1_1")


def test_a_chosen_step_is_not_disturbed_by_files_without_one(make):
    src = steps(make, "9_5", "10_5")
    make("rank_0/best.ckpt", "rank_1/best.ckpt")
    assert scan(src, SourceOptions(step="10")).step == "10_5"
    assert found(src, step="best")[1] == "rank_1/best.ckpt"


def test_the_golden_case_of_several_files_is_read():
    folder = GOLDEN / "several_files_per_rank" / "src"
    catalog = scan(str(folder))
    steps = {path.stem for path in folder.rglob("*.ckpt")}
    assert len(steps) > 1
    assert f"checkpoint-{catalog.step}" in steps


# ------------------------------------------------------------------------ patterns


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
def test_patterns_say_where_the_files_are(make, pattern, names):
    src = make(*names, "rank_7/other/a.ckpt", "notes.txt", "d/0/w_1.ckpt")
    assert found(src, pattern=pattern) == dict(enumerate(names))


def test_wildcards_stand_for_finished_checkpoints_only(make):
    others = ["a.ckpt.tmp", "a-graph.meta", "meta.json", "b.h5.partial"]
    src = make("n0/a.ckpt", *(f"n0/{name}" for name in others))
    assert found(src, pattern="n{rank}/*") == {0: "n0/a.ckpt"}


def test_a_pattern_may_leave_steps_to_choose_from(make):
    src = make(*(f"n{r}/CKP-{step}.ckpt" for r in range(2) for step in ("9_1", "10_1")))
    assert scan(src, SourceOptions(pattern="n{rank}/CKP-*")).step == "10_1"
    assert scan(src, SourceOptions(pattern="n{rank}/CKP-*", step="9_1")).step == "9_1"


def test_a_pattern_that_matches_nothing_or_has_no_rank_is_an_error(make):
    src = make("rank_0/a.ckpt")
    fails(src, "no file matches the pattern x{rank}/a.ckpt", pattern="x{rank}/a.ckpt")
    fails(src, "does not say where {rank} is", pattern="rank_0/a.ckpt")


def test_two_files_of_one_rank_by_a_pattern_are_an_error(make):
    src = make("x/rank_0/a.ckpt", "y/rank_0/a.ckpt", "y/rank_1/a.ckpt")
    fails(src, "rank 0: two files", pattern="*/rank_{rank}/a.ckpt")


@pytest.mark.parametrize(
    "name",
    [
        "host{0}/x.ckpt",
        "exp2024/card{0}/ckpt/net-1_10.ckpt",
        "rank_{0}/checkpoints/net-1_10.ckpt",
        "node0/device{0}/ckpt/x.ckpt",
        "net_{0}-1_10.ckpt",
        "net-v2_{0}.ckpt",
        "slice {0}/x.ckpt",
        "a'b{0}/x.ckpt",
        "w{0}/d{0}/x_{0}.ckpt",
    ],
)
def test_a_pattern_that_is_suggested_works_when_pasted(make, name):
    names = [name.format(rank) for rank in range(12)]
    src = make(*names)
    (problem,) = fails(src, "--pattern ", names[0])
    assert problem.count("--pattern ") <= 2  # once for what it is, once with the pattern
    pattern = shlex.split(problem.rpartition("--pattern ")[2].rpartition(", if that")[0])[0]
    assert found(src, pattern=pattern) == dict(enumerate(names))


def test_a_pattern_takes_the_number_that_tells_ranks_apart(make):
    """Ranks of two hosts: the numbers of devices begin anew, those of ranks do not."""
    names = [f"host{r // 4}/dev{r % 4}/r{r}/net-{e}_10.ckpt" for r in range(8) for e in (1, 2)]
    (problem,) = fails(make(*names), "'host*/dev*/r{rank}/*.ckpt'")
    assert "host0/dev0/r0/net-1_10.ckpt" in problem


def test_no_pattern_is_suggested_where_none_tells_files_of_a_rank_apart(make):
    (problem,) = fails(make("x/a.ckpt", "y/a.ckpt"), "say where they are with --pattern")
    assert "--pattern '" not in problem


def test_rank_folders_of_several_kinds_come_with_a_pattern_for_each(make):
    src = make("rank_0/a.ckpt", "rank_1/a.ckpt", "node0/c/a.ckpt")
    fails(src, "--pattern: 'rank_{rank}/*.ckpt' or 'node{rank}/c/*.ckpt'")
    assert found(src, pattern="node{rank}/c/*.ckpt") == {0: "node0/c/a.ckpt"}


def test_a_pattern_is_suggested_for_folders_of_other_names(make):
    run = make("host0/x.ckpt", "host1/x.ckpt")
    fails(run, "found host0/x.ckpt: --pattern 'host{rank}/*.ckpt', if that is its rank")
    assert found(run, pattern="host{rank}/*.ckpt") == {0: "host0/x.ckpt", 1: "host1/x.ckpt"}
