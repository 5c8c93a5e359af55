"""Questions are yielded by what needs contents, read once, and answered by the evidence."""

import pytest

from ckpttool.checkpoint.evidence import Evidence, answer, ask
from ckpttool.checkpoint.interpret import decided_by_contents
from ckpttool.model.tensors import TensorMeta
from ckpttool.storage.sampling import Sample, digest, sample
from tests.support.checkpoints import ONE_STAGE, catalog_of, catalog_on_disk, noise, stored
from tests.support.evidence import Recorder
from tests.support.in_memory import checkpoint_in_memory


@pytest.fixture
def tensors(tmp_path):
    """Two tensors of each of two files."""
    held = {
        rank: {name: noise(f"{name}{rank}", "Float32", (3,)) for name in "ab"} for rank in (0, 1)
    }
    catalog = catalog_on_disk(tmp_path / "src", held)
    return [one for file in catalog.files.values() for one in file.tensors.values()]


def test_all_samples_of_a_file_are_one_task_and_other_reads_are_one_each(tensors):
    recorder = Recorder()
    samples = answer(ask(sample, tensors), recorder, Evidence())
    assert samples == {one: sample(one) for one in tensors}
    assert len(recorder.tasks) == 2
    assert answer(ask(digest, tensors), recorder, Evidence()) == {o: digest(o) for o in tensors}
    assert len(recorder.tasks) == 2 + len(tensors)


def test_nothing_is_read_twice(tensors):
    recorder, evidence = Recorder(), Evidence()

    def steps():
        first = yield from ask(sample, [tensors[0], tensors[0]])
        again = yield from ask(sample, tensors)
        assert first[tensors[0]] == again[tensors[0]]

    answer(steps(), recorder, evidence)
    answer(ask(sample, tensors), recorder, evidence)
    assert recorder.read == [(sample, one) for one in tensors]


def test_equal_headers_of_two_files_are_read_in_each(tensors):
    samples = answer(ask(sample, tensors), Recorder())
    assert len({one.meta for one in tensors}) == 2
    assert len(set(samples.values())) == 4


def test_a_question_that_is_answered_needs_no_file():
    tensor = stored(TensorMeta("w", "Float32", (3,)))
    evidence = Evidence({digest: {tensor: Sample(b"made up", False)}})
    assert answer(ask(digest, [tensor]), Recorder(), evidence)[tensor].digest == b"made up"


def test_only_unlisted_names_that_are_alike_on_several_ranks_are_compared():
    catalog = catalog_of(
        {
            0: {"w": (4, 3), "adam_m.w": (4, 3), "step": (), "odd": (1,), "text": "x", "one": ()},
            1: {"w": (4, 3), "adam_m.w": (4, 3), "step": (), "odd": (2,), "text": "y"},
        }
    )
    records = checkpoint_in_memory(catalog, ONE_STAGE).records
    assert decided_by_contents(catalog, records) == {"step": None}
