"""The commands on encrypted checkpoints, and that the key is shown by none of them."""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import pickle
import shutil
import subprocess
import sys

import pytest

import ckpttool
from ckpttool.formats import read_index
from ckpttool.secret import Secret
from ckpttool.typed import TypedError, read_key
from tests.support.commands import SUFFIXES, message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES, case_facts, conversion, differences, digests
from tests.support.damage import flipped
from tests.support.encryption import KEY, MODES, PLAIN, encrypt
from tests.support.executors import NO_DUMP, dump_state, environment
from tests.support.plans import plan_merge
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


# ------------------------------------------------------------------------ what is wrong


def test_without_cryptography_the_way_to_it_is_told(key_file, monkeypatch):
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
def test_a_library_without_sm4_is_told(is_old, key_file, monkeypatch):
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
def test_the_key_comes_from_standard_input_as_well(case):
    from click.testing import CliRunner

    from ckpttool.cli.main import main

    path = GOLDEN / case / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    key = case_facts(case)["enc_key"].encode()
    for data in (key, key + b"\n", b"hex:" + key.hex().encode() + b"\n"):
        words = ["inspect", str(path), "--dec-key-file", "-"]
        assert CliRunner().invoke(main, words, input=data).exit_code == 0


def key_in(data):
    try:
        return read_key(io.BytesIO(data))
    except TypedError:
        return None


@pytest.mark.parametrize("size", [16, 24, 32])
def test_a_key_file_holds_the_bytes_or_their_digits(size):
    key = bytes(range(200, 200 + size))
    spelled = b"hex:" + key.hex().encode()
    for data in (key, key + b"\n", key + b"\r\n", spelled, spelled.replace(b"f", b"F") + b"\n"):
        assert key_in(data) == Secret(key)
    for data in (
        b"",
        key[1:],
        key + b"\n\n",
        b" " + key,
        key + b"\0",
        spelled[:-1],
        spelled + b"0",
    ):
        assert key_in(data) is None
    assert key_in(b"hex:" + b"zz" * size) is None


@pytest.mark.parametrize("key", [b"\n" * 16, b"hex:00112233445\n", b"0123456789abcde\n", b"A" * 32])
def test_bytes_of_the_right_number_are_always_the_key_itself(key):
    assert key_in(key) == Secret(key)


# ------------------------------------------------------------------------ secrets


def leaks(text):
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
    plan, _ = plan_merge(catalog, strategy, str(tmp_path / "m.h5"))
    index = catalog.files[0]
    tensor = next(iter(plan)).tensors[0]
    for thing in (catalog, plan, tensor, index, index.cipher, index.cipher.key):
        assert not leaks(repr(thing) + f"{thing}")
    assert "Secret(...)" in repr(index)
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
        plan, destination = plan_merge(
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
