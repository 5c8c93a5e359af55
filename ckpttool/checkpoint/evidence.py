"""What contents show: questions about stored tensors, and the evidence that answers them.

Names, shapes and a strategy leave some things open, and contents decide these.  A function that
needs contents is a generator and reads nothing: it yields questions, and is sent the evidence.
Such functions call each other with ``yield from``.  `answer` runs one, and is the only reader
before the copy.  Tests run one without a file, on evidence that they make up.

A question is asked only if the answers to earlier ones leave it open.  It is read once: a later
function that asks it again finds it in the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeAlias, TypeVar, cast

from ckpttool.concurrency import wait_result
from ckpttool.model.tensors import StoredTensor
from ckpttool.problems import CkptToolError
from ckpttool.storage.sampling import sample, take_samples

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Question(Generic[T_co]):
    """Something that has to be read.

    Attributes
    ----------
    read
        A function of a module, which a worker calls.
    of
        Its one argument, such as a stored tensor.
    """

    read: Callable[..., T_co]
    of: Hashable


@dataclass(frozen=True, slots=True)
class Evidence:
    """The answers of all questions that were read so far."""

    answers: dict[Question[object], object] = field(default_factory=dict)

    def __getitem__(self, question: Question[T]) -> T:
        """Return the answer of a question that was read."""
        return cast(T, self.answers[question])

    def read(self, questions: Iterable[Question[object]], executor: Executor) -> None:
        """Read the questions that have no answer yet."""
        tasks: dict[Hashable, list[Question[object]]] = {}
        for question in dict.fromkeys(questions):
            if question not in self.answers:
                tasks.setdefault(_task_of(question), []).append(question)
        futures = [(asked, executor.submit(_read, asked)) for asked in tasks.values()]
        for asked, future in futures:
            answers = wait_result(future)
            self.answers.update(zip(asked, answers, strict=True))


Asking: TypeAlias = Generator[Collection[Question[object]], Evidence, T]


def ask(read: Callable[[K], T], subjects: Iterable[K]) -> Asking[dict[K, T]]:
    """Ask the same question of several subjects; return subject to answer."""
    questions = {one: Question(read, one) for one in subjects}
    evidence = yield questions.values()
    return {one: evidence[question] for one, question in questions.items()}


def answer(steps: Asking[T], executor: Executor, evidence: Evidence) -> T:
    """Run a function that asks questions, and return its result.

    Parameters
    ----------
    steps
        The generator.  An error of reading is raised in it, where it waits for the answers.
    executor
        Reads the contents.
    evidence
        What was read before; it receives what is read now.
    """
    proceed = partial(next, steps)
    while True:
        try:
            questions = proceed()
        except StopIteration as done:
            return cast(T, done.value)
        try:
            evidence.read(questions, executor)
            proceed = partial(steps.send, evidence)
        except CkptToolError as error:
            proceed = partial(steps.throw, error)


def _task_of(question: Question[object]) -> Hashable:
    """Return the key of the task that reads a question; all samples of a file are one task."""
    if question.read is sample and isinstance(question.of, StoredTensor):
        return question.of.file.path
    return question


def _read(questions: list[Question[object]]) -> list[object]:
    """Read the questions of one task; runs on a worker."""
    tensors = [one.of for one in questions if isinstance(one.of, StoredTensor)]
    if questions[0].read is sample:
        return [*take_samples(tensors)]
    return [question.read(question.of) for question in questions]
