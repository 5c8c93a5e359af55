"""The commands on encrypted checkpoints, and that the key is shown by none of them."""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickle
import re
import shutil
import subprocess
import sys

import pytest

import ckpttool
from ckpttool.cli.options import parse_key_file
from ckpttool.formats import read_index
from ckpttool.secret import Secret
from tests.oracle import OracleLayout
from tests.support.checkpoint2 import Save
from tests.support.checkpoints import noise
from tests.support.commands import SUFFIXES, everything, message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES, case_facts, conversion, differences, digests
from tests.support.damage import flipped
from tests.support.encryption import KEY, MODES, PLAIN, encrypt
from tests.support.executors import NO_DUMP, dump_state, environment
from tests.support.readers import read, read_ranks

CASE = GOLDEN / "reshard_8_to_4"
STRATEGIES = ["-s", CASE / "src_strategy.ckpt", "-d", CASE / "dst_strategy.ckpt"]


def encrypt_ranks(folder, mode="AES-GCM", ranks=range(8), block_bytes=200, change=None):
    """The source of the case, some of its ranks encrypted; ``change`` is done to their bytes."""
    for source in sorted((CASE / "src").glob("rank_*/*.ckpt")):
        path = folder / source.relative_to(CASE / "src")
        path.parent.mkdir(parents=True)
        data = source.read_bytes()
        rank = int(path.parent.name.removeprefix("rank_"))
        if rank in ranks:
            data = encrypt(data, mode, KEY, block_bytes)
            data = change(rank, data) if change else data
        path.write_bytes(data)
    return folder


# ------------------------------------------------------------------------ conversions


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", SUFFIXES)
def test_encrypted_ranks_are_resharded_as_plain_ones(mode, form, tmp_path, key_file):
    source = encrypt_ranks(tmp_path / "src", mode)
    words = ["reshard", source, *STRATEGIES, "--format", form, "--dec-key-file", key_file]
    run_well(*words, "-o", tmp_path / "out")
    got = digests(read_ranks(tmp_path / "out"))
    assert not differences(conversion("reshard_8_to_4", "reshard").ranks, got)


def test_some_ranks_may_be_encrypted_and_some_not(tmp_path, key_file):
    source = encrypt_ranks(tmp_path / "src", ranks=(1, 6))
    words = ["merge", *STRATEGIES[:2], "--dec-key-file", key_file]
    result = run_well(*words, source, "-o", tmp_path / "a.ckpt")
    assert "key" not in result.stderr
    run_well("merge", CASE / "src", *STRATEGIES[:2], "-o", tmp_path / "b.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()


def test_ranks_of_several_modes_are_read_with_one_key(tmp_path, key_file):
    for rank, data in enumerate([*(encrypt(PLAIN, mode) for mode in MODES), PLAIN]):
        path = tmp_path / "src" / f"rank_{rank}" / "net.ckpt"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    out = tmp_path / "out.ckpt"
    words = ["merge", tmp_path / "src", "--replicated", "-o", out]
    run_well(*words, "--dec-key-file", key_file)
    assert out.read_bytes() == PLAIN


def test_an_encrypted_single_file_is_split(tmp_path, key_file):
    run_well("merge", CASE / "src", *STRATEGIES[:2], "-o", tmp_path / "full.ckpt")
    (tmp_path / "enc.ckpt").write_bytes(encrypt((tmp_path / "full.ckpt").read_bytes()))
    words = ["-d", CASE / "dst_strategy.ckpt", "-o"]
    run_well("split", tmp_path / "full.ckpt", *words, tmp_path / "a")
    run_well("split", tmp_path / "enc.ckpt", *words, tmp_path / "b", "--dec-key-file", key_file)
    assert read_ranks(tmp_path / "a") == read_ranks(tmp_path / "b")


def test_inspect_shows_what_an_encrypted_file_holds(tmp_path, key_file):
    path = SAMPLES / "files" / "sm4_cbc.ckpt"
    document = json.loads(run_well("inspect", path, "--json", "--dec-key-file", key_file).stdout)
    plain = json.loads(run_well("inspect", path.with_name("plain.ckpt"), "--json").stdout)
    assert document["tensors"] == plain["tensors"]
    assert document["nbytes"] == path.stat().st_size


def test_the_file_that_mindspore_cannot_read_is_read_with_a_note(tmp_path, key_file):
    path = SAMPLES / "files" / "enc_and_crc_unreadable.ckpt"
    for words in (["inspect", path], ["merge", path, "--crc", "-o", tmp_path / "out.ckpt"]):
        result = run_well(*words, "--dec-key-file", key_file)
        assert "encrypted with a checksum of 0, which is ignored MindSpore writes this" in message(
            result
        )
        assert "not verified" not in message(result)
    assert (tmp_path / "out.ckpt").read_bytes()[:-17] == path.with_name("plain.ckpt").read_bytes()


# ------------------------------------------------------------------------ what is wrong


def test_all_forged_blocks_are_reported_and_nothing_is_written(tmp_path, key_file):
    def change(rank, data):
        return flipped(data, len(data) - 1) if rank in (2, 5) else data

    source = encrypt_ranks(tmp_path / "src", change=change)
    words = ["--format", "ckpt", "--dec-key-file", key_file, "-o", tmp_path / "out"]
    result = run("reshard", source, *STRATEGIES, *words, "--trust-strategy")
    assert result.exit_code == 3
    assert not (tmp_path / "out").exists()
    problem, facts = result.stderr.splitlines()[:2]
    reason = "the file is damaged, or was changed after it was encrypted"
    assert problem.endswith(f"rank_2/checkpoint-2_10.ckpt and 1 more: {reason}")
    assert "rank_5/checkpoint-2_10.ckpt" in facts or "ranks 2, 5" in facts
    assert "does not match its tag" in facts


@pytest.mark.parametrize("command", ["merge", "inspect", "verify"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: flipped(data, 52), "encrypted block 1 of .* does not match its tag"),
        (lambda data: encrypt(PLAIN, "AES-GCM", b"another key here"), "the wrong key"),
    ],
    ids=["forged", "other key"],
)
def test_what_somebody_may_have_changed_is_never_replaced(
    tmp_path, key_file, command, change, reason
):
    """Rank 5 has replicas of all that it holds, and the damage is where its headers are."""
    source = encrypt_ranks(
        tmp_path / "src", change=lambda rank, data: change(data) if rank == 5 else data
    )
    words = [command, source, *STRATEGIES[:2], "--dec-key-file", key_file]
    words += ["-o", tmp_path / "out.h5"] if command == "merge" else []
    result = run(*words)
    assert result.exit_code == (1 if command == "verify" else 3)
    assert not (tmp_path / "out.h5").exists()
    assert re.search(rf"rank_5/\S*: .*{reason}", message(result))
    assert "from replicas" not in message(result)
    assert "replicas hold" not in message(result)


def test_a_plain_rank_among_encrypted_ones_is_pointed_out(tmp_path, key_file):
    source = encrypt_ranks(tmp_path / "src", ranks=[0, 1, 2, 4, 5, 6, 7])
    words = ["merge", source, *STRATEGIES[:2], "--dec-key-file", key_file, "-o", tmp_path / "o.h5"]
    refused = run(*words, "--strict")
    assert refused.exit_code == 5
    assert "rank 3: not encrypted, unlike ranks 0-2, 4-7 (--strict)" in message(refused)
    result = run_well(*words, "-q")
    assert "warning[mixed_encryption]: rank 3: not encrypted, unlike ranks" in message(result)


def test_inspect_reads_tags_if_asked(tmp_path, key_file):
    path = tmp_path / "net.ckpt"
    path.write_bytes(encrypt(PLAIN))
    words = ["inspect", path, "--dec-key-file", key_file]
    assert "the tags of all encrypted blocks are right" in run_well(*words, "--crc").stderr
    path.write_bytes(flipped(path.read_bytes(), len(path.read_bytes()) - 1))
    run_well(*words)
    result = run(*words, "--crc")
    assert result.exit_code == 3
    assert "byte 48: encrypted block 1 of 1 does not match its tag" in message(result)
    assert "right" not in message(result)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_key_a_missing_one_and_a_cut_file_have_messages_of_their_own(mode, tmp_path):
    source = encrypt_ranks(tmp_path / "src", mode)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"another key here")
    short = tmp_path / "short" / "rank_0" / "net.ckpt"
    short.parent.mkdir(parents=True)
    short.write_bytes(encrypt(PLAIN, mode)[:-1])
    (tmp_path / "key").write_bytes(KEY)
    messages = {}
    for name, words in {
        "missing": [source],
        "wrong": [source, "--dec-key-file", wrong],
        "short": [short, "--dec-key-file", tmp_path / "key"],
    }.items():
        strategy = [] if name == "short" else STRATEGIES[:2]
        result = run("merge", *words, *strategy, "-o", tmp_path / "out.h5")
        assert result.exit_code == 3
        assert not (tmp_path / "out.h5").exists()
        messages[name] = message(result)
    told = f"encrypted with {mode}, and there is no key ranks 0-7 Try: --dec-key-file FILE"
    assert told in messages["missing"]
    assert f"and 7 more: the wrong key ({mode}), or the file is damaged ranks" in messages["wrong"]
    assert "the file ends inside an encrypted block" in messages["short"]


def test_a_key_that_is_not_needed_is_no_error(tmp_path, key_file):
    source = SAMPLES / "files" / "plain.ckpt"
    result = run_well("merge", source, "-o", tmp_path / "m.h5", "--dec-key-file", key_file)
    assert result.stderr == "note: no file is encrypted: the key is not needed\n"


def test_a_key_is_not_needed_for_a_checkpoint_that_describes_itself(tmp_path, key_file):
    entries = {"w": noise("w", "Float32", (8, 6))}
    layouts = {"w": (OracleLayout((2, 2), ((1,), ())),)}
    Save(entries, layouts, 4).write_root(tmp_path / "checkpoint", 5)
    result = run_well("inspect", tmp_path / "checkpoint", "--dec-key-file", key_file)
    assert "no file is encrypted: the key is not needed" in message(result)


def test_without_cryptography_the_way_to_it_is_told(tmp_path, key_file, monkeypatch):
    imported = builtins.__import__

    def refuse(name, *arguments):
        if name.partition(".")[0] == "cryptography":
            raise ImportError(name)
        return imported(name, *arguments)

    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run("inspect", SAMPLES / "files" / "aes_gcm128.ckpt", "--dec-key-file", key_file)
    assert result.exit_code == 8
    assert "encrypted with AES-GCM, and the package cryptography is missing" in message(result)
    assert "pip install 'ckpttool[crypto]'" in message(result)


@pytest.mark.parametrize("is_old", [True, False])
def test_a_library_without_sm4_is_told(is_old, tmp_path, key_file, monkeypatch):
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.ciphers import algorithms

    def refuse(key):
        raise UnsupportedAlgorithm("SM4")

    if is_old:
        monkeypatch.delattr(algorithms, "SM4")
    else:
        monkeypatch.setattr(algorithms, "SM4", refuse)
    result = run("inspect", SAMPLES / "files" / "sm4_cbc.ckpt", "--dec-key-file", key_file)
    assert result.exit_code == 3
    assert "encrypted with SM4-CBC, which the installed cryptography lacks" in message(result)


# ------------------------------------------------------------------------ key files


@pytest.mark.parametrize("case", ["encrypted_cbc", "encrypted_gcm"])
def test_the_key_comes_from_standard_input_as_well(case, tmp_path):
    from click.testing import CliRunner

    from ckpttool.cli.main import main

    path = GOLDEN / case / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    key = case_facts(case)["enc_key"].encode()
    for data in (key, key + b"\n", b"hex:" + key.hex().encode() + b"\n"):
        words = ["inspect", str(path), "--dec-key-file", "-"]
        assert CliRunner().invoke(main, words, input=data).exit_code == 0


@pytest.mark.parametrize("size", [16, 24, 32])
def test_a_key_file_holds_the_bytes_or_their_digits(size):
    key = bytes(range(200, 200 + size))
    spelled = b"hex:" + key.hex().encode()
    for data in (key, key + b"\n", key + b"\r\n", spelled, spelled.replace(b"f", b"F") + b"\n"):
        assert parse_key_file(data) == Secret(key)
    for data in (
        b"",
        key[1:],
        key + b"\n\n",
        b" " + key,
        key + b"\0",
        spelled[:-1],
        spelled + b"0",
    ):
        assert parse_key_file(data) is None
    assert parse_key_file(b"hex:" + b"zz" * size) is None


@pytest.mark.parametrize("key", [b"\n" * 16, b"hex:00112233445\n", b"0123456789abcde\n", b"A" * 32])
def test_bytes_of_the_right_number_are_always_the_key_itself(key):
    assert parse_key_file(key) == Secret(key)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\n", "the file holds 1 bytes, which is not a key"),
        (KEY * 3, "the file holds 48 bytes, which is not a key"),
        (bytes(100_000), "the file holds too many bytes, which is not a key"),
    ],
)
def test_a_file_that_holds_no_key_is_refused_without_a_word_of_what_is_in_it(
    data, reason, tmp_path
):
    (tmp_path / "key").write_bytes(data)
    words = ["inspect", SAMPLES / "files" / "plain.ckpt", "--dec-key-file", tmp_path / "key"]
    result = run(*words)
    assert result.exit_code == 2
    facts = "A key has 16, 24 or 32 bytes, or is written as hex:00ff..."
    assert f"{reason} {facts} Try: ckpttool help --dec-key-file" in message(result)
    assert not leaks(everything(result))


@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_an_argument_that_is_the_key_itself_is_not_repeated(command, tmp_path):
    out = ["-o", tmp_path / "out.h5"] if command == "merge" else []
    words = [SAMPLES / "files" / "aes_gcm128.ckpt", *out, "--dec-key-file", KEY.decode()]
    result = run(command, *words)
    assert result.exit_code == 2
    said = "cannot be read (No such file or directory) The option names a file that holds the key."
    assert f"--dec-key-file: {said} Try: ckpttool help --dec-key-file" in message(result)
    assert not leaks(everything(result))


# ------------------------------------------------------------------------ secrets


def leaks(text):
    """The spellings of the key that are in a text."""
    spellings = {
        KEY.decode(),
        KEY.hex(),
        KEY.hex(" "),
        base64.b64encode(KEY).decode().rstrip("="),
        str(list(KEY))[1:-1],
    }
    return [spelling for spelling in spellings if spelling.lower() in text.lower()]


@pytest.mark.slow
def test_the_key_is_in_nothing_that_is_printed(tmp_path, key_file):
    good = encrypt_ranks(tmp_path / "good")
    bad = encrypt_ranks(tmp_path / "bad", change=lambda rank, data: flipped(data, len(data) - 1))
    out = tmp_path / "out.ckpt"
    words = [*STRATEGIES[:2], "--dec-key-file", key_file, "--debug"]
    (tmp_path / "wrong").write_bytes(KEY[::-1] + KEY)
    wrong = [*words[:-2], tmp_path / "wrong", "--debug"]
    calls = {
        0: [["inspect", good, *words, "--json", "--crc"], ["merge", good, *words, "-o", out]],
        3: [["inspect", bad, *words, "--crc"], ["merge", bad, *words, "-o", out]],
        5: [["merge", good, *words, "-o", out]],  # it exists
    }
    calls[3].append(["merge", good, *wrong, "-o", out])
    for exit_code, of_code in calls.items():
        for call in of_code:
            command = [sys.executable, "-m", "ckpttool", *map(str, call)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == exit_code, done.stderr
            assert not leaks(done.stdout + done.stderr)
            assert exit_code == 0 or "Traceback" in done.stderr
    assert not leaks(out.read_bytes().decode("latin-1"))


def test_the_key_is_in_no_repr_and_no_json(tmp_path):
    source = encrypt_ranks(tmp_path / "src")
    catalog = ckpttool.scan(str(source), ckpttool.SourceOptions(key=KEY))
    strategy = ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")])
    plan, _ = ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.h5"))
    index = catalog.files[0]
    tensor = next(iter(plan)).tensors[0]
    for thing in (catalog, plan, tensor, index, index.cipher, index.cipher.key):
        assert not leaks(repr(thing) + f"{thing}")
    assert "Secret(...)" in repr(catalog)
    with pytest.raises(TypeError):
        json.dumps(index.cipher.key)
    with pytest.raises(TypeError):
        bytes(index.cipher.key)


def test_an_error_of_the_library_does_not_hold_the_key(tmp_path):
    path = tmp_path / "net.ckpt"
    path.write_bytes(flipped(encrypt(PLAIN), 0))
    with pytest.raises(ckpttool.FormatError) as caught:
        read_index(str(path), KEY)
    assert not leaks(repr(caught.value) + repr(caught.value.__context__))


def test_a_worker_in_another_process_can_decrypt(tmp_path):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    source = encrypt_ranks(tmp_path / "src")
    catalog = ckpttool.scan(str(source), ckpttool.SourceOptions(key=Secret(KEY)))
    assert pickle.loads(pickle.dumps(catalog)).files[3] == catalog.files[3]
    strategy = ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")])
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        plan, destination = ckpttool.plan_merge(
            catalog,
            strategy,
            str(tmp_path / "m.ckpt"),
            output_options=ckpttool.OutputOptions("ckpt", crc=True),
            executor=executor,
        )
        ckpttool.execute(plan, destination, executor)
    shutil.rmtree(source)
    want = conversion("reshard_8_to_4", "merge").ranks
    assert not differences(want, digests({0: read(tmp_path / "m.ckpt")}))


# ------------------------------------------------------------------------ core dumps


@pytest.mark.parametrize("words", [[], ["--dec-key-file"]])
def test_a_run_with_a_key_writes_no_core_dump(words, tmp_path, key_file):
    source = encrypt_ranks(tmp_path / "src", ranks=range(8) if words else ())
    code = (
        "import sys\n"
        "from ckpttool.cli.main import main\n"
        "from tests.support.executors import dump_state\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(dump_state())"
    )
    arguments = ["merge", source, *STRATEGIES[:2], "-o", tmp_path / "m.ckpt", *words]
    arguments += [key_file] if words else []
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    state = ast.literal_eval(done.stdout.splitlines()[-1])
    assert state == NO_DUMP if words else state[1] == 1


def test_a_worker_process_that_got_the_key_writes_no_core_dump():
    with ckpttool.open_engine("processes:1") as executor:
        assert executor.submit(dump_state).result()[1] == 1
        assert executor.submit(dump_state, Secret(KEY)).result() == NO_DUMP
        assert executor.submit(dump_state).result() == NO_DUMP
