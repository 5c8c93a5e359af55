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
from tests.support.checkpoints import noise, write_ranks
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import cut_short, flip_byte_of
from tests.support.readers import rank_file, read, write_ckpt

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SMALL = GOLDEN / "empty_tensors"


def src(case):
    return [case / "src", "-s", case / "src_strategy.ckpt"]


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


@pytest.mark.parametrize("name", ["m.pt", "m.safetensor", "m.bin"])
def test_an_ending_of_no_format_is_refused(tmp_path, name):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / name]
    result = run(*words)
    assert (result.exit_code, "the suffix is not that of a format" in result.stderr) == (2, True)
    run_well(*words, "--format", "ckpt")
    run_well(*words[:-1], tmp_path / "net-2_10")


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


def test_replicated_and_a_strategy_exclude_each_other(tmp_path):
    result = run("merge", *src(SMALL), "--replicated", "-o", tmp_path / "m.h5")
    assert result.exit_code == 2


def test_a_ckpt_that_went_through_hdf5_is_the_same_file(tmp_path):
    path = GOLDEN / "append_dict_string" / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    run_well("merge", path, "--replicated", "-o", tmp_path / "m.h5")
    run_well("merge", tmp_path / "m.h5", "-o", tmp_path / "m.ckpt")
    assert (tmp_path / "m.ckpt").read_bytes() == path.read_bytes()


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


@pytest.mark.parametrize(
    ("word", "nbytes"),
    [("1kB", 1000), ("1KB", 1000), ("2kiB", 2048), ("1.5GiB", 3 << 29), ("5TB", 5 * 10**12)],
)
def test_a_size_is_a_number_and_a_unit(word, nbytes):
    assert parse_size(word) == nbytes


def test_the_shapes_of_both_sides_are_named_by_diff(tmp_path):
    write_ckpt(tmp_path / "a.ckpt", {"w": noise("w", "Float32", (3,))})
    write_ckpt(tmp_path / "b.ckpt", {"w": noise("w", "Float32", (4,))})
    told = message(run("diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt"))
    assert "Float32 (3) Float32 (4)" in told


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
