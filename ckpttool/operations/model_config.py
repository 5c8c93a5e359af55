"""What a ``config.json`` says of the tensors of a model, compared with their names and shapes.

It goes by what layers have in common, not by a list of models.  Each layer has a kind, by the keys
of the configuration that speak of single layers: ``first_k_dense_replace``, ``layer_types`` and the
like.  What half of the layers of a kind have, the others lack.  What only some have and no key
explains is a doubt, not an error.  So is what no number in the configuration explains.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from shlex import quote

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.formats.local import is_file, is_folder
from ckpttool.lazy import compile_late
from ckpttool.model.dtypes import FLOAT8
from ckpttool.model.names import parse_name
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.tensor_diff import Metas, fold_alike
from ckpttool.problems import Diagnostic, FormatError, PlanError, join_clauses
from ckpttool.strategy_files.config_files import CONFIG, read_config
from ckpttool.wording import MOST_RANGES, count, format_numbers, format_shape

MAX_NUMBER = 10_000  # of layers, and of experts; stops hostile files

# Keys of one meaning; the first that the configuration has counts.
_LAYERS = (
    *("num_hidden_groups", "num_hidden_layers", "num_decoder_layers", "n_layer", "num_layers"),
    *("n_layers", "decoder_layers"),
)
_LISTS_OF_LAYERS = ("layers_block_type", "layer_types")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_WIDTH = ("intermediate_size_mlp", "intermediate_size")
_WIDTH_OF_EXPERTS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # the last leads back

# Weights of a module, and one of those that belong to them.
_TOGETHER = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("gate_proj", "down_proj"), ("up_proj",)),
    (("gate_up_proj",), ("down_proj",)),
    (("down_proj",), ("gate_up_proj", "up_gate_proj", "up_proj", "gate_proj")),
    (("w1", "w3"), ("w2",)),
    (("k_proj", "v_proj"), ("q_proj",)),
    (("q_proj", "v_proj"), ("k_proj",)),
    (("enorm", "hnorm", "h_proj"), ("e_proj",)),
    (("enorm", "hnorm", "e_proj"), ("h_proj",)),
    (("e_proj", "h_proj", "hnorm"), ("enorm",)),
    (("e_proj", "h_proj", "enorm"), ("hnorm",)),
)

# Keys that divide layers into kinds: each k-th is another, or a list has an item for each.
_EVERY = compile_late(r"_(step|freq|frequency|interval|period|share_factor)$|^layer_group_size$")
_BORDER = compile_late(r"^first_k_|layer.*_(start|end)(_|$)")
_BY_LAYER = compile_late(r"layer|block|ratio|pattern|freq|idx|indices")

_LAYER = compile_late(r"((?:.*?\.)?)([0-9]{1,7})\.(.*)")  # around the first number
_EXPERT = compile_late(r"^((?:.*\.)?(?!shared)\w*experts?)\.([0-9]{1,7})\.(.*)")
_ZEROS = compile_late(r"(?<![^.])0+(?=[0-9]+\.)")  # before numbers, as in layers.07
_ROUTER = compile_late(r"(?:^|\.)(?!shared)\w*(?:gate|router)\.(?:.*\.)?weight$")
_EMBEDDING = compile_late(
    r"(?:^|\.)(?:embed(?:_tokens|_in)?|(?:word_|tok_)?embeddings?|wte)\.(?:embedding$|(?:embedding_)?w\w*$)"
)
_HEAD = compile_late(r"(?:^|\.)(?:\w*lm_head|output_layer|embed_out|head|output)\.weight$")
_NORM = compile_late(r"norm|(?:^|[._])ln(?:[._]|$)")
_NOT_TEXT = "vis|audio|image|speech"
_MODALITY = compile_late(_NOT_TEXT)
_OTHER_STACKS = compile_late(f"{_NOT_TEXT}|mtp|codec|vq|qformer")
_LOOPS = compile_late(r"loop|cycle")  # of keys of models that run a layer several times
_OF_MTP = ("enorm.weight", "hnorm.weight", "eh_proj.weight")  # beside those of a decoder layer


class Config(Struct, frozen=True):
    """A configuration: its path, its values, and whether a person named it."""

    path: str
    values: Mapping[str, object]
    is_typed: bool = True

    def key(self, *keys: str) -> str:
        """Return the first key that has a value; "" for none."""
        return next((key for key in keys if self.values.get(key) is not None), "")

    def number(self, *keys: str) -> int | None:
        """Return the number of the first key that has a value."""
        value = self.values.get(self.key(*keys))
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def layers(self) -> int:
        """The number of layers, or of the items in a list of them; 0 if neither is there."""
        kinds = self.values.get(self.key(*_LISTS_OF_LAYERS))
        return self.number(*_LAYERS) or (len(kinds) if isinstance(kinds, list) else 0)

    @property
    def experts(self) -> int:
        """The number of experts, for each modality that has its own; 0 for none."""
        sizes = self.values.get("moe_intermediate_size")
        return (self.number(*_EXPERTS) or 0) * (len(sizes) if isinstance(sizes, list) else 1)

    @property
    def mtp_layers(self) -> int:
        """The number of layers that predict further tokens; 0 for none."""
        return max(self.number(*_MTP) or 0, 0)


def load_config(path: str, is_typed: bool = True) -> Config:
    """Read a configuration, a file or that of a folder.

    Raises
    ------
    FormatError, PlanError
        The file is not JSON, or says nothing of layers.
    """
    file = os.fspath(Path(path, CONFIG)) if is_folder(path) else path
    message, facts, hint = f"no {CONFIG}", "", f"the {CONFIG} of the model"
    if is_file(file):
        try:
            config = Config(file, read_config(file), is_typed)
        except FormatError as error:
            raise error.with_hint(hint) from error
        numbers = (config.layers, config.experts + 1, config.mtp_layers + 1)
        if all(0 < number <= MAX_NUMBER for number in numbers):
            return config
        message, hint = "no number of layers", f"{hint}, or --like with another copy of it"
        facts = f"expected num_hidden_layers, from 1 to {MAX_NUMBER}; as many experts at most"
    raise PlanError([Diagnostic("source", message, hint, (), facts, where=path)])


def compare_config(config: Config, metas: Metas) -> Iterator[Diagnostic]:
    """Yield what of a model is not as its configuration says, and what cannot be known."""
    weights = {
        _ZEROS.sub("", name): meta
        for name, meta in metas.items()
        if parse_name(name).parameter is None
    }
    hint = f"--config {quote(config.path)}, which makes it an error"
    for finding in _Model(config, weights).findings():
        if config.is_typed:
            yield finding
        elif finding.code != "doubt":
            facts = join_clauses(finding.facts, f"by {config.path}")
            yield replace(finding, code="config", facts=facts, hint=hint)
            hint = ""  # of all of them


def _wrong(message: str, facts: str = "") -> Diagnostic:
    return Diagnostic("unlike_config", message, facts=facts)


def _doubt(message: str, facts: str = "") -> Diagnostic:
    return Diagnostic("doubt", message, facts=facts)


def _unfit(facts: str, is_sure: bool = True) -> Diagnostic:
    return (_wrong if is_sure else _doubt)("have another shape", facts)


class _Model:
    """The names of a model, by layer; ``stack`` is what stands before the number of a layer."""

    def __init__(self, config: Config, metas: Metas) -> None:
        self.config, self.metas = config, metas
        stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name in metas:
            if match := _LAYER.fullmatch(name):
                stacks[match[1]][int(match[2])].add(match[3])
        self.layers_wanted = config.layers
        self.mtp_wanted = config.mtp_layers
        self.stacks: Mapping[str, Mapping[int, set[str]]] = stacks
        self.stack = max(stacks, key=lambda it: self._rank(it, stacks[it]), default="")
        self.layers: Mapping[int, set[str]] = stacks.get(self.stack, {})
        self.named: dict[str, Diagnostic] = {}  # name to what is wrong with it
        self.outside = [name for name in metas if not name.startswith(self.stack or "\0")]
        self.kinds = _kinds(config, self.layers_wanted, self.layers)
        quantized = config.values.get("quantization_config")
        self.quantized = quantized if isinstance(quantized, dict) else {}
        self.is_packed = self.quantized.get("quant_method", "fp8") != "fp8"

    def _rank(self, stack: str, layers: Mapping[int, set[str]]) -> tuple[bool, bool, bool, int]:
        is_language = "language" in stack or "decoder" in stack
        names = sum(map(len, layers.values()))
        return _OTHER_STACKS.search(stack) is None, is_language, "encoder" not in stack, names

    def findings(self) -> Iterator[Diagnostic]:
        yield from self._layers()
        yield from self._parts()
        yield from self._mtp()
        yield from self._experts()
        yield from self._vocabulary()
        yield from self._scales()
        self._modules()
        if self.is_packed:
            facts = f"weights are packed: {self.quantized.get('quant_method')}"
            yield _doubt("shapes are not compared with the configuration", facts)
        else:
            yield from self._sizes()
            self._shapes()
        yield from fold_alike(self.named, self.metas)

    def _name(self, names: Iterable[str], problem: Diagnostic) -> None:
        """Note what is wrong with tensors, unless something else is."""
        for name in sorted(names):
            self.named.setdefault(name, problem)

    def _lose(self, names: Iterable[str], facts: str) -> None:
        self._name((name for name in names if name not in self.metas), _wrong("are missing", facts))

    def _layers(self) -> Iterator[Diagnostic]:
        """Compare the number of layers, and the names of the layers of a kind."""
        wanted = range(self.layers_wanted)
        facts = f"the configuration has {count(len(wanted), 'layer')}"
        yield from self._gaps(self.stack, self.layers, wanted, facts)
        if more := [n for n in sorted(self.layers) if n >= len(wanted) + self.mtp_wanted]:
            layers = count(len(more), "layer")
            yield _wrong(f"{_pattern(self.stack, more)}: {layers} too many", facts)
        alone: list[int] = []
        of_experts = cache(self._of_experts)  # most layers have equal names
        by_kind: dict[object, list[int]] = {}
        for n in wanted:
            if n in self.layers:
                by_kind.setdefault(self._kind(n), []).append(n)
        for alike in by_kind.values():
            holders = Counter(name for n in alike for name in self.layers[n])
            usual = {name for name, number in holders.items() if 2 * number >= len(alike)}
            alone += alike if len(alike) == 1 else ()
            for n in alike:
                odd = (f"{self.stack}{n}.{name}" for name in self.layers[n] - usual)
                unexplained = "most layers lack them, and no key of the configuration explains it"
                self._name(odd, _doubt("are in some layers only", unexplained))
                names = usual | of_experts(frozenset(usual | self.layers[n]))
                full_names = (f"{self.stack}{n}.{name}" for name in names - self.layers[n])
                self._lose(full_names, "other layers, or experts, of the kind have them")
        if alone:
            facts = "so nothing shows what it should have"
            yield _doubt(f"{_pattern(self.stack, alone)}: no other layer is of its kind", facts)

    def _gaps(
        self, stack: str, layers: Mapping[int, set[str]], wanted: Iterable[int], facts: str
    ) -> Iterator[Diagnostic]:
        if lost := sorted({*wanted} - layers.keys()):
            has_loops = any(it for key, it in self.config.values.items() if _LOOPS.search(key))
            problem = _doubt if has_loops else _wrong
            missing = count(len(lost), "layer", "are")
            yield problem(f"{_pattern(stack, lost)}: {missing} missing", facts)

    def _parts(self) -> Iterator[Diagnostic]:
        """Compare the layers of images and of sound with those of their configurations."""
        for key, values in self.config.values.items():
            part = Config("", values) if isinstance(values, dict) else None
            number = 0 if part is None else part.layers or part.number("depth") or 0
            if not number or not _MODALITY.search(key):
                continue
            wanted = {*range(min(number, MAX_NUMBER))}
            others = (stack for stack in self.stacks if stack != self.stack)
            stack = min(others, key=lambda it: len(wanted ^ self.stacks[it].keys()), default="")
            layers = self.stacks.get(stack, {})
            if 2 * len(wanted & layers.keys()) < len(wanted) or layers.keys() - wanted:
                yield _doubt(f"no layers are those of {key}", f"it has {count(number, 'layer')}")
                continue
            yield from self._gaps(stack, layers, wanted, f"{key} has {count(number, 'layer')}")
            holders = Counter(name for names in layers.values() for name in names)
            usual = [name for name, times in holders.items() if 4 * times >= 3 * len(layers)]
            names = (f"{stack}{n}.{name}" for n in layers for name in usual)
            self._lose(names, "other layers of the stack have them")

    def _shapes(self) -> None:
        """Compare the shapes of the layers of a kind, and of all experts in them."""
        alike: dict[object, dict[tuple[int, ...], list[str]]] = {}
        every = set[str]().union(*self.layers.values())
        folded = {name: _EXPERT.sub(r"\1.*.\3", name) for name in every}
        for n, names in self.layers.items():
            for name in sorted(names):
                full_name = f"{self.stack}{n}.{name}"
                if meta := self.metas[full_name]:
                    key = self._kind(n), folded[name]
                    alike.setdefault(key, {}).setdefault(meta.shape, []).append(full_name)
        for shapes in alike.values():
            usual = max(shapes, key=lambda shape: len(shapes[shape]))
            is_usual = 2 * len(shapes[usual]) > sum(map(len, shapes.values()))
            for shape in (shape for shape in shapes if shape != usual):
                others = f"other layers, or experts, of the kind have {format_shape(usual)}"
                facts = f"{format_shape(shape)}; {others}"
                self._name(shapes[shape], _unfit(facts, is_usual))

    def _of_experts(self, names: Iterable[str]) -> set[str]:
        """Return the names that all experts of a layer should have, by those of some."""
        matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
        numbers = range(
            self.config.experts or 1 + max((int(match[2]) for match in matches), default=-1)
        )
        suffixes = Counter((match[1], match[3]) for match in matches)
        most = max(suffixes.values(), default=0)
        usual = [key for key, number in suffixes.items() if 2 * number >= most]
        return {f"{prefix}.{n}.{suffix}" for prefix, suffix in usual for n in numbers}

    def _experts(self) -> Iterator[Diagnostic]:
        wanted = self.config.experts
        if wanted < 2:
            return
        of_experts = [name for name in self.metas if "expert" in name and "share" not in name]
        told = f"the configuration has {wanted} experts"
        stacked = (meta.shape[0] for meta in self.metas.values() if meta and len(meta.shape) > 2)
        if not of_experts and wanted not in stacked:
            yield _wrong("no expert is there", told)
        matches = [match for name in of_experts if (match := _EXPERT.fullmatch(name))]
        if more := {int(match[2]) for match in matches} - {*range(wanted)}:
            numbers = format_numbers(more, MOST_RANGES)
            yield _wrong(f"experts {numbers}: more than there should be", told)
        for name in filter(re.compile(r"experts\.[a-z]\w*$").search, of_experts):
            if (meta := self.metas[name]) and meta.shape and meta.shape[0] % wanted:
                self._name([name], _wrong("do not hold the experts in axis 0", _facts(meta, told)))
        if of_experts and not any(map(_ROUTER.search, self.metas)):
            yield _wrong("no router of the experts is there", "for example mlp.gate.weight")

    def _mtp(self) -> Iterator[Diagnostic]:
        """Compare the layers that predict further tokens: behind the others, or a stack."""
        numbers = range(self.layers_wanted, self.layers_wanted + self.mtp_wanted)
        there = [n for n in numbers if n in self.layers]
        if there:
            last = self.layers.get(self.layers_wanted - 1, set())
            last = {*last, *self._of_experts(last), *_OF_MTP}
            expected = (f"{self.stack}{n}.{name}" for n in there for name in last)
            self._lose(expected, "an MTP layer has them beside those of the last layer")
        elsewhere = {
            int(match[1] or 0)
            for name in self.outside
            if (match := re.search(r"(?:^|\.)mtp\w*\.(?:\D+\.)?(?:(\d{1,7})\.)?", name))
        }
        if (missing := len(numbers) - len(there or elsewhere)) > 0:
            layers = count(missing, "MTP layer", "are")
            yield _wrong(f"{layers} missing", f"the configuration has {self.mtp_wanted} of them")

    def _vocabulary(self) -> Iterator[Diagnostic]:
        """Compare the embedding, the output head and the final norm."""
        rows, hidden = self.config.number("vocab_size"), self.config.number(*_HIDDEN)
        outside = [n for n in self.outside if not _OTHER_STACKS.search(n) and not _LAYER.match(n)]
        shapes = {
            n: meta.shape for n in outside if (meta := self.metas[n]) and len(meta.shape) == 2
        }
        heads = [name for name in outside if _HEAD.search(name)]
        alike = [n for n, it in shapes.items() if it == (rows, hidden) and n not in heads]
        embeddings = alike or [name for name in outside if _EMBEDDING.search(name)]
        tied = self.config.values.get("tie_word_embeddings")
        if not heads and not tied:
            heads = [n for n, shape in shapes.items() if shape[0] == rows and n not in embeddings]
        classes = str(self.config.values.get("architectures") or "CausalLM")
        has_head = re.search("CausalLM|LMHead|Conditional", classes) is not None
        if rows is not None and not embeddings and not (tied and heads):
            problem = _wrong if has_head else _doubt
            yield problem("the embedding of the vocabulary is missing", "for example embed_tokens")
        if not heads and tied is None and has_head:
            facts = "the configuration lacks tie_word_embeddings"
            yield _doubt("no output head: the embedding may be tied to it", facts)
        elif not heads and not tied and has_head:
            facts = "for example lm_head.weight; tie_word_embeddings is false"
            yield _wrong("the output head is missing", facts)
        elif heads and embeddings and tied:
            facts = f"{heads[0]}; tie_word_embeddings is true"
            yield _doubt("the output head is there, and loaders may take the embedding", facts)
        has_norms = any(_NORM.search(name.lower()) for name in set().union(*self.layers.values()))
        if has_norms and not any(_NORM.search(name.lower()) for name in self.outside):
            problem = _wrong if "CausalLM" in classes else _doubt
            yield problem("the norm behind the last layer is missing", "layers have norms")
        for name in (*embeddings, *heads):
            meta = self.metas[name]
            if meta is None or len(meta.shape) != 2 or rows is None or self.is_packed:
                continue
            facts = _facts(meta, f"vocab_size {rows}")
            if meta.shape[0] < rows:
                self._name([name], _unfit(facts))
            elif meta.shape[0] > rows:
                self._name([name], _doubt("have more rows than words, perhaps padded", facts))
            if hidden is not None and meta.shape[1] != hidden:
                facts = _facts(meta, f"{self.config.key(*_HIDDEN)} {hidden}")
                is_sure = meta.shape[1] not in self.config.values.values()  # of another key
                self._name([name], _unfit(facts, is_sure))

    def _scales(self) -> Iterator[Diagnostic]:
        """Compare Float8 weights, and their scales, with ``quantization_config``."""
        float8 = [n for n, meta in self.metas.items() if meta and meta.dtype in FLOAT8]
        scales = [n for n in self.metas if n.endswith(("weight_scale_inv", "weight_scale"))]
        is_fp8 = self.quantized.get("quant_method") == "fp8"
        if is_fp8 and not float8 and None not in self.metas.values():
            yield _wrong("no weight is Float8", "quantization_config says fp8")
        if (float8 or scales) and not self.quantized:
            facts = f"{count(len(float8), 'Float8 weight')}, {count(len(scales), 'scale')}"
            yield _wrong("weights are quantized, and no quantization_config says how", facts)
        ends = ("weight_scale_inv", "weight_scale", "scale")
        for module in (name.removesuffix("weight") for name in float8):
            if not any(module + end in self.metas for end in ends):
                self._lose([module + ends[0]], "Float8 weights mean nothing without their scales")

    def _modules(self) -> None:
        """Find weights that belong to others of their module."""
        modules: dict[tuple[str, str], set[str]] = defaultdict(set)
        for name in self.metas:
            stem = name.removesuffix(".weight")
            parent, _, part = stem.rpartition(".")
            modules[f"{parent}.", name.removeprefix(stem)].add(part)
            if part == "bias" and _NORM.search(parent.lower()):
                self._lose([f"{parent}.weight"], "a norm with a bias has a weight")
        for (parent, end), parts in modules.items():
            if _ROUTER.search(f"{parent}weight") or not _LAYER.match(parent):
                continue
            for given, belonging in _TOGETHER:
                if not parts.issuperset(given) or parts & {*belonging}:
                    continue
                names = [f"{parent}{part}{end}" for part in belonging]
                if not self.named.keys() & names:
                    facts = f"{' or '.join(belonging)} belongs to {' and '.join(given)}"
                    self._lose(names[:1], facts)

    def _sizes(self) -> Iterator[Diagnostic]:
        """Compare the weights of attention and of MLPs with the sizes in the configuration."""
        config, of_heads = self.config, dict[str, tuple[int, int]]()  # to axis and size
        heads, groups = config.number(*_HEADS) or 0, config.number(*_KV_HEADS)
        if config.values.get("multi_query") and not config.values.get("new_decoder_architecture"):
            groups = 1
        size = config.number("head_dim") or (config.number(*_HIDDEN) or 0) // max(heads, 1)
        others = [key for key in config.values if key.endswith("head_dim") and key != "head_dim"]
        facts = f"{heads} heads, {groups or heads} of keys and values"
        if heads and config.number("kv_lora_rank") and config.number("v_head_dim"):
            sizes = (config.number(f"{key}_head_dim") or 0 for key in ("qk_nope", "qk_rope", "v"))
            nope, rope, value = sizes
            of_heads = dict.fromkeys(("q_proj", "q_b_proj"), (0, heads * (nope + rope)))
            of_heads |= {"kv_b_proj": (0, heads * (nope + value)), "o_proj": (1, heads * value)}
        elif heads and others:
            unlike = f"it has several sizes of heads: {others[0]}"
            yield _doubt("heads are not compared with the configuration", unlike)
        elif heads and size:
            gate = 1 + bool(config.values.get("attn_output_gate"))
            of_heads = {"q_proj": (0, gate * heads * size), "o_proj": (1, heads * size)}
            of_heads |= dict.fromkeys(("k_proj", "v_proj"), (0, (groups or heads) * size))
            if groups is not None:
                fused = ("linear_qkv", "qkv_proj", "query_key_value")
                of_heads |= dict.fromkeys(fused, (0, (heads + 2 * (groups or heads)) * size))
            facts += f", {size} elements each"
        is_adjusted = config.values.get("block_auto_adjust_ff_dim")
        names = set[str]().union(*self.layers.values())
        for name in sorted(names):
            parent, _, module = name.removesuffix(".weight").rpartition(".")
            mlp: tuple[str, ...] = next((it for it in _MLPS if module in it), ())
            parts = [f"{parent}.{part}.weight" for part in mlp]
            is_mlp = name in parts and parts[1] in names  # Qwen's first one has w1 and w2 alone
            if is_mlp and len(names.intersection(parts)) > 1 and "share" not in name:
                key = config.key(*(_WIDTH_OF_EXPERTS if "expert" in name else _WIDTH))
                width = None if is_adjusted else config.number(key)
                self._fit(name, int(module == mlp[-1]), width, key, is_usual=True)
            elif name.endswith(".weight") and module in of_heads:
                is_usual = all(name in of_layer for of_layer in self.layers.values())
                self._fit(name, *of_heads[module], facts, is_usual=is_usual)

    def _fit(self, name: str, axis: int, size: int | None, why: str, *, is_usual: bool) -> None:
        """Compare an axis of a weight in all layers that have it; None for an unknown size.

        If it fits in no layer, it is wrong if the size is usual in all kinds of layers.
        """
        there = {n: self.metas.get(f"{self.stack}{n}.{name}") for n in self.layers}
        metas = {n: meta for n, meta in there.items() if meta and len(meta.shape) == 2}
        fitting = {self._kind(n) for n, meta in metas.items() if meta.shape[axis] == size}
        wanting = fitting or {self._kind(n) for n in metas if is_usual}
        for n, meta in metas.items() if size is not None else ():
            if meta.shape[axis] != size:  # perhaps another attention, of its own kind
                facts = f"{_facts(meta, f'expected {size} in axis {axis}')}: {why}"
                is_sure = self._kind(n) in wanting
                self._name([f"{self.stack}{n}.{name}"], _unfit(facts, is_sure))

    def _kind(self, layer: int) -> object:
        return self.kinds[layer]


def _pattern(stack: str, numbers: Iterable[int]) -> str:
    shown = format_numbers(numbers, MOST_RANGES, ",")
    return f"{stack}{shown if shown.isdigit() else f'{{{shown}}}'}.*"


def _facts(meta: TensorMeta, told: str) -> str:
    return f"{format_shape(meta.shape)}; {told}"


def _kinds(config: Config, layers: int, there: Iterable[int]) -> Mapping[int, object]:
    """Return the kind of each layer that is there, by all keys that may tell layers apart."""
    numbers = {n: min(n, layers - 1) for n in there}  # MTP layers are as the last one
    kinds: dict[int, list[object]] = {n: [] for n in numbers.values()}
    for key, value in _values_of_layers(config):
        by_layer: list[object] = []
        if isinstance(value, str) and "pattern" in key and len(value) == layers:
            by_layer = [value[n] for n in kinds]
        elif isinstance(value, list) and (len(value) == layers or _BY_LAYER.search(key)):
            is_flags = len(value) >= layers and len({*map(repr, value)}) < len(value)
            if is_flags or isinstance(next(iter(value), 0), str):
                by_layer = [repr(value[n % len(value)]) for n in kinds]
            else:
                named = {n for n in value if isinstance(n, int)}
                first = int(layers in named)  # some count from 1
                by_layer = [n + first in named for n in kinds]
        elif type(value) is int and 0 < value < layers and key not in (*_LAYERS, *_MTP):
            if _EVERY.search(key):
                by_layer = [n % value for n in kinds]
            elif _BORDER.search(key) and value < layers - 1:
                by_layer = [n < value for n in kinds]
            elif key.endswith("_layers"):
                by_layer = [(n < value, n >= layers - value) for n in kinds]
        for kind, item in zip(kinds.values(), by_layer, strict=False):
            kind.append(item)
    return {n: tuple(kinds[number]) for n, number in numbers.items()}


def _values_of_layers(config: Config) -> Iterator[tuple[str, object]]:
    """Yield keys with their values; of a part without layers of its own, lists of layers."""
    for key, value in config.values.items():
        yield key, value
        if not isinstance(value, dict) or Config("", value).layers:
            continue
        for inner, numbers in value.items():
            are_layers = inner.endswith("_layers") and isinstance(numbers, list)
            if are_layers and all(type(n) is int for n in numbers):
                yield inner, numbers
