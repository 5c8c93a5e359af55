"""The answer of ``recipe check``: each tensor that a recipe makes, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import Transfer
from ckpttool.model.strategy import Strategy
from ckpttool.operations.answer import Answer, Document, Each, Reported, Shape, notes_and_problems
from ckpttool.operations.plans import plan_reading


class MadeTensor(Answer, frozen=True):
    """A tensor that a recipe makes.

    Attributes
    ----------
    name
        Its name.
    dtype
        Its element type.
    shape
        Its shape.
    made_of
        The stored tensors that it has its elements of.
    """

    name: str
    dtype: str
    shape: Shape
    made_of: tuple[str, ...]


class RecipeCheck(Document, frozen=True):
    """The JSON document of recipe check.

    Attributes
    ----------
    path
        The checkpoint.
    step
        Its step, as in the file names; null if no name has one.
    recipe
        The name of the recipe.
    tensors
        The tensors that it makes.
    notes
        What is worth knowing.
    """

    path: str
    step: str | None
    recipe: str
    tensors: Sequence[MadeTensor]
    notes: Reported


def check_recipe(
    catalog: Catalog, strategy: Strategy | None, options: ResolveOptions, executor: Executor
) -> RecipeCheck:
    """Return what the recipe among ``options`` makes of a checkpoint.

    Raises
    ------
    PlanError
        It does not use every tensor, or cannot make every tensor that it asks for.
    """
    assert options.tensors.recipe is not None, "the command asks for one"
    plan, found = plan_reading(catalog, strategy, None, None, options, executor)
    recipe, notes = options.tensors.recipe.recipe.recipe, notes_and_problems(found)["notes"]
    tensors = Each(_made, tuple(plan.transfers))
    return RecipeCheck(catalog.root, catalog.step, recipe, tensors, notes)


def _made(transfer: Transfer) -> MadeTensor:
    source = transfer.source
    return MadeTensor(transfer.name, transfer.dtype, source.meta.shape, tuple(source.stored_names))
