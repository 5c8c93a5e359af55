"""Tensors of one kind are laid out once; what the kind does not decide is looked at for each."""

from msgspec.structs import replace

from ckpttool.checkpoint.interpret import interpret
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import BrokenTensor, FullTensor
from ckpttool.model.strategy import join_stages
from tests.support.checkpoints import with_names

ROWS = Layout((4,), ((0,), ()))


def test_equal_layouts_with_other_full_shapes_are_not_taken_for_each_other():
    """A full shape is no part of what makes layouts equal."""
    catalog = with_names({"a": (2, 3), "b": (2, 3), "c": (2, 3)})
    right, wrong = (replace(ROWS, full_shape=shape) for shape in ((8, 3), (4, 6)))
    strategy = join_stages({0: {"a": right, "b": wrong, "c": ROWS}})
    a, b, c = interpret(catalog, strategy, {})
    assert isinstance(a, FullTensor)
    assert isinstance(c, FullTensor)
    assert isinstance(b, BrokenTensor)
    assert b.problem is not None
    assert "the strategy lists full shape (4, 6)" in b.problem.facts


def test_tensors_are_of_one_kind_if_all_headers_have_them_alike():
    shapes = {"a": (2, 3), "b": (2, 3), "c": (3, 2), "d": (2, 3)}
    catalog = with_names(shapes)
    kinds = catalog.find_kinds()
    assert kinds["a"] == kinds["b"] == kinds["d"] != kinds["c"]
