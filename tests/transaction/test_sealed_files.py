"""The manifest: it comes with every output, tells what it is, and ``verify`` holds it to that."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from contextlib import nullcontext

import pytest

import ckpttool
from ckpttool.formats.local import ReadFile
from ckpttool.model import manifest as manifest_module
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import verify
from ckpttool.problems import UnreadableError
from ckpttool.storage.region_io import FlatFiles
from ckpttool.transaction.sealed_files import ManifestFile
from tests.support.checkpoints import noise, write_file
from tests.support.commands import SUFFIXES, files_below, message, run, run_well, verify_document
from tests.support.damage import flip_byte
from tests.support.executors import CASE, FORMATS, reshard_words
from tests.support.manifests import MANIFEST, listing_of, proven
from tests.support.readers import read


def merge_words(path, *more):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", path, *more]
    return [str(word) for word in words]


def hashes_of(path):
    return {name: hashlib.sha256(entry.data).hexdigest() for name, entry in read(path).items()}


def listed_hashes(folder, name):
    document = json.loads((folder / name).read_text())
    return {
        out["path"]: {tensor["name"]: "".join(tensor["sha256"]) for tensor in out["tensors"]}
        for out in document["outputs"]
    }


@pytest.mark.parametrize("output_format", FORMATS)
def test_hashes_are_those_of_the_contents(tmp_path, output_format):
    run_well(*reshard_words(tmp_path, output_format))
    hashes = listed_hashes(tmp_path, MANIFEST)
    assert hashes == {name: hashes_of(tmp_path / name) for name in files_below(tmp_path)}
    assert len(hashes) == 4


def test_a_large_tensor_has_a_hash_for_each_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "UNIT_BYTES", 64)
    entry = noise("w", "Int32", (5, 3, 7))
    write_file(tmp_path / "m.ckpt", {"w": entry}, "ckpt")
    run_well("merge", tmp_path / "m.ckpt", "-o", tmp_path / "o.safetensors")
    (output,) = ManifestFile.read(tmp_path / f"o.safetensors.{MANIFEST}").outputs()
    (tensor,) = output.tensors
    rows = [entry.data[at : at + 84] for at in range(0, 420, 84)]
    pieces = [row[at : at + 56] for row in rows for at in (0, 56)]
    assert tensor.sha256 == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
    assert run("verify", tmp_path / "o.safetensors", "--deep").exit_code == 0
    assert "stretch 2 of 10" in damaged_at(tmp_path / "o.safetensors", rows[0][56:])


def damaged_at(path, content):
    flip_byte(path, path.read_bytes().index(content))
    result = run("verify", path, "--deep")
    assert result.exit_code == 1
    return message(result)


def test_the_document_names_what_was_read_and_nothing_of_this_host(tmp_path):
    run_well(*reshard_words(tmp_path / "out", "ckpt"))
    target = CASE / "dst_strategy.ckpt"
    document = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert (document["schema"], document["ckpttool"]) == (1, ckpttool.__version__)
    assert document["step"] == "2_10"
    assert document["inputs"] == [
        {"path": f"src/{path.relative_to(CASE / 'src')}", "nbytes": path.stat().st_size}
        for path in sorted((CASE / "src").rglob("*.ckpt"))
    ]
    assert document["strategies"] == [
        {
            "path": name,
            "nbytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "role": role,
        }
        for role, path, name in (
            ("source", CASE / "src_strategy.ckpt", "src_strategy.ckpt"),
            ("target", target, os.path.relpath(target, tmp_path / "out")),
        )
    ]
    assert str(tmp_path) not in (tmp_path / "out" / MANIFEST).read_text()


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_byte_that_was_changed_is_found_with_its_file_tensor_and_hashes(tmp_path, output_format):
    path = tmp_path / f"m{SUFFIXES[output_format]}"
    run_well(*merge_words(path))
    (name, entry) = max(read(path).items(), key=lambda item: len(item[1].data))
    assert run("verify", path).exit_code == 0
    assert f"{name}: changed since it was written expected" in damaged_at(path, entry.data)
    before = hashlib.sha256(entry.data).hexdigest()
    after = hashlib.sha256(read(path)[name].data).hexdigest()
    result = run("verify", path, "--deep", "--json")
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["code"] == "manifest"
    assert finding["tensor"] == name
    assert finding["text"].endswith(f"{path.name}: {name}: changed since it was written")
    assert finding["facts"] == f"expected SHA-256 {before}, found {after}"
    assert run("verify", path).exit_code == 0  # only the data tells


def findings_of(*words):
    findings = verify_document(*words)["findings"]
    found = [finding for finding in findings if finding["code"] == "manifest"]
    return [": ".join(filter(None, (finding["text"], finding["facts"]))) for finding in found]


def test_one_file_of_a_set_is_held_against_the_manifest_of_the_set(tmp_path):
    run_well(*reshard_words(tmp_path / "out", "ckpt"))
    run_well(*merge_words(tmp_path / "model", "--max-shard-size", "10KB"))
    parts = sorted((tmp_path / "model").glob("model-*.safetensors"))
    ranks = [tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt" for rank in range(4)]
    for path, other in ((parts[0], parts[1]), (ranks[1], ranks[2])):
        name, entry = max(read(path).items(), key=lambda item: len(item[1].data))
        other.unlink()  # which nobody asks about
        assert findings_of(path, "--deep") == []
        assert f"{name}: changed since it was written expected" in damaged_at(path, entry.data)
        shutil.copy(path, path.with_name("copy" + path.suffix))
        assert findings_of(path.with_name("copy" + path.suffix), "--deep") == []


def test_a_header_that_is_not_as_listed_is_found(tmp_path):
    run_well(*merge_words(tmp_path / "m.ckpt"))
    path = tmp_path / f"m.ckpt.{MANIFEST}"
    document = json.loads(path.read_text())
    tensors = document["outputs"][0]["tensors"]
    tensors[0]["dtype"] = "Int64"
    tensors[1]["name"] = "other"
    path.write_bytes(listing_of(document))
    findings = "\n".join(findings_of(tmp_path / "m.ckpt"))
    assert f"{tensors[0]['name']}: expected Int64 " in findings
    assert "other: expected" in findings
    assert "found nothing" in findings


@pytest.mark.parametrize(
    "content",
    [
        *("", "\n", "{}", "[]", "\0" * 99, '{"schema": 1, "outputs": [{"path": "../x"}]}'),
        *(
            proven(line).decode()
            for line in ("", "\n", "{}\n", '{"schema": 1, "outputs": [\n{"path": "../x"}\n')
        ),
        proven('{"schema": 2, "outputs": [\n').decode(),
    ],
)
def test_a_manifest_that_is_none_is_a_finding_and_no_error(tmp_path, content):
    run_well(*merge_words(tmp_path / "m.ckpt"))
    (tmp_path / f"m.ckpt.{MANIFEST}").write_text(content)
    (finding,) = findings_of(tmp_path / "m.ckpt")
    assert f"m.ckpt.{MANIFEST}: the manifest cannot be read: " in finding


def test_an_output_that_fails_while_it_is_hashed_is_no_fault_of_the_manifest(tmp_path, monkeypatch):
    run_well(*merge_words(tmp_path / "m.ckpt"))

    def fail(tensor):
        raise UnreadableError(tensor.file.path, None, "Input/output error")

    monkeypatch.setattr("ckpttool.checks.manifest_hashes.hash_units", fail)
    monkeypatch.setattr("ckpttool.checks.manifest_hashes.fingerprint", lambda *of: b"")
    with pytest.raises(UnreadableError, match=r"m\.ckpt: Input/output error"):
        verify(Subject(ckpttool.scan(str(tmp_path / "m.ckpt"))), deep=True)


@pytest.fixture
def unreadable(monkeypatch):
    """Makes a file one of somebody else; who runs the tests may be allowed everything."""
    real = ReadFile.__init__

    def forbid(name):
        def fake(file, path, *how):
            if str(path) == str(name):
                raise PermissionError(13, os.strerror(13), str(path))
            real(file, path, *how)

        monkeypatch.setattr(ReadFile, "__init__", fake)

    return forbid


def test_a_manifest_that_may_not_be_read_is_an_error_only_where_it_is_needed(tmp_path, unreadable):
    out, strategy = tmp_path / "new", CASE / "dst_strategy.ckpt"
    run_well(*reshard_words(out, "ckpt"))
    unreadable(out / MANIFEST)
    said = f"{out / MANIFEST}: Permission denied (owner root, mode 644; this user is root)"
    merge = ["merge", out, "-o", tmp_path / "m.ckpt"]
    for words in (merge, ["inspect", out], ["diff", out, out]):
        result = run_well(*words, "-s", strategy, "-q")
        facts = f"the manifest cannot show whether {strategy} is its strategy"
        assert f"warning[other_strategy]: {said} {facts}" in message(result)
    reason = said.removeprefix(f"{out / MANIFEST}: ")
    expected = f"{out / MANIFEST}: the manifest cannot be read {reason} Try: run it as the owner"
    assert expected in message(run("verify", out, "-s", strategy))
    result = run("finalize", out)
    assert (result.exit_code, said in message(result)) == (3, True)
    before = (out / MANIFEST).stat()
    result = run(*reshard_words(out, "ckpt"), "--resume")
    assert result.exit_code == 5
    assert f"{said} resuming needs it Try: --overwrite" in message(result)
    assert (out / MANIFEST).stat() == before
    run_well(*reshard_words(out, "ckpt"), "--resume", "--overwrite")


def test_the_key_of_an_encrypted_source_is_nowhere(tmp_path):
    pytest.importorskip("cryptography")
    from tests.support.encryption import KEY, PLAIN, encrypt

    (tmp_path / "secret.bin").write_bytes(KEY)
    (tmp_path / "m.ckpt").write_bytes(encrypt(PLAIN, "AES-GCM"))
    words = ["merge", tmp_path / "m.ckpt", "-o", tmp_path / "out" / "m.h5"]
    run_well(*words, "--dec-key-file", tmp_path / "secret.bin")
    data = (tmp_path / "out" / f"m.h5.{MANIFEST}").read_bytes()
    assert not [word for word in (KEY, KEY.hex().encode(), b"secret") if word in data]


@pytest.fixture
def bytes_read(monkeypatch):
    """How many bytes of each tensor are read in this process."""
    counts = Counter()
    read_bytes = FlatFiles.read_bytes

    def count(self, tensor, offset, out):
        counts[tensor.file.path, tensor.meta.name] += out.nbytes
        read_bytes(self, tensor, offset, out)

    monkeypatch.setattr(FlatFiles, "read_bytes", count)
    return counts


@pytest.mark.parametrize("more", [[], ["--crc"]])
def test_every_byte_of_an_output_is_read_once_and_progress_ends_at_the_end(
    tmp_path, monkeypatch, bytes_read, more
):
    monkeypatch.setattr(manifest_module, "UNIT_BYTES", 1 << 10)
    run_well(*merge_words(tmp_path / "m.ckpt", *more))
    catalog = ckpttool.scan(str(tmp_path / "m.ckpt"))
    bytes_read.clear()
    totals, steps = [], []

    def open_progress(total, phase="reading"):
        totals.append(total)
        return nullcontext(steps.append)

    report = verify(Subject(catalog), deep=True, open_progress=open_progress)
    assert report.findings == ()
    tensors = [tensor for tensor in catalog.files[0].tensors.values() if tensor.meta.text is None]
    assert bytes_read == {
        (tensor.file.path, tensor.meta.name): tensor.meta.nbytes for tensor in tensors
    }
    assert sum(steps) == sum(totals)
    assert all(step >= 0 for step in steps)


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_are_hashed_while_they_are_compared(tmp_path, monkeypatch, bytes_read, replicas):
    monkeypatch.setattr(manifest_module, "UNIT_BYTES", 1 << 12)
    source = tmp_path / "m.ckpt"
    write_file(source, {"w": noise("w", "Float32", (6, 1 << 13))}, "ckpt")
    layout = {"dev_matrix": [replicas, 2], "tensor_map": [0, -1]}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": {"w": layout}}))
    words = ["split", source, "-d", tmp_path / "s.json", "-o", tmp_path / "out"]
    run_well(*words, "--format", "ckpt")
    bytes_read.clear()
    words = ["verify", tmp_path / "out", "-s", tmp_path / "s.json", "--deep", "--ignore", "nan"]
    run_well(*words)
    assert len(bytes_read) == 2 * replicas
    samples = 3 * 4096
    assert {count - samples for count in bytes_read.values()} <= {3 << 15, (3 << 15) - samples}
    for rank in range(2 * replicas):
        path = tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        good = path.read_bytes()
        flip_byte(path)
        findings = json.loads(run(*words, "--json").stdout)["findings"]
        (wrong,) = [finding for finding in findings if finding["code"] == "manifest"]
        assert wrong["ranks"] == [rank]
        assert wrong["facts"].endswith("(of stretch 24 of 24)")
        path.write_bytes(good)


def test_names_of_files_that_are_no_text_are_read_back(tmp_path):
    source, out = (tmp_path / os.fsdecode(name) for name in (b"from \xff", b"to \xfe\xff"))
    try:
        shutil.copytree(CASE / "src", source)
    except OSError:
        pytest.skip("this file system has no such names")
    words = ["reshard", source, "-s", CASE / "src_strategy.ckpt"]
    words += ["-d", CASE / "dst_strategy.ckpt", "-o", out, "--format", "ckpt"]
    run_well(*words, "--prefix", os.fsdecode(b"\xfd"))
    result = run_well("verify", out, "-s", CASE / "dst_strategy.ckpt", "--deep", "--ignore", "zero")
    assert "manifest" not in message(result)
    (out / "rank_1" / os.fsdecode(b"\xfd1.ckpt")).unlink()
    assert "3 kept, 1 written" in message(
        run_well(*words, "--prefix", os.fsdecode(b"\xfd"), "--resume")
    )
