"""URLs in the place of paths: each is refused by name, and nothing is written."""

from __future__ import annotations

import pytest

import ckpttool
from ckpttool.formats.local import url_problem
from tests.support.commands import message, run
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.plans import plan_merge, plan_reshard

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SRC, STRATEGY, DST = CASE / "src", CASE / "src_strategy.ckpt", CASE / "dst_strategy.ckpt"
RESHARD = ["reshard", SRC, "-s", STRATEGY, "-d", DST]
URLS = ["s3://bucket/z.h5", "obs://bucket/z", "gs://b/z.ckpt", "hdfs://node:9000/z", "S3A://b/z"]


def places(url):
    """Commands that have a URL somewhere."""
    return [
        ["inspect", url],
        ["verify", url],
        ["diff", url, SRC],
        ["diff", SRC, url],
        ["diff", SRC, SRC, "-s", url],
        ["diff", SRC, SRC, "-s", STRATEGY, "--b-strategy", url],
        ["diff", SRC, SRC, "-s", STRATEGY, "--b-pattern", url],
        ["finalize", url],
        ["merge", url, "-o", "x.h5"],
        ["merge", SRC, "-s", url, "-o", "x.h5"],
        ["merge", SRC, "-s", STRATEGY, "-o", url],
        ["merge", SRC, "-s", STRATEGY, "-o", url, "--max-shard-size", "1MB"],
        ["merge", SRC, "-s", STRATEGY, "-o", "x.h5", "--pattern", url],
        ["merge", SRC, "-s", STRATEGY, "-o", "x.h5", "--pattern", url + "/{rank}/*.ckpt"],
        ["split", url, "-d", DST, "-o", "x"],
        ["split", SAMPLES, "-d", url, "-o", "x"],
        ["split", SAMPLES, "-d", DST, "-o", url],
        ["split", SAMPLES, "-d", DST, "-o", "x", "--write-strategy", url],
        [*RESHARD, "-o", url],
        [*RESHARD, "-d", url, "-o", "x"],
        [*RESHARD, "-o", "x", "--write-strategy", url],
    ]


@pytest.mark.parametrize("url", URLS)
def test_every_path_on_the_command_line_is_one(url, tmp_path):
    for words in places(url):
        result = run(*words)
        assert result.exit_code == 2, words
        assert url in message(result)
        assert "a URL" in message(result)
        assert "copy the files" in message(result)
        assert not list(tmp_path.iterdir()), words


def test_a_key_is_not_repeated():
    words = ["--dec-key-file", "s3://bucket/secret"]
    result = run("inspect", SRC, *words)
    assert (result.exit_code, "a URL (s3://), not a path" in message(result)) == (2, True)
    assert "secret" not in message(result)


def test_a_url_of_a_local_file_says_which_path_it_is():
    path = SRC / "rank_0" / "checkpoint-2_10.ckpt"
    result = run("inspect", f"file://{path}")
    assert result.exit_code == 2
    assert f"name the file itself, {path}" in message(result)


def test_in_python_too(tmp_path):
    url = "s3://bucket/z"
    catalog, strategy = ckpttool.scan(str(SRC)), ckpttool.read_strategy([str(STRATEGY)])
    for call in (
        lambda: ckpttool.scan(url),
        lambda: ckpttool.read_strategy([url]),
        lambda: plan_merge(catalog, strategy, url),
        lambda: plan_merge(
            catalog, strategy, url, output_options=ckpttool.OutputOptions(max_shard_bytes=1 << 20)
        ),
        lambda: plan_reshard(catalog, strategy, strategy, url),
        lambda: plan_reshard(
            catalog,
            strategy,
            strategy,
            "x",
            output_options=ckpttool.OutputOptions(strategy_path=url),
        ),
        lambda: ckpttool.write_strategy(strategy, url),
    ):
        with pytest.raises(ckpttool.CkptToolError, match="a URL"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a/b", "/a//b", "./s3://bucket", "rank{rank}/*", "1://x", "a:b"])
def test_paths_are_no_urls(text):
    assert url_problem(text) is None
