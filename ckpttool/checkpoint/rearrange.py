"""A checkpoint as a recipe makes it: tensors with the names and axes of the other side.

Every tensor that is wanted is used by a rule, and every tensor that the rules ask for is made.  So
what a recipe does not know stops the command before the first byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import add, sub
from pathlib import Path

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Rearranged
from ckpttool.checkpoint.rows import RowChanges
from ckpttool.lazy import compile_late
from ckpttool.model.choices import is_of_vocabulary
from ckpttool.model.joining import format_names
from ckpttool.model.layout import Layout
from ckpttool.model.patterns import Pattern
from ckpttool.model.plan import Term
from ckpttool.model.recipes import SIDES, Relation, UsedRecipe, Value, arrange
from ckpttool.model.region import Arrangement
from ckpttool.model.slicing import FullTensor, Part, RearrangedSlicing
from ckpttool.problems import Diagnostic, PlanError
from ckpttool.strategy_files.recipe_files import SHIPPED
from ckpttool.wording import any_of, count, fold_names, format_numbers, format_shape, shorten

_MTP = "num_nextn_predict_layers"  # which transformers keeps in a model without those layers
_LAYER = compile_late(r"\blayers\.(\d{1,7})\.")
_THIS_MODEL = "--hf-config of this model"
Copies = Sequence[tuple[FullTensor, FullTensor]]  # tensors that should hold the same


def rearrange(
    checkpoint: Checkpoint, used: UsedRecipe
) -> tuple[Checkpoint, Sequence[Diagnostic], Copies]:
    """Return a checkpoint with the tensors that a recipe makes, what it did, and copies.

    Copies are left out; the caller compares them with what they copy.  The direction follows from
    the names.

    Raises
    ------
    PlanError
        The recipe does not fit, or lacks a value.
    """
    stand_ins: dict[str, Value] = {}  # for values that are not given, so that all are reported
    while True:
        trial = used.with_given(stand_ins)
        questions = [*_questions(checkpoint, used, stand_ins)]
        try:
            rearranging = _Rearranging(checkpoint, trial)
            return *rearranging.run(questions), rearranging.copies
        except ValueError as error:
            problem = _problem(
                checkpoint, "a rule cannot be evaluated", str(error), _rule_hint(used)
            )
            raise PlanError(questions or [problem]) from error
        except LookupError as error:
            name = str(error.args[0])
            if name in stand_ins:
                raise PlanError(questions) from error
            choice = used.recipe.choices.get(name)
            size = () if error.args[1:] else 1  # of a list, or of a number
            stand_ins[name] = size if choice is None else next(iter(choice.values))


def _problem(checkpoint: Checkpoint, message: str, facts: str = "", hint: str = "") -> Diagnostic:
    where = checkpoint.catalog.root
    return Diagnostic("recipe", message, facts=facts, hint=hint, where=where)


def _questions(
    checkpoint: Checkpoint, used: UsedRecipe, stand_ins: Mapping[str, Value]
) -> Iterator[Diagnostic]:
    """Yield what nothing gives: sizes, and choices, each with all answers as its hint."""
    choices, keys = used.recipe.choices, used.recipe.sizes
    sizes = {name: keys.get(name, name) for name in stand_ins if name not in choices}
    numbers = {of if of.isidentifier() else name: of for name, of in sizes.items()}
    has_config = bool(used.config)
    is_typed = has_config and () not in stand_ins.values()  # nobody types a list
    answers: dict[str, Value] = dict.fromkeys(numbers if is_typed else (), "NUMBER")
    answers |= {name: usual for name, usual in stand_ins.items() if name in choices}
    answered = used.with_given(answers).option
    if sizes:
        names = [name if of == name else f"{name} ({of})" for name, of in numbers.items()]
        message = f"the configuration lacks {count(len(names), 'size')}"
        message = message if has_config else "nothing tells the sizes of the model"
        hint = _THIS_MODEL if has_config else "--hf-config with the folder of its config.json"
        hint = answered if is_typed else hint
        where = used.folder or checkpoint.catalog.root
        facts = f"{used.typed} needs {shorten(names, 8)}"
        if family := _other_family(used):
            facts = f"{facts}; config.json says {family}"
            hint = f"--recipe {family}, or {_THIS_MODEL}"
        yield Diagnostic("recipe", message, facts=facts, hint=hint, where=where)
        if family:
            return  # choices of this recipe would not help
    if open_choices := [name for name in stand_ins if name in choices]:
        message = "names do not tell how weights are laid out"
        facts = "; ".join(
            f"{name} is {any_of(choices[name].values)} ({choices[name].why})"
            for name in open_choices
        )
        yield _problem(checkpoint, message, facts, f"{answered}, if these are the values")


def _rule_hint(used: UsedRecipe) -> str:
    """Return what to do about a rule that does not fit; a person can mend their own."""
    if used.typed not in SHIPPED:
        return f"another rule in {used.typed}, or {_THIS_MODEL}"
    return f"{_THIS_MODEL}; `ckpttool recipe show {used.typed}`"


def _other_family(used: UsedRecipe) -> str:
    """Return the recipe that ``config.json`` names, if it is not the one in use; else ""."""
    family = str(used.config.get("model_type")).replace("_", "-")
    known = (used.recipe.recipe.removesuffix("-legacy"), "llama")  # which mcore writes, too
    is_other = used.typed in SHIPPED and family in SHIPPED and family not in known
    return family if is_other else ""


class _Rearranging:
    def __init__(self, checkpoint: Checkpoint, used: UsedRecipe) -> None:
        self._checkpoint, self._used = checkpoint, used
        recipe, values = used.recipe, used.values
        self._copies = [*recipe.copied(values)]
        self._stored = {tensor.name: tensor for tensor in checkpoint.tensors}
        ours = {recipe.spelled(name): name for name in self._stored}
        side = used.side_of(self._stored)
        self._side, self._is_of_family = side or 0, side is not None
        self._names = {name: name for name in self._stored} if self._side else ours
        self._problems: list[Diagnostic] = []
        self._misfits = dict[str, str]()  # of all layers, which are folded
        self._made: dict[str, FullTensor] = {}
        self._called: dict[str, str] = {}
        self._confirmed = set[str]()  # of these, by sizes of the configuration
        self._dtypes: dict[str, str] = {}
        self._copied: dict[str, str] = {}
        self._used_names = set[str]()
        self._makers = Counter[str]()  # how many rules and copies make each tensor
        self._halves = set[str | None]()  # of relations that lack others
        self._of_source = checkpoint.scales[0]
        self._scales: dict[str, Term] = {}
        self._rows = RowChanges(checkpoint)
        self.copies: list[tuple[FullTensor, FullTensor]] = []
        self._of_states: list[Diagnostic] = []

    def run(self, questions: Sequence[Diagnostic]) -> tuple[Checkpoint, Sequence[Diagnostic]]:
        """Make the tensors; what is wrong otherwise may follow from the answers to questions."""
        checkpoint, recipe = self._checkpoint, self._used.recipe
        message, ranks = "a recipe takes full tensors", len(checkpoint.catalog.files)
        if any(tensor.own_ranks for tensor in self._stored.values()):
            facts, hint = "each file is read by itself", "merge or reshard, with -s"
            raise PlanError([_problem(checkpoint, message, facts, hint)])
        if not checkpoint.catalog.is_merged and ranks > 1 and not checkpoint.are_joined:
            facts, hint = f"{count(ranks, 'rank')} without a strategy", "-s STRATEGY"
            raise PlanError([_problem(checkpoint, message, facts, hint)])
        if not self._is_of_family:
            message = f"no tensor has a name of the recipe {recipe.recipe}"
            facts, hint = f"found {shorten(self._stored, 2)}", "--recipe of this model's family"
            if family := _other_family(self._used):
                facts, hint = f"{facts}; config.json says {family}", f"--recipe {family}"
            raise PlanError([_problem(checkpoint, message, facts, hint)])
        missing: list[str] = []
        for relation in self._used.relations:
            absent = [name for name in relation.sides[self._side] if name not in self._names]
            missing += absent
            if absent:
                self._halves.update(map(self._names.get, relation.sides[self._side]))
            else:
                self._add(relation)
        self._add_copies(missing)
        self._report(missing)
        self._problems += self._rows.refused()
        if questions:
            self._problems = [*questions, *self._of_states]
        if self._problems:
            raise PlanError(self._problems)
        kept = [self._stored[name] for name in self._called]
        fused = frozenset(self._rows.regrouped_by)
        scales = {name: term for name, term in self._of_source.items() if name in self._called}
        rearranged = Rearranged(
            checkpoint,
            self._called,
            self._dtypes,
            self._copied,
            fused,
            scales | self._scales,
            frozenset(self._confirmed),
        )
        tensors = replace(checkpoint.options.tensors, include=(), exclude=(), weights_only=False)
        made = replace(
            checkpoint,
            records=(*kept, *self._made.values()),
            options=replace(checkpoint.options, tensors=tensors),
            unfiltered=None,
            rearranged=rearranged,
        )
        return made, (self._note(), *self._unlike_config())

    def _add(self, relation: Relation) -> None:
        """Add the tensors of the other side that a relation makes."""
        stored = {self._names[name]: axes for name, axes in relation.sides[self._side].items()}
        others = {self._written(name): it for name, it in relation.sides[1 - self._side].items()}
        sides = (others, stored) if self._side else (stored, others)
        relation = replace(relation, sides=sides)
        if twice := self._used_names.intersection(stored):
            self._refuse("two rules take one tensor", shorten(twice, 3))
        scales = [self._of_source[name] for name in stored if name in self._of_source]
        self._used_names.update(stored, (term.source.name for term in scales))
        self._makers.update(others.keys())
        sources = {name: self._stored[name] for name in stored}
        shapes = {name: tensor.meta.shape for name, tensor in sources.items()}
        dtypes = {tensor.meta.dtype for tensor in sources.values()}
        of_scales = {term.source.meta.dtype for term in scales}
        if len(dtypes) > 1 or len(of_scales) > 1 or 0 < len(scales) < len(stored):
            facts = f"{shorten(stored, 3)}: {', '.join(sorted(dtypes))}"
            facts += f"; with scales: {len(scales)}" if scales else ""
            self._refuse("parts of one tensor have several types", facts)
            return
        try:
            given, wanted = arrange(relation, self._side, shapes)
        except ValueError as error:
            self._misfits[str(error)] = ""
            return
        if relation.is_same:
            (old,), (self._called[old],) = stored, others
            words = (self._used.config.get("vocab_size"),)
            has_these_rows = is_of_vocabulary(old) and shapes[old][:1] == words
            if len(relation.open_factors) <= int(has_these_rows):  # no rule gives their number
                self._confirmed.add(old)
            return
        wanted_dtypes = {self._checkpoint.wanted_dtype(tensor.meta) for tensor in sources.values()}
        if len(wanted_dtypes) > 1:
            facts = f"{shorten(stored, 3)}: {', '.join(sorted(wanted_dtypes))}"
            hint = "--dtype with a pattern for all of them"
            self._refuse("parts of one tensor get several types", facts, hint)
            return
        (wanted_dtype,) = wanted_dtypes
        parts = [
            part
            for name, arrangement in given.items()
            for part in _parts(self._as_one_slice(sources[name]), arrangement)
        ]
        first = next(iter(sources.values()))
        for name, arrangement in wanted.items():
            of_name = tuple(it for it in parts if it.arrangement.overlaps(arrangement))
            self._made[name] = first.rearranged(RearrangedSlicing(arrangement, of_name), name)
            self._dtypes[name] = relation.dtype or wanted_dtype
            if scales:
                self._scales[name] = self._scale_of(name, scales[0].source, self._made[name])

    def _scale_of(self, name: str, like: FullTensor, made: FullTensor) -> Term:
        """Return the scales of a tensor, each where the elements are that it multiplies."""
        slicing, parts = made.slicing, []
        assert isinstance(slicing, RearrangedSlicing), "it is made of parts"
        for part in slicing.parts:
            of_source = self._of_source[part.name].source.slicing
            assert isinstance(of_source, RearrangedSlicing), "it is spread over the weight"
            (spread,) = of_source.parts
            parts.append(replace(spread, arrangement=part.arrangement, start=part.start))
        return Term(like.rearranged(replace(slicing, parts=tuple(parts)), name), role="scale")

    def _as_one_slice(self, tensor: FullTensor) -> FullTensor:
        """Return a tensor with whole parts, if each rank fused its own."""
        return self._rows.regrouped(tensor, [Layout.unsharded(len(tensor.meta.shape))])

    def _written(self, name: str) -> str:
        recipe, values = self._used.recipe, self._used.values
        return recipe.written_as(name, values) if self._side else name

    def _add_copies(self, missing: list[str]) -> None:
        news = {new: old for old, new in self._called.items()}
        for name, of, is_written in self._copies:
            if self._side and name in self._stored:
                self._check_copy(name, of)
            elif not is_written:
                continue
            elif self._side:
                missing += {name} - self._checkpoint.left_out.keys()
            elif (made := self._made.get(of)) is not None:
                self._made[name] = replace(made, meta=replace(made.meta, name=name))
                self._copied[name] = of
                self._makers[name] += 1
            elif of in news:
                tensor = self._stored[news[of]]
                self._copied[name] = tensor.name
                whole = Arrangement.whole(tensor.meta.shape)
                slicing = RearrangedSlicing(whole, tuple(_parts(tensor, whole)))
                self._made[name] = tensor.rearranged(slicing, name)
                self._makers[name] += 1
            else:
                self._refuse("a copy is of no tensor", f"{name}: {of}")

    def _check_copy(self, name: str, of: str) -> None:
        """Take a tensor for the copy of another, if they may be equal."""
        copy, tensor = self._stored[name], self._stored.get(of)
        if tensor is None:
            return  # the rules report it as missing
        self._used_names.add(name)
        self.copies.append((copy, tensor))
        both = (copy.meta, tensor.meta)
        if len({(meta.dtype, meta.shape) for meta in both}) > 1:
            facts = f"{name} {copy.meta.dtype} {format_shape(copy.meta.shape)}, {of} "
            facts += f"{tensor.meta.dtype} {format_shape(tensor.meta.shape)}"
            self._refuse("a copy is not like what it copies", facts)

    def _report(self, missing: list[str]) -> None:
        for misfit, _ in fold_names(self._misfits):
            self._refuse("a shape is not that of the rule", misfit, _rule_hint(self._used))
        recipe = self._used.recipe.recipe
        broken = {tensor.name for tensor in self._checkpoint.records} - self._stored.keys()
        unknown = broken.union(map(self._used.recipe.spelled, broken))  # a check reports them
        if missing := [name for name in missing if name not in unknown]:
            message = f"no file has {count(len(missing), 'tensor')} that {recipe} asks for"
            named = self._used.names[self._side].intersection(missing)
            alone = self._used.with_given({_MTP: 0})
            has_mtp = named and self._used.values.get(_MTP)
            is_of_mtp = has_mtp and named.isdisjoint(alone.names[self._side])
            hint = f"{alone.option}, if the model predicts one token"
            hint = hint if is_of_mtp else f"a source that has them, or {_THIS_MODEL}"
            self._refuse(message, format_names(missing), hint)
        rest = [name for name in self._stored if name not in self._used_names | self._halves]
        weights = [name for name in rest if self._checkpoint.belonging(name).is_model]
        if states := [name for name in rest if name not in {*weights}]:
            message = f"{count(len(states), 'state')} that no rule of {recipe} knows"
            facts = format_names(states)
            self._of_states = [_problem(self._checkpoint, message, facts, "--weights-only")]
        if weights:
            is_own = self._used.typed not in SHIPPED
            rule = f"a rule in {self._used.typed}" if is_own else f"another recipe than {recipe}"
            facts, hint = format_names(weights), f"{rule}, or --exclude"
            layers = self._used.values.get("num_hidden_layers")
            numbers = {int(match[1]) for name in weights if (match := _LAYER.search(name))}
            keys = self._used.keys_of({*map(self._used.recipe.spelled, weights)})
            if family := _other_family(self._used):
                facts, hint = f"{facts}; config.json says {family}", f"--recipe {family}"
            elif isinstance(layers, int) and max(numbers, default=-1) >= layers:
                facts += f"; num_hidden_layers is {layers}, and these are of "
                facts += f"layer {format_numbers(numbers)}"
                hint = f"{_THIS_MODEL}, or --exclude"
            elif keys:
                facts += f"; a rule has them, depending on {shorten(keys, 3)}"
                hint = f"{_THIS_MODEL}, {hint}"
            message = f"{count(len(weights), 'tensor')} that no rule of {recipe} knows"
            self._refuse(message, facts, hint)
        self._problems += self._of_states
        if twice := [name for name, number in self._makers.items() if number > 1]:
            message = f"two rules make one tensor of {SIDES[1 - self._side]}"
            self._refuse(message, shorten(twice, 3))

    def _note(self) -> Diagnostic:
        stored = {name for tensor in self._made.values() for name in tensor.stored_names}
        by_axes = stored - self._called.keys()  # those may be copied, too
        recipe, used = self._used.recipe, len(self._used_names)
        message = f"{used} of {count(len(self._stored), 'tensor')} by the recipe {recipe.recipe}: "
        message += f"{len(self._called)} by name, {len(by_axes)} by axes"
        facts = [f"copies: {count(len(self.copies), 'tensor')}"] if self.copies else []
        if scales := {term.source.name for term in self._of_source.values()}:
            facts.append(f"multiplied: {count(len(scales & self._used_names), 'scale')}")
        left, patterns = self._checkpoint.left_out, [*map(Pattern, self._used.recipe.unused)]
        by_rules = sum(any(pattern.matches(name) for pattern in patterns) for name in left)
        for by, number in (("rules", by_rules), ("options", len(left) - by_rules)):
            facts += [f"left out by {by}: {count(number, 'tensor')}"] if number else []
        return replace(_problem(self._checkpoint, message, "; ".join(facts)), code="recipe_used")

    def _unlike_config(self) -> Iterator[Diagnostic]:
        """Yield a warning if a model gets another vocabulary than its configuration says."""
        said = self._used.config.get("vocab_size")
        if (
            self._side
            or not isinstance(said, int)
            or self._checkpoint.options.tensors.vocabulary_rows
        ):
            return
        rows = {self._stored[old].meta.shape[0] for old in self._called if is_of_vocabulary(old)}
        for number in rows - {said}:
            config = Path(self._used.folder, "config.json")
            message = f"the vocabulary has {number} rows, and {config} says {said}"
            hint = f"--cut-vocab {said}" if number > said else _THIS_MODEL
            yield replace(_problem(self._checkpoint, message, hint=hint), code="not_resized")

    def _refuse(self, message: str, facts: str = "", hint: str = "") -> None:
        self._problems.append(_problem(self._checkpoint, message, facts, hint))


def _parts(tensor: FullTensor, arrangement: Arrangement) -> Iterator[Part]:
    """Yield the parts of a tensor in a space: one, or the runs of rows that were regrouped."""
    if not isinstance(tensor.slicing, RearrangedSlicing):
        yield Part(tensor.name, tensor.slicing, arrangement)
        return
    for run in tensor.slicing.parts:
        rows = run.arrangement.box
        for box in arrangement.boxes(rows):
            inside = map(sub, arrangement.index(box.start), rows.start)
            start = tuple(map(add, run.start, inside))
            yield Part(run.name, run.slicing, Arrangement(arrangement.axes, box), start)
