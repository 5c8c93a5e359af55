"""The command line: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.cli.params import parse_size
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import cut_short, flip_byte_of
from tests.support.readers import rank_file, read, write_ckpt

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SMALL = GOLDEN / "empty_tensors"
LINK = "'link' is a link to 'gone', which does not exist"
UNITS = "A size ends with its unit: 500MB (of 1000) or 2GiB (of 1024)."
COMMANDS = ("inspect", "merge", "split", "reshard", "verify", "diff")


def src(case):
    return [case / "src", "-s", case / "src_strategy.ckpt"]


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_begins_with_an_example(command, flag):
    text = run_well(command, flag).stdout
    usage, example = text.split("\n\n")[:2]
    assert usage.startswith(f"Usage: ckpttool {command} ")
    assert example.strip().startswith(f"ckpttool {command} ")


def test_help_of_the_group_names_every_command_and_exit_code():
    text = message(run_well("-h"))
    assert all(command in text for command in COMMANDS)
    assert "`ckpttool help exit-codes` lists the exit codes." in text
    assert "| 130 |" in run_well("help", "exit-codes").stdout


def test_version_is_the_package_version():
    import ckpttool

    assert run_well("--version").stdout == f"ckpttool, version {ckpttool.__version__}\n"


def console_script():
    """The program that pip makes of the entry in pyproject.toml."""
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    module, function = re.search(r'^ckpttool = "([\w.]+):(\w+)"$', text, re.MULTILINE).groups()
    return ["-c", f"from {module} import {function}; {function}()"]


@pytest.mark.crash
@pytest.mark.usefixtures("heeded_signals")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("program", [["-m", "ckpttool"], console_script()])
@pytest.mark.parametrize("package", ["click", "numpy"])
def test_a_signal_while_packages_are_loaded_is_no_traceback(
    tmp_path, program, package, number, code
):
    """The package is one that takes its time, and says so."""
    text = "import time; print('loading', flush=True); time.sleep(60)\n"
    (tmp_path / f"{package}.py").write_text(text)
    command = [sys.executable, *program, "verify", str(SMALL / "src")]
    found = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": found},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert "Aborted" not in errors


@pytest.mark.interpreter
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("start", ["module", "script"])
def test_a_closed_stream_is_nowhere_and_no_file_gets_its_number(tmp_path, closed, start):
    """A file that got the number of standard output would get what is printed, too."""
    script = tmp_path / "ckpttool-script"
    script.write_text("from ckpttool.__main__ import run\nrun()\n")
    how = "-m ckpttool" if start == "module" else shlex.quote(str(script))
    begin = f"exec {shlex.quote(sys.executable)} {how}"
    source = shlex.quote(str(SMALL / "src"))
    strategy = shlex.quote(str(SMALL / "src_strategy.ckpt"))
    words = (
        f"{begin} merge {source} -s {strategy} -o {shlex.quote(str(tmp_path / 'a.h5'))} {closed}"
    )
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("a.h5" in done.stdout) == (closed in ("<&-", "2>&-"))
    merge = ["merge", SMALL / "src", "-s", SMALL / "src_strategy.ckpt", "-o"]
    run_well(*merge, tmp_path / "b.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    words = f"{begin} verify {source} -s {strategy} --step 9_9 {closed}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert ("9_9" in done.stderr) == ("2>&-" not in closed)
    assert "internal error" not in done.stderr


@pytest.mark.parametrize("words", [["--version"], ["verify", str(SMALL / "src" / "nothing")]])
def test_what_was_loaded_is_not_searched_for_garbage_at_the_end(words):
    """On a busy machine that took seconds after a Ctrl-C with Dask, which has many modules."""
    code = "import atexit, gc; from ckpttool.__main__ import run\n"
    code += "atexit.register(lambda: print(gc.get_freeze_count()))\nrun()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert int(done.stdout.split()[-1]) > 1000


def test_inspect_of_a_file_prints_one_document_with_every_tensor():
    path = SMALL / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    document = json.loads(run_well("inspect", path, "--json").stdout)
    assert document["schema"] == 1
    assert (document["format"], document["path"]) == ("ckpt", str(path))
    assert document["nbytes"] == path.stat().st_size
    expected = {name: (entry.dtype, entry.shape) for name, entry in read(path).items()}
    got = {t["name"]: (t["dtype"], tuple(t["shape"])) for t in document["tensors"]}
    assert got == expected
    assert {t["name"]: t["nbytes"] for t in document["tensors"]}["weight"] == 2 * 8 * 4


def test_inspect_of_a_folder_prints_its_ranks_and_step():
    document = json.loads(run_well("inspect", SMALL / "src", "--json").stdout)
    assert document["step"] == "2_10"
    assert [entry["rank"] for entry in document["ranks"]] == [0, 1, 2, 3]
    first = document["ranks"][0]
    path = SMALL / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    assert first == {
        "rank": 0,
        "path": str(path),
        "format": "ckpt",
        "nbytes": path.stat().st_size,
        "tensors": len(read(path)),
    }
    assert not any("device_matrix" in tensor for tensor in document["tensors"])


def test_inspect_with_a_strategy_prints_full_shapes_and_layouts():
    document = json.loads(run_well("inspect", *src(CASE), "--json").stdout)
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["layer1.weight"] == {
        "name": "layer1.weight",
        "dtype": "Float32",
        "shape": [64, 32],
        "nbytes": 64 * 32 * 4,
        "slice_shape": [64, 16],
        "device_matrix": [2, 2, 2],
        "tensor_map": [[], [1]],
        "optimizer_shard": 1,
        "stages": [0],
        "ranks": list(range(8)),
    }
    assert tensors["global_step"]["device_matrix"] is None
    assert tensors["global_step"]["stages"] == []


def test_verify_says_what_it_cannot_know_without_a_strategy():
    told = run_well("verify", CASE / "src").stdout
    assert "the headers are right in each rank by itself (8 ranks" in told
    told = run_well("verify", CASE / "src", "-s", CASE / "src_strategy.ckpt").stdout
    assert "the headers and samples are right (8 ranks" in told


@pytest.mark.parametrize("name", ["m.pt", "m.safetensor", "m.bin"])
def test_an_ending_of_no_format_is_refused(tmp_path, name):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / name]
    result = run(*words)
    assert (result.exit_code, "the suffix is not that of a format" in result.stderr) == (2, True)
    run_well(*words, "--format", "ckpt")
    run_well(*words[:-1], tmp_path / "net-2_10")


def test_inspect_shows_the_optimizer_shard_that_the_strategy_hides():
    run_ = SAMPLES / "opt_aggregated"
    words = ["inspect", run_ / "ckpt", "-s", run_ / "strategy" / "strategy_0.ckpt", "--json"]
    document = json.loads(run_well(*words).stdout)
    shown = {one["name"]: (one["shape"], one["optimizer_shard"]) for one in document["tensors"]}
    assert (shown["w"], shown["moment1.b"]) == (([16, 8], 4), ([8], 8))
    assert "inferred" in [note["code"] for note in document["notes"]]


def test_inspect_points_out_what_contents_contradict(tmp_path):
    ranks = {rank: {"w": noise(f"w{rank}", "Float32", (4,))} for rank in (0, 1)}
    write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}'
    (tmp_path / "s.json").write_text(strategy)
    result = run_well("inspect", tmp_path / "src", "-s", tmp_path / "s.json", "-q")
    text = (
        f"warning[contradicted]: {tmp_path / 's.json'}: 1 parameter: diverged replicas, or slices"
    )
    assert text in message(result)


def test_inspect_shows_stages_and_optimizer_shards():
    case = GOLDEN / "tutorial_pipeline_2x4_to_8"
    document = json.loads(run_well("inspect", *src(case), "--json").stdout)
    assert {tuple(tensor["stages"]) for tensor in document["tensors"]} >= {(0,), (1,)}
    assert max(tensor["optimizer_shard"] or 0 for tensor in document["tensors"]) > 1


def test_tables_name_every_tensor_in_a_pipe():
    text = run_well("inspect", *src(CASE), "--all").stdout
    for name in read(CASE / "src" / "rank_0" / "checkpoint-2_10.ckpt"):
        assert name in text


def test_merge_prints_what_it_wrote(tmp_path):
    out = tmp_path / "m.h5"
    document = json.loads(run_well("merge", *src(SMALL), "-o", out, "--json").stdout)
    sizes = [path.stat().st_size for path in (SMALL / "src").rglob("*.ckpt")]
    assert document["schema"] == 1
    assert document["outputs"] == [
        {
            "rank": 0,
            "path": str(out),
            "format": "hdf5",
            "nbytes": out.stat().st_size,
            "tensors": 5,
            "kept": False,
        }
    ]
    assert document["src_bytes"] == sum(sizes)
    assert document["dst_bytes"] == out.stat().st_size
    assert document["seconds"] > 0


def test_reshard_and_split_write_rank_folders(tmp_path):
    words = ["-d", SMALL / "dst_strategy.ckpt", "--prefix", "net-", "--format", "safetensors"]
    run_well("reshard", *src(SMALL), "-o", tmp_path / "r", *words)
    run_well("merge", *src(SMALL), "-o", tmp_path / "m.h5")
    run_well("split", tmp_path / "m.h5", "-o", tmp_path / "s", *words)
    names = [f"rank_{rank}/net-{rank}.safetensors" for rank in (0, 1)]
    assert files_below(tmp_path / "r") == files_below(tmp_path / "s") == names


def test_rank_option_takes_ranges_and_refuses_what_the_target_does_not_have(tmp_path):
    case = GOLDEN / "reshard_2_to_16"
    words = [*src(case), "-d", case / "dst_strategy.ckpt", "-o", tmp_path / "r"]
    run_well("reshard", *words, "--rank", "0,3-5")
    assert files_below(tmp_path / "r") == [f"rank_{r}/checkpoint_{r}.h5" for r in (0, 3, 4, 5)]
    result = run("reshard", *words, "--rank", "6,16-17")
    assert result.exit_code == 5
    assert "ranks 16, 17 are not in the target, which has 16 ranks" in result.stderr
    assert len(files_below(tmp_path / "r")) == 4
    assert run("reshard", *words, "--rank", "5-3").exit_code == 2


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("m.h5", [], "hdf5"),
        ("m.ckpt", [], "ckpt"),
        ("m.safetensors", [], "safetensors"),
        ("m", [], "hdf5"),
        ("m.bin", ["--format", "ckpt"], "ckpt"),
    ],
)
def test_the_format_of_a_merge_is_asked_for_or_follows_the_name(tmp_path, name, words, expected):
    run_well("merge", *src(SMALL), "-o", tmp_path / name, *words)
    document = json.loads(run_well("inspect", tmp_path / name, "--json").stdout)
    assert document["format"] == expected


def test_a_name_that_contradicts_the_format_is_a_usage_error(tmp_path):
    result = run("merge", *src(SMALL), "-o", tmp_path / "m.ckpt", "--format", "hdf5")
    assert result.exit_code == 2
    assert files_below(tmp_path) == []


def test_an_existing_output_is_refused_without_overwrite(tmp_path):
    out = tmp_path / "m.h5"
    out.write_bytes(b"precious")
    result = run("merge", *src(SMALL), "-o", out)
    assert result.exit_code == 5
    assert "--overwrite" in result.stderr
    assert out.read_bytes() == b"precious"
    run_well("merge", *src(SMALL), "-o", out, "--overwrite")
    assert read(out)


def test_an_input_is_never_an_output(tmp_path):
    linked = tmp_path / "rank_0" / "checkpoint_0.ckpt"
    run_well("merge", *src(SMALL), "-o", linked)
    before = linked.read_bytes()
    strategy = SMALL / "dst_strategy.ckpt"
    words = ["-d", strategy, "-o", tmp_path, "--format", "ckpt", "--overwrite"]
    result = run("split", linked, *words)
    assert result.exit_code == 5
    assert "is an input of this run" in result.stderr
    assert linked.read_bytes() == before
    copy = tmp_path / "strategy.ckpt"
    copy.write_bytes((SMALL / "src_strategy.ckpt").read_bytes())
    result = run("merge", SMALL / "src", "-s", copy, "-o", copy, "--overwrite")
    assert result.exit_code == 5
    assert copy.read_bytes() == (SMALL / "src_strategy.ckpt").read_bytes()


def test_files_of_a_larger_run_are_not_left_among_the_outputs(tmp_path):
    stale = tmp_path / "rank_7" / "checkpoint_7.h5"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    words = [*src(SMALL), "-d", SMALL / "dst_strategy.ckpt", "-o", tmp_path]
    result = run("reshard", *words)
    assert result.exit_code == 5
    assert str(stale) in result.stderr
    run_well("reshard", *words, "--overwrite")
    assert stale.read_bytes() == b"old"


def test_outputs_get_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        for name in ("m.h5", "m.ckpt", "m.safetensors"):
            run_well("merge", *src(SMALL), "-o", tmp_path / name)
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)


def test_a_folder_without_a_strategy_gets_the_choices_explained(tmp_path):
    result = run("merge", SMALL / "src", "-o", tmp_path / "m.h5")
    assert result.exit_code == 2
    text = message(result)
    assert all(word in text for word in ("-s STRATEGY", "--replicated", "4 ranks"))


def test_replicated_compares_every_replica(tmp_path):
    case = GOLDEN / "replicated_only"
    run_well("merge", case / "src", "--replicated", "-o", tmp_path / "a.ckpt")
    run_well("merge", *src(case), "-o", tmp_path / "b.ckpt")
    assert read(tmp_path / "a.ckpt") == read(tmp_path / "b.ckpt")
    result = run("merge", SMALL / "src", "--replicated", "-o", tmp_path / "c.ckpt")
    assert result.exit_code == 5
    said = ("full model: 2 parameters differ between ranks", r"weight: ranks 0-\d+ all differ")
    assert not mentions(message(result), *said)
    assert not (tmp_path / "c.ckpt").exists()


def test_replicated_and_a_strategy_exclude_each_other(tmp_path):
    result = run("merge", *src(SMALL), "--replicated", "-o", tmp_path / "m.h5")
    assert result.exit_code == 2


def test_split_refuses_several_ranks(tmp_path):
    result = run("split", SMALL / "src", "-d", SMALL / "dst_strategy.ckpt", "-o", tmp_path / "s")
    assert result.exit_code == 5
    assert "reshard" in result.stderr


def test_one_file_is_converted_without_a_strategy(tmp_path):
    path = SMALL / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    run_well("merge", path, "--replicated", "-o", tmp_path / "m.h5")
    run_well("merge", tmp_path / "m.h5", "-o", tmp_path / "m.ckpt")
    assert read(tmp_path / "m.ckpt") == read(path)


def test_a_ckpt_that_went_through_hdf5_is_the_same_file(tmp_path):
    path = GOLDEN / "append_dict_string" / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    run_well("merge", path, "--replicated", "-o", tmp_path / "m.h5")
    run_well("merge", tmp_path / "m.h5", "-o", tmp_path / "m.ckpt")
    assert (tmp_path / "m.ckpt").read_bytes() == path.read_bytes()


def test_results_go_to_stdout_and_notes_to_stderr(tmp_path):
    case = GOLDEN / "dst_without_optimizer"
    words = [*src(case), "-d", case / "dst_strategy.ckpt", "--not-in-target", "full"]
    result = run_well("reshard", *words, "-o", tmp_path / "a")
    assert "in full to every rank" in result.stderr
    assert "in full to every rank" not in result.stdout
    assert "rank_0" in result.stdout
    quiet = run_well("reshard", *words, "-o", tmp_path / "b", "-q")
    assert quiet.stderr == ""
    document = json.loads(run_well("reshard", *words, "-o", tmp_path / "c", "--json").stdout)
    assert "undivided" in {note["code"] for note in document["notes"]}


def test_all_problems_of_a_run_are_in_one_report(tmp_path):
    """Two damaged files are one problem, and a bad strategy or an existing output another."""
    for rank in range(4):
        folder = tmp_path / "src" / f"rank_{rank}"
        folder.mkdir(parents=True)
        data = (SMALL / "src" / f"rank_{rank}" / "checkpoint-2_10.ckpt").read_bytes()
        (folder / "net-1_1.ckpt").write_bytes(data[:-5] if rank in (1, 3) else data)
    (tmp_path / "bad.ckpt").write_bytes(b"")
    out = tmp_path / "m.h5"
    words = ["merge", tmp_path / "src", "-o", out]
    result = run(*words, "-s", tmp_path / "bad.ckpt")
    assert result.exit_code == 3
    text = message(result)
    assert text.count("error[") == 2
    assert "rank_1/net-1_1.ckpt and 1 more: the file is cut short or damaged ranks 1, 3; " in text
    assert f"{tmp_path / 'bad.ckpt'}: the strategy file is empty (0 bytes)" in text
    out.write_bytes(b"")
    result = run(*words, "-s", SMALL / "src_strategy.ckpt")
    assert result.exit_code == 3
    text = message(result)
    assert text.count("error[") == 3
    assert ": some slices are on no rank" in text
    assert f"error[destination]: {out} exists already Try: --overwrite, or -o with " in text
    assert out.read_bytes() == b""


def test_a_missing_source_is_a_usage_error(tmp_path):
    result = run("inspect", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "nothing" in result.stderr


def test_inspect_shows_what_is_left_of_a_damaged_checkpoint(tmp_path):
    for rank in range(2):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        data = (SMALL / "src" / f"rank_{rank}" / "checkpoint-2_10.ckpt").read_bytes()
        (folder / "net.ckpt").write_bytes(data[: -5 if rank else None])
    result = run("inspect", tmp_path, "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert [entry["rank"] for entry in document["ranks"]] == [0]
    assert len(document["problems"]) == 1


def test_escape_sequences_in_names_are_never_printed(tmp_path):
    from tests.support.readers import Entry, write_ckpt

    path = tmp_path / "m.ckpt"
    write_ckpt(path, {"evil\x1b[2J\nname": Entry("Float32", (1,), bytes(4))})
    result = run_well("inspect", path)
    assert "\x1b" not in result.output
    assert r"evil\x1b[2J\nname" in result.output
    assert json.loads(run_well("inspect", path, "--json").stdout)["tensors"][0]["name"]
    result = run("merge", path, "-o", tmp_path / "no" / "m.h5")
    assert "\x1b" not in result.output


def test_a_name_of_64_kib_leaves_room_for_what_is_said_of_it(tmp_path):
    from tests.support.readers import Entry, read, write_ckpt

    path, name = tmp_path / "m.ckpt", "x" * 65533 + "end"
    write_ckpt(path, {name: Entry("Float32", (1,), bytes(4))})
    result = run("merge", path, "-o", tmp_path / "m.h5")
    assert result.exit_code == 5
    said = "xend: HDF5 cannot keep this name exactly Try: -o {0}.ckpt, or -o {0}.safetensors"
    assert said.format(tmp_path / "m") in message(result)
    shown = run_well("inspect", path)
    assert "xend" in shown.output
    assert max(len(result.output), len(shown.output)) < 5000
    run_well("merge", path, "-o", tmp_path / "m.safetensors")
    assert set(read(tmp_path / "m.safetensors")) == {name}


def test_debug_alone_prints_a_traceback(tmp_path):
    command = [sys.executable, "-m", "ckpttool", "inspect", str(GOLDEN / "PROVENANCE.md")]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 3
    assert "Traceback" not in plain.stderr
    assert plain.stderr.count("\n") == 2  # what is wrong, and the hint
    loud = subprocess.run([*command, "--debug"], capture_output=True, text=True, check=False)
    assert loud.returncode == 3
    assert "Traceback" in loud.stderr


def test_no_progress_bar_without_a_terminal_even_if_colour_is_forced(tmp_path):
    command = [sys.executable, "-m", "ckpttool", "merge", str(SMALL / "src")]
    command += ["-s", str(SMALL / "src_strategy.ckpt"), "-o", str(tmp_path / "m.h5")]
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    assert "m.h5" in done.stdout


def test_jobs_make_no_difference_to_the_bytes(tmp_path):
    for jobs in ("1", "7"):
        run_well("merge", *src(CASE), "-o", tmp_path / f"{jobs}.h5", "-j", jobs)
    assert (tmp_path / "1.h5").read_bytes() == (tmp_path / "7.h5").read_bytes()


def test_step_is_named_in_the_output(tmp_path):
    case = GOLDEN / "several_files_per_rank"
    result = run_well("merge", *src(case), "-o", tmp_path / "new.h5")
    assert "step 10_10" in result.stdout
    assert "newest of 3" in result.stderr
    document = run_well("merge", *src(case), "-o", tmp_path / "old.h5", "--step", "1_10", "--json")
    assert json.loads(document.stdout)["step"] == "1_10"
    assert read(tmp_path / "old.h5") != read(tmp_path / "new.h5")
    result = run("merge", *src(case), "-o", tmp_path / "no.h5", "--step", "3_10")
    assert result.exit_code == 5
    assert "10_10" in result.stderr


@pytest.mark.parametrize(
    ("form", "output", "is_refused"),
    [
        ("host-{half}/rank_{rank}", "host-7/rank_9/new.ckpt", True),
        ("host-{half}/rank_{rank}", "new/rank_9/new.ckpt", True),
        ("host-{half}/rank_{rank}", "new/new.ckpt", False),
        ("card{rank}", "card8/new.ckpt", True),
        ("card{rank}", "new8/new.ckpt", False),
        ("card{rank}/ckpt", "card0/new.ckpt", True),
        ("rank_{rank}/ckpt", "rank_0/new/new.ckpt", True),
        ("rank_{rank}/ckpt", "new/new.ckpt", False),
        ("net_{rank}.ckpt", "net_9.ckpt", True),
        ("net_{rank}.ckpt", "new.ckpt", False),
    ],
)
def test_no_output_lies_where_ranks_without_rank_folders_are_read(
    tmp_path, form, output, is_refused
):
    for rank in range(len(list((SMALL / "src").iterdir()))):
        path = tmp_path / "src" / form.format(rank=rank, half=rank % 2)
        path = path if path.suffix else path / "net.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        (file,) = (SMALL / "src" / f"rank_{rank}").glob("*.ckpt")
        shutil.copy(file, path)
    source = tmp_path / "src"
    words = ["merge", source, "-s", SMALL / "src_strategy.ckpt", "-o", source / output]
    result = run(*words)
    assert result.exit_code == (5 if is_refused else 0), message(result)
    assert ("is inside the source folder" in message(result)) == is_refused
    assert run(*words[:4], "-o", tmp_path / "again.ckpt").exit_code == 0


@pytest.mark.parametrize(
    ("output", "is_refused"),
    [
        ("src/rank_0/new.ckpt", True),
        ("src/../link/new.h5", True),
        ("src/rank_9/new.safetensors", True),  # which would be a rank more
        ("src/rank_0/rank_0/new.ckpt", True),  # of rank 0, if the file above it is gone
        ("src/rank_9/ckpt_9/new.ckpt", True),
        ("src/rank_0/rank_1/new.ckpt", False),
        ("src/rank_0/new/new.ckpt", False),
        ("src/rank_0_of_mine.ckpt", False),  # beside rank folders no file counts
        ("src/new.ckpt", False),
        ("flat/rank_9.ckpt", True),
        ("flat/rank_0/new.ckpt", True),
        ("flat/new.ckpt", False),
    ],
)
def test_no_output_lies_where_the_source_is_read_from(tmp_path, output, is_refused):
    shutil.copytree(SMALL / "src", tmp_path / "src")
    (tmp_path / "link").symlink_to("src/rank_0")
    (tmp_path / "flat").mkdir()
    for path in sorted((tmp_path / "src").glob("rank_*/*.ckpt")):
        shutil.copy(path, tmp_path / "flat" / f"{path.parent.name}.ckpt")
    source = tmp_path / output.partition("/")[0]
    before = files_below(tmp_path)
    merge = ["merge", source, "-s", SMALL / "src_strategy.ckpt"]
    words = [*merge, "-o", tmp_path / output]
    result = run(*words)
    assert result.exit_code == (5 if is_refused else 0), message(result)
    if is_refused:
        said = f"{tmp_path / output} is inside the source folder {source} "
        assert f"{said}Try: -o with a path outside of {source}" in message(result)
        assert files_below(tmp_path) == before
    else:
        assert (
            run_well(*words, "--overwrite").stdout.partition(" in ")[0]
            == result.stdout.partition(" in ")[0]
        )
    folder = run(*merge, "-o", source, "--format", "ckpt", "--max-shard-size", "1KB")
    assert "is the source folder Try: -o with another path" in message(folder)


def test_outputs_are_files_in_another_folder_than_the_source(tmp_path):
    shutil.copytree(SMALL / "src", tmp_path / "src")
    words = ["-s", SMALL / "src_strategy.ckpt", "-d", SMALL / "dst_strategy.ckpt"]
    result = run("reshard", tmp_path / "src", *words, "-o", tmp_path / "src", "--format", "ckpt")
    assert result.exit_code == 5
    assert "is the source folder" in result.stderr
    os.mkfifo(tmp_path / "pipe")
    result = run("merge", *src(SMALL), "-o", tmp_path / "pipe", "--overwrite")
    assert result.exit_code == 5
    assert "is a device or a pipe" in result.stderr
    assert (tmp_path / "pipe").is_fifo()
    assert run("merge", *src(SMALL), "-o", "-").exit_code == 2
    (tmp_path / "file").write_bytes(b"")
    result = run("reshard", SMALL / "src", *words, "-o", tmp_path / "file")
    assert result.exit_code == 5
    said = f"{tmp_path / 'file'} is a file, not a folder\n  Try: -o with another path\n"
    assert result.stderr.count(said) == 1


def test_many_parameters_that_differ_alike_are_one_problem(tmp_path):
    result = run("merge", CASE / "src", "--replicated", "-o", tmp_path / "m.h5")
    assert result.exit_code == 5
    assert result.stderr.count("\n") == 3  # what is wrong, facts and hint
    assert "-s STRATEGY" in result.stderr


def test_one_file_with_the_strategy_of_many_ranks_is_explained(tmp_path):
    run_well("merge", *src(SMALL), "-o", tmp_path / "m.h5")
    words = ["-s", SMALL / "src_strategy.ckpt", "-d", SMALL / "dst_strategy.ckpt"]
    for more in (
        ["reshard", *words, "-o", tmp_path / "r"],
        ["merge", *words[:2], "-o", tmp_path / "m.ckpt"],
        ["verify", *words[:2]],
        ["inspect", *words[:2]],
    ):
        result = run(more[0], tmp_path / "m.h5", *more[1:])
        assert result.exit_code == 5
        said = f"{tmp_path / 'm.h5'}: already merged, but {words[1]} is for 4 ranks"
        assert f"error[strategy]: {said}\n  Try: the same command without -s" in result.stderr
        assert result.stderr.count("error[") == 1


def test_a_gap_in_the_ranks_is_pointed_out(tmp_path):
    for rank in (0, 1, 3):
        shutil.copytree(SMALL / "src" / f"rank_{rank}", tmp_path / f"rank_{rank}")
    assert "rank 2: no checkpoint file found" in run_well("inspect", tmp_path).stderr


def test_a_pattern_without_a_rank_is_a_usage_error():
    assert run("inspect", SMALL / "src", "--pattern", "*.ckpt").exit_code == 2


def test_a_prefix_cannot_lead_out_of_the_rank_folder(tmp_path):
    words = [*src(SMALL), "-d", SMALL / "dst_strategy.ckpt", "-o", tmp_path / "r", "--prefix"]
    for prefix in ("../x_", "/tmp/x_", "sub/"):
        assert run("reshard", *words, prefix).exit_code == 2
    assert files_below(tmp_path) == []


def test_replicas_that_do_not_hold_everything_are_named(tmp_path):
    case = GOLDEN / "replicated_only"
    shutil.copytree(case / "src", tmp_path / "src")
    path = next((tmp_path / "src" / "rank_3").iterdir())
    write_ckpt(path, dict(list(read(path).items())[:-1]))
    words = ["merge", tmp_path / "src", "--replicated", "-o", tmp_path / "m.h5"]
    result = run(*words)
    assert result.exit_code == 5
    assert f"not on rank 3, but on others {path}; " in message(result)
    assert "Try: copy the file again if it was cut short" in message(result)
    path.write_bytes(b"")
    assert f"warning[damaged_replica]: {path}: empty (0 bytes)" in run_well(*words).stderr


def test_replicas_that_differ_are_a_doubt_that_the_user_may_overrule(tmp_path):
    """As when the slices are cut further than the strategy says."""
    case = GOLDEN / "reshard_8_to_4"
    shutil.copytree(case / "src", tmp_path / "src")
    name = "model.tok_embeddings.embedding_weight"
    flip_byte_of(rank_file(tmp_path / "src", 6), name)
    words = ["merge", tmp_path / "src", "-s", case / "src_strategy.ckpt", "-o", tmp_path / "m.h5"]
    result = run(*words)
    assert result.exit_code == 5
    text = f"{name}: different between ranks that should hold the same "
    assert f"{text}rank 6 differs from ranks 0, 2, 4 Try: " in message(result)
    assert "--deep`, which shows the elements; `ckpttool help replica` explains" in message(result)
    run_well(*words, "--trust-strategy")


def test_full_tensors_in_every_file_are_noticed_although_the_strategy_cuts(tmp_path):
    case = GOLDEN / "tutorial_8_to_8_retrain"
    run_well("merge", *src(case), "-o", tmp_path / "m.ckpt")
    for rank in range(8):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        shutil.copy(tmp_path / "m.ckpt", tmp_path / "src" / f"rank_{rank}" / "net-1_1.ckpt")
    words = ["merge", tmp_path / "src", "-o", tmp_path / "m.h5", "-s"]
    result = run(*words, case / "src_strategy.ckpt")
    assert result.exit_code == 5
    assert not mentions(message(result), "in full on all ranks", "merge or split with --replicated")
    assert not (tmp_path / "m.h5").exists()
    run_well("merge", tmp_path / "src", "-o", tmp_path / "r.ckpt", "--replicated")
    assert (tmp_path / "r.ckpt").read_bytes() == (tmp_path / "m.ckpt").read_bytes()


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert run("inspect", tmp_path / "pipe").exit_code == 5


def test_names_that_the_terminal_cannot_show_are_spelled_out(tmp_path):
    case = GOLDEN / "unicode_and_long_names"
    path = next((case / "src" / "rank_0").iterdir())
    command = [sys.executable, "-m", "ckpttool", "inspect", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    for words in ([], ["--json"]):
        done = subprocess.run([*command, *words], capture_output=True, check=True, env=environment)
        assert b"\\u" in done.stdout


def test_a_checksum_is_told_to_be_there_and_not_verified(tmp_path):
    result = run_well("merge", *src(GOLDEN / "crc_check"), "-o", tmp_path / "m.h5", "-q")
    said = "warning[unverified]: ranks 0-3: the checksum (crc_check) is not verified\n  Try: "
    assert result.stderr == f"{said}ckpttool verify {GOLDEN / 'crc_check' / 'src'} --crc\n"


def test_inspect_shows_the_rows_of_a_manual_split():
    document = json.loads(
        run_well("inspect", *src(GOLDEN / "uneven_manual_split"), "--json").stdout
    )
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["embedding_table"]["rows"] == [6, 10]
    assert tensors["embedding_table"]["shape"] == [16, 8]
    assert tensors["embedding_table"]["slice_shape"] == [6, 8]
    assert tensors["embedding_table"]["slice_shapes"] == [[6, 8], [10, 8]]
    assert not {"rows", "slice_shapes"} & tensors["mul_weight"].keys()
    table = run_well("inspect", *src(GOLDEN / "uneven_manual_split"), "--all").stdout
    assert re.search(r"embedding_table +16 x 8 +Float32 +rows / 6 \+ 10 .* 0 \| 1\n", table)
    assert re.search(r"mul_weight +8 x 8 x 8 +Float32 +axis 1 / 2 .* 0 \| 1\n", table)


def test_split_of_one_ranks_folder_or_of_all_says_what_to_do(tmp_path):
    words = ["-d", CASE / "dst_strategy.ckpt", "-o", tmp_path / "new"]
    path = CASE / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    told = message(run("split", path.parent, *words))
    said = f"{path.parent}: the folder of one rank, not of all ranks Try: "
    assert told.endswith(f"{said}{CASE / 'src'} as SRC")
    told = message(run("split", CASE / "src", *words))
    assert "found ranks 0-7 Try: `ckpttool reshard`, or --replicated" in told


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["diff", SMALL / "src", SMALL / "src", "--rtol", "x"],
            "'x' is not a finite number of at least 0",
        ),
        (
            ["diff", SMALL / "src", SMALL / "src", "-j", "x"],
            "'x' is not a whole number from 1 to 999999 Try: -j 4",
        ),
        (
            ["diff", SMALL / "src", SMALL / "src", "-j", "0"],
            "'0' is not a whole number from 1 to 999999 Try: -j 4",
        ),
        (
            ["verify", SMALL / "src", "--limit", "-1"],
            "'-1' is not a whole number from 0 on Try: --limit 4",
        ),
        (
            ["merge", SMALL / "src", "-o", "x", "--max-memory", "9"],
            f"'9' is not a size {UNITS} Try: --max-memory 2GiB",
        ),
        (
            ["merge", SMALL / "src", "-o", "x", "--max-memory", "64M"],
            f"'64M' is not a size {UNITS} Try: --max-memory 64MB",
        ),
        (
            ["merge", SMALL / "src", "-o", "x", "--max-shard-size", "1mb"],
            f"'1mb' is not a size {UNITS} Try: --max-shard-size 2GiB",
        ),
        (
            ["split", SMALL, "-d", SMALL, "-o", "x", "--rank", "0;3"],
            "'0;3' is not a rank or a range of ranks Try: --rank 0,3-7",
        ),
    ],
)
def test_a_value_that_is_none_is_told_with_those_that_are(words, text):
    result = run(*words)
    assert result.exit_code == 2
    assert text in message(result)


@pytest.mark.parametrize(
    ("words", "exit_code", "text"),
    [
        (["merg", "src"], 2, "ckpttool has no command 'merg' Try: ckpttool merge ..."),
        (["convert", "src"], 2, "has no command 'convert' Try: ckpttool --help"),
        (["inspect", "srcs"], 2, "SRC: 'srcs' does not exist Try: ckpttool inspect src ..."),
        (
            ["inspect", "src/rank0"],
            2,
            "SRC: 'src/rank0' does not exist Try: ckpttool inspect src/rank_0 ...",
        ),
        (["inspect", "other"], 2, "SRC: 'other' does not exist"),
        (["inspect", "src/rank_9/x"], 2, "SRC: 'src/rank_9/x' does not exist Try: ls src"),
        (["inspect", "src/" + "x" * 250], 2, "xxx' does not exist Try: ls src"),
        (["inspect", "link"], 2, f"SRC: {LINK} Try: ls -l link"),
        (["inspect", "link/"], 2, f"SRC: {LINK} Try: ls -l link"),
        (
            ["merge", "src", "-o", "m.h5", "-s", "s.yaml"],
            5,
            "*.weigth: no parameter matches, or only ones of earlier",
        ),
        (
            ["split", "src", "-d", "src", "-o", "-"],
            2,
            "-o, --output: outputs do not go to standard output Try: -o new/",
        ),
        pytest.param(
            ["inspect", "/proc/self/mem"],
            3,
            "error[unreadable]: /proc/self/mem: Input/output error",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="no file that fails"),
        ),
        (
            ["merge", "src", "-o", "new/"],
            5,
            "new/ ends like a folder Try: -o with the name of a file",
        ),
        (
            ["merge", "src", "-o", "m.ckpt", "--format", "hdf5"],
            2,
            "m.ckpt: the suffix is that of ckpt, but --format is hdf5",
        ),
        (
            ["merge", "src", "-o", "m.h5", "--max-shard-size", "5GB"],
            2,
            "m.h5: --max-shard-size writes a folder, and the name is that of a file",
        ),
        (
            ["inspect", "src", "--pattern", "rank{rank}/*"],
            5,
            "found rank_0/checkpoint-2_10.ckpt Try: --pattern 'rank_{rank}/*.ckpt'",
        ),
        (
            ["merge", "src/rank_0/checkpoint-2_10.ckpt", "--step", "3_8", "-o", "m.h5"],
            5,
            "_10.ckpt: a file of step 2_10 by its name, not of step 3_8 Try: omit --step",
        ),
        (
            ["merge", "src", "-s", "src/rank_0/checkpoint-2_10.ckpt", "-o", "m.h5"],
            4,
            "a checkpoint (ckpt), not a strategy file",
        ),
    ],
)
def test_what_was_meant_is_told_to_those_who_did_not_say_it(
    words, exit_code, text, tmp_path, monkeypatch
):
    shutil.copytree(SMALL / "src", tmp_path / "src")
    (tmp_path / "link").symlink_to("gone")
    rules = "ckpttool_strategy: 1\nranks: 8\nparameters:\n  '*.weigth': replicated\n"
    (tmp_path / "s.yaml").write_text(rules)
    monkeypatch.chdir(tmp_path)
    result = run(*words, *(["-s", SMALL / "src_strategy.ckpt"] if words[-1] == "new/" else []))
    assert result.exit_code == exit_code, message(result)
    assert text in message(result)


@pytest.mark.parametrize(
    ("word", "nbytes"),
    [("1kB", 1000), ("1KB", 1000), ("2kiB", 2048), ("1.5GiB", 3 << 29), ("5TB", 5 * 10**12)],
)
def test_a_size_is_a_number_and_a_unit(word, nbytes):
    assert parse_size(word) == nbytes


def test_a_checksum_of_one_file_is_told_of_the_file(tmp_path):
    path = tmp_path / "m.ckpt"
    run_well("merge", *src(CASE), "-o", path, "--crc")
    assert f"note: {path}: the checksum is right" in run_well("inspect", path, "--crc").stderr


def test_the_shapes_of_both_sides_are_named_by_diff(tmp_path):
    write_ckpt(tmp_path / "a.ckpt", {"w": noise("w", "Float32", (3,))})
    write_ckpt(tmp_path / "b.ckpt", {"w": noise("w", "Float32", (4,))})
    told = message(run("diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt"))
    assert "Float32 (3) Float32 (4)" in told


def test_a_folder_for_a_file_is_not_said_to_be_replaceable(tmp_path):
    (tmp_path / "new").mkdir()
    told = message(run("merge", *src(CASE), "-o", f"{tmp_path}/new/"))
    assert f"{tmp_path}/new/ is a folder Try: -o with the name of a file" in told
    assert "--overwrite" not in told


def test_inspect_says_how_many_tensors_are_not_whole(tmp_path):
    shutil.copytree(CASE / "src", tmp_path / "src")
    for rank in (0, 1, 4, 5):
        shutil.rmtree(tmp_path / "src" / f"rank_{rank}")
    result = run("inspect", tmp_path / "src", "-s", CASE / "src_strategy.ckpt", "--all")
    assert result.exit_code == 5
    text = message(result)
    assert "6 tensors cannot be joined from slices: layer1.weight" in text
    assert "15 tensors\n" in result.stdout


def test_a_strategy_by_hand_is_called_one(tmp_path):
    for name, text in (
        ("hand.yaml", "# mine\nckpttool_strategy: 1\nranks: 2\n"),
        ("hand.json", '{"ckpttool_strategy": 1, "ranks": 2}'),
    ):
        (tmp_path / name).write_text(text)
        result = run("merge", tmp_path / name, "-o", tmp_path / "m.h5")
        assert result.exit_code == 3
        said = f"{name}: a strategy file, not a MindSpore checkpoint Try: the checkpoint as SRC, "
        assert f"{said}and -s {tmp_path / name}" in message(result)


def test_a_cut_of_an_axis_that_is_not_there_is_named_with_its_line(tmp_path):
    (tmp_path / "hand.yaml").write_text(
        "ckpttool_strategy: 1\nranks: 2\nparameters:\n  w: {axis: 5}\n"
    )
    for rank in range(2):
        entries = {"w": noise("w", "Float32", (3, 4))}
        write_file(tmp_path / "src" / f"rank_{rank}" / "n.ckpt", entries, "ckpt")
    words = ["merge", tmp_path / "src", "-s", tmp_path / "hand.yaml", "-o", tmp_path / "m.h5"]
    result = run(*words)
    assert result.exit_code == 5
    text = "hand.yaml, line 4: w: no axis 5, which pattern w shards its shape is (3, 4); "
    assert f"{text}axes count from 0" in message(result)


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", SMALL / "src"], ["verify", SMALL / "src"]]
)
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(words):
    """With 141, as the signal does: of verify and diff 1 would be an answer."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "ckpttool", *map(str, words)]
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_files_of_another_format_stay_beside_the_new_ones_and_are_not_mixed_with_them(tmp_path):
    words = [*src(SMALL), "-d", SMALL / "dst_strategy.ckpt", "-o", tmp_path / "r"]
    run_well("reshard", *words)
    assert run("reshard", *words, "--format", "ckpt").exit_code == 5
    run_well("reshard", *words, "--format", "ckpt", "--overwrite")
    said = message(run_well("inspect", tmp_path / "r"))
    assert (
        "0 checkpoint_{rank}.ckpt, checkpoint_{rank}.h5" in said or "checkpoint_{rank}.h5" in said
    )
    assert "several checkpoints in the folders of ranks 0, 1" in said
    assert "Try: --step checkpoint_0.ckpt, or --step checkpoint_0.h5" in said
    for suffix, code in ((".ckpt", 0), (".h5", 1)):  # the manifest is that of the later run
        run_well("inspect", tmp_path / "r", "--step", f"checkpoint_0{suffix}")
        meant = ["--pattern", f"rank_{{rank}}/*{suffix}"]
        run_well("inspect", tmp_path / "r", *meant)
        assert run("verify", tmp_path / "r", *meant).exit_code == code


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", ""],
        ["verify", ""],
        ["diff", SAMPLES, ""],
        ["finalize", ""],
        ["merge", SAMPLES, "-o", ""],
        ["merge", SAMPLES, "-o", "x.h5", "-s", ""],
        ["split", SAMPLES, "-d", SAMPLES, "-o", ""],
        ["split", SAMPLES, "-d", SAMPLES, "-o", "x", "--write-strategy", ""],
    ],
)
def test_an_empty_path_is_a_usage_error_and_not_the_folder_one_is_in(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert message(result).endswith("the path is empty A variable of the shell may be unset.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (
            ["merge", SMALL / "src", "-s", SMALL / "src_strategy.ckpt", "-o", "--overwrite"],
            "--overwrite",
        ),
        (["merge", SMALL / "src", "-s", "--overwrite", "-o", "x.h5"], "--overwrite"),
        (["split", SAMPLES, "-d", SMALL / "dst_strategy.ckpt", "--output", "-q"], "-q"),
        (["diff", SAMPLES, SAMPLES, "--b-strategy", "--json"], "--json"),
        (
            ["split", SAMPLES, "-d", SAMPLES, "-o", "x", "--write-strategy", "--resume"],
            "--resume",
        ),
    ],
)
def test_an_option_in_the_place_of_a_path_is_a_usage_error(tmp_path, monkeypatch, words, taken):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    said = f"'{taken}' looks like an option It stands in the place of a path: a variable of the "
    option = {"--output": "-o"}.get(before := words[words.index(taken) - 1], before)
    assert f"{said}shell may be unset. Try: {option} ./{taken}" in message(result)
    assert not list(tmp_path.iterdir())


def test_a_path_that_begins_like_an_option_is_taken_if_it_cannot_be_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    merge = ["merge", SMALL / "src", "-s", SMALL / "src_strategy.ckpt"]
    run_well(*merge, "-o", "./--overwrite", "--format", "ckpt")
    assert (tmp_path / "--overwrite").is_file()
    run_well("inspect", "--", "--overwrite")


def write_stages(folder):
    """Write two stages of two ranks without replicas; return the folder and its strategy."""
    ranks = {rank: {"ab"[rank // 2]: noise(f"{rank}", "Float32", (4, 8))} for rank in range(4)}
    strategy = folder.parent / f"{folder.name}.yaml"
    strategy.write_text(
        "ckpttool_strategy: 1\nranks: 4\nstages: 2\nparameters:\n"
        "  a: {axis: 0, stages: [0]}\n  b: {axis: 0, stages: [1]}\n"
    )
    return write_ranks(folder, ranks, "safetensors"), strategy


def problems_in(result):
    """Return the problems of the document of an error."""
    return json.loads(result.stdout)["error"]["diagnostics"]


def test_every_damaged_file_and_lost_parameter_is_in_the_document(tmp_path):
    folder, strategy = write_stages(tmp_path / "src")
    paths = [str(cut_short(rank_file(folder, rank))) for rank in (0, 2)]
    result = run("merge", folder, "-s", strategy, "-o", tmp_path / "m.h5", "--json")
    assert result.exit_code == 3
    lost = [(one["code"], one["tensor"], one["ranks"]) for one in problems_in(result)]
    assert lost == [
        *(("damaged", None, [rank]) for rank in (0, 2)),
        *(("missing", name, [rank]) for name, rank in (("a", 0), ("b", 2))),
    ]
    assert [one.get("path") for one in problems_in(result)] == [*paths, None, None]
    damaged, *_, missing, which = result.stderr.splitlines()
    assert damaged.startswith(f"error[damaged]: {paths[0]} and 1 more: ")
    assert missing == "error[missing]: a, b: some slices are on no rank"
    assert which == "  a: rank 0: not read; b: rank 2: not read"
    found = json.loads(run("verify", folder, "-s", strategy, "--json").stdout)["findings"]
    assert [one.get("path") for one in found] == [*paths, None, None]


def test_damaged_files_of_both_sides_of_diff_are_named(tmp_path):
    (a, strategy), (b, _) = (write_stages(tmp_path / name) for name in "ab")
    for folder in (a, b):
        for rank in (0, 1):
            cut_short(rank_file(folder, rank))
    result = run("diff", a, b, "-s", strategy, "--json")
    assert result.exit_code == 3
    named = [one["path"] for one in problems_in(result) if one["code"] == "damaged"]
    assert named == [str(rank_file(folder, rank)) for folder in (a, b) for rank in (0, 1)]
    for side, folder in (("A", a), ("B", b)):
        place = f"{side} ({rank_file(folder, 0)} and 1 more): "
        assert f"error[damaged]: {place}" in result.stderr


def test_the_same_mistake_of_many_patterns_is_one_message(tmp_path):
    folder, strategy = write_stages(tmp_path / "src")
    patterns = "".join(f"  p{i}: [3, 1]\n" for i in range(100))
    strategy.write_text(f"ckpttool_strategy: 1\nranks: 4\nparameters:\n{patterns}")
    result = run("merge", folder, "-s", strategy, "-o", tmp_path / "m.h5", "--json")
    assert result.exit_code == 4
    assert len(problems_in(result)) == 100
    place = f"{strategy}, line 4, column 3: p0 and 99 more"
    assert result.stderr.startswith(f"error[invalid_strategy]: {place}: [3, 1] are 3 slices")
    assert result.stderr.count("error[") == 1


def test_a_tensor_that_differs_in_three_stages_is_named_once_with_every_shape(tmp_path):
    ranks = {rank: {"w": noise("w", "Float32", (4, 8 - rank))} for rank in range(4)}
    folder = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.yaml"
    strategy.write_text(
        "ckpttool_strategy: 1\nranks: 4\nstages: 4\nparameters: {w: {parts: [1, 1]}}\n"
    )
    result = run("merge", folder, "-s", strategy, "-o", tmp_path / "m.h5", "--json")
    assert result.exit_code == 5
    assert [one["tensor"] for one in problems_in(result)] == ["w"]
    first, facts, *_ = result.stderr.splitlines()
    assert first == "error[shape]: w: the full shape differs between stages"
    assert facts == "  " + "; ".join(f"(4, {8 - rank}) in rank {rank}" for rank in ranks)
