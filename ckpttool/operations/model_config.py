"""What a ``config.json`` says of the tensors of a model, compared with their names and shapes.

It goes by what layers have in common, not by a list of models.  Each layer has a kind, by the keys
of the configuration that speak of single layers: ``first_k_dense_replace``, ``layer_types`` and the
like.  What half of the layers of a kind have, the others lack.  What only some have and no key
explains is a doubt and nothing wrong; so is what no number in the configuration tells.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.dtypes import FLOAT8
from ckpttool.model.names import parse_name
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.tensor_diff import Metas
from ckpttool.problems import Diagnostic, PlanError, join_clauses
from ckpttool.wording import MOST_RANGES, count, fold_subtrees, format_numbers, format_shape

MAX_CONFIG_BYTES = 16 << 20
MAX_NUMBER = 10_000  # of layers, and of experts; stops hostile files

# Keys of one meaning; the first that the configuration has counts.
_LAYERS = ("num_hidden_layers", "num_decoder_layers", "n_layer", "num_layers", "n_layers")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")

# Keys that divide layers into kinds: each k-th is another, or a list has an item for each.
_EVERY = re.compile(r"_(step|freq|interval|period)$")
_BY_LAYER = re.compile(r"layer|block|ratio|pattern|freq|idx|indices")

_LAYER = re.compile(r"((?:.*?\.)?)(\d{1,7})\.(.*)")  # around the first number
_EXPERT = re.compile(r"((?:.*\.)?(?!shared)\w*experts?)\.(\d{1,7})\.(.*)")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed(?:_tokens|_in)?|(?:word_|tok_)?embeddings?|wte)\.(?:embedding_)?w\w*$"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out|head|output)\.weight$")
_OTHER_STACKS = re.compile(r"vis|audio|image|encoder")
_OF_MTP = ("enorm.weight", "hnorm.weight", "eh_proj.weight")  # beside those of a decoder layer


class Config(Struct, frozen=True):
    """A configuration: its path, its values, and whether a person named it."""

    path: str
    values: Mapping[str, object]
    is_typed: bool = True

    def number(self, *keys: str) -> int | None:
        """Return the number of the first key that there is."""
        numbers = (self.values.get(key) for key in keys)
        return next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), None)


def read_config(path: str, is_typed: bool = True) -> Config:
    """Read a configuration, of models with several parts that of the language model.

    Raises
    ------
    FormatError, PlanError
        The file is not JSON, or says nothing of layers.
    """
    document = read_json_object(path, MAX_CONFIG_BYTES)
    parts = sorted(document.items(), key=lambda item: _OTHER_STACKS.search(item[0]) is not None)
    for values in (document, *(value for _, value in parts if isinstance(value, dict))):
        config = Config(path, {**document, **values}, is_typed)
        sizes = (config.number(*_LAYERS) or 0, (config.number(*_EXPERTS) or 0) + 1)
        if any(key in values for key in _LAYERS) and all(0 < n <= MAX_NUMBER for n in sizes):
            return config
    facts = f"expected {_LAYERS[0]}, a number from 1 to {MAX_NUMBER}, and no more experts"
    hint = "the config.json of the model"
    problem = Diagnostic("source", "no number of layers", hint, (), facts, where=path)
    raise PlanError([problem])


class _Finding(Struct, frozen=True):
    """What contradicts the configuration; or ``is_doubt``, what nothing explains."""

    message: str
    facts: str = ""
    is_doubt: bool = False


def compare_config(config: Config, metas: Metas) -> Iterator[Diagnostic]:
    """Yield what of a model is not as its configuration says, and what cannot be known."""
    weights = {n: meta for n, meta in metas.items() if parse_name(n).parameter is None}
    for finding in _Model(config, weights).findings():
        if not config.is_typed and not finding.is_doubt:
            facts = join_clauses(finding.facts, f"by {config.path}")
            yield Diagnostic("config", finding.message, facts=facts)
        elif config.is_typed:
            code = "doubt" if finding.is_doubt else "unlike_config"
            yield Diagnostic(code, finding.message, facts=finding.facts)


class _Model:
    """The names of a model, by layer; ``stack`` is what stands before the number of a layer."""

    def __init__(self, config: Config, metas: Metas) -> None:
        self.config, self.metas = config, metas
        stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name in metas:
            if match := _LAYER.fullmatch(name):
                stacks[match[1]][int(match[2])].add(match[3])
        self.layers_wanted = config.number(*_LAYERS) or 0
        self.mtp_wanted = config.number(*_MTP) or 0
        self.stack = max(stacks, key=lambda it: self._rank(it, stacks[it]), default="")
        self.layers: Mapping[int, set[str]] = stacks.get(self.stack, {})
        self.lost: dict[str, str] = {}  # names that are missing, and why they should be there
        self.outside = [name for name in metas if not name.startswith(self.stack or "\0")]
        self.kinds = _kinds(config, self.layers_wanted)
        quantized = config.values.get("quantization_config")
        self.quantized = quantized if isinstance(quantized, dict) else {}
        self.is_packed = self.quantized.get("quant_method", "fp8") != "fp8"

    def _rank(self, stack: str, layers: Mapping[int, set[str]]) -> tuple[bool, int]:
        is_other = "mtp" in stack or _OTHER_STACKS.search(stack.removesuffix("encoder.layer."))
        return not is_other, sum(map(len, layers.values()))

    def findings(self) -> Iterator[_Finding]:
        yield from self._layers()
        yield from self._mtp()
        yield from self._experts()
        yield from self._vocabulary()
        yield from self._scales()
        for facts in dict.fromkeys(self.lost.values()):
            names = [name for name, why in self.lost.items() if why == facts]
            for folded, number in fold_subtrees(names, {**self.metas, **self.lost}):
                yield _Finding(f"{folded}: {count(number, 'tensor', 'are')} missing", facts)
        if self.is_packed:
            method = self.quantized.get("quant_method")
            message = "shapes are not compared with the configuration"
            yield _Finding(message, f"weights are packed: {method}", is_doubt=True)
        else:
            yield from self._heads()

    def _pattern(self, numbers: Iterable[int]) -> str:
        shown = format_numbers(numbers, MOST_RANGES, ",")
        return f"{self.stack}{shown if shown.isdigit() else f'{{{shown}}}'}.*"

    def _layers(self) -> Iterator[_Finding]:
        """Compare the number of layers, and the names of the layers of a kind."""
        wanted = range(self.layers_wanted)
        told = f"the configuration has {count(len(wanted), 'layer')}"
        if lost := sorted({*wanted} - self.layers.keys()):
            verb = "is" if len(lost) == 1 else "are"
            yield _Finding(
                f"{self._pattern(lost)}: {count(len(lost), 'layer')} {verb} missing", told
            )
        if more := [n for n in sorted(self.layers) if n >= len(wanted) + self.mtp_wanted]:
            yield _Finding(f"{self._pattern(more)}: {count(len(more), 'layer')} too many", told)
        alone: list[int] = []
        for kind in dict.fromkeys(self.kinds):
            alike = [n for n in wanted if self.kinds[n] == kind and n in self.layers]
            holders = Counter(name for n in alike for name in self.layers[n])
            usual = {name for name, number in holders.items() if 2 * number >= len(alike)}
            alone += alike if len(alike) == 1 else ()
            odd = [f"{self.stack}{n}.{it}" for n in alike for it in self.layers[n] - usual]
            for folded, number in fold_subtrees(sorted(odd), self.metas):
                message = f"{folded}: {count(number, 'tensor')} that most layers lack"
                yield _Finding(message, "no key of the configuration explains it", is_doubt=True)
            for n in alike:
                names = usual | self._of_experts(usual | self.layers[n])
                lost_names = [f"{self.stack}{n}.{name}" for name in names - self.layers[n]]
                self._lose(lost_names, "other layers, or experts, of the kind have them")
        if alone:
            message = f"{self._pattern(alone)}: no other layer is of its kind"
            yield _Finding(message, "so nothing shows what it should have", is_doubt=True)

    def _lose(self, names: Iterable[str], facts: str) -> None:
        self.lost = {**dict.fromkeys(sorted(names), facts), **self.lost}

    def _of_experts(self, names: Iterable[str]) -> set[str]:
        """Return the names that all experts of a layer should have, by those of some."""
        matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
        wanted = self.config.number(*_EXPERTS)
        numbers = range(wanted or 1 + max((int(match[2]) for match in matches), default=-1))
        suffixes = Counter((match[1], match[3]) for match in matches)
        most = max(suffixes.values(), default=0)
        usual = [key for key, number in suffixes.items() if 2 * number >= most]
        return {f"{prefix}.{n}.{suffix}" for prefix, suffix in usual for n in numbers}

    def _experts(self) -> Iterator[_Finding]:
        wanted = self.config.number(*_EXPERTS)
        if not wanted or wanted == 1:
            return
        of_experts = [name for name in self.metas if "expert" in name]
        told = f"the configuration has {wanted} experts"
        if not of_experts:
            yield _Finding("no expert is there", told)
        matches = [match for name in of_experts if (match := _EXPERT.fullmatch(name))]
        if more := {int(match[2]) for match in matches} - {*range(wanted)}:
            yield _Finding(
                f"experts {format_numbers(more, MOST_RANGES)}: more than there should be", told
            )
        fused = [name for name in of_experts if re.search(r"experts\.[a-z]\w*$", name)]
        for name in fused:
            meta = self.metas[name]
            if meta is not None and meta.shape and meta.shape[0] % wanted:
                yield _Finding(f"{name}: axis 0 does not hold the experts", _facts(meta, told))

    def _mtp(self) -> Iterator[_Finding]:
        """Compare the layers that predict further tokens: behind the others, or a stack."""
        numbers = range(self.layers_wanted, self.layers_wanted + self.mtp_wanted)
        there = [n for n in numbers if n in self.layers]
        told = f"the configuration has {self.mtp_wanted} of them"
        if there:
            last = self.layers.get(self.layers_wanted - 1, set())
            last = {*last, *self._of_experts(last), *_OF_MTP}
            expected = {f"{self.stack}{n}.{it}" for n in there for it in last}
            facts = "an MTP layer has them beside those of the last layer"
            self._lose(expected - self.metas.keys(), facts)
        elsewhere = {
            int(match[1] or 0)
            for name in self.outside
            if (match := re.search(r"(?:^|\.)mtp\w*\.(?:\D+\.)?(?:(\d{1,7})\.)?", name))
        }
        missing = len(numbers) - len(there or elsewhere)
        if missing > 0:
            noun = count(missing, "MTP layer", "are")
            yield _Finding(f"{noun} missing", told)

    def _vocabulary(self) -> Iterator[_Finding]:
        """Compare the embedding, the output head and the final norm."""
        rows, hidden = self.config.number("vocab_size"), self.config.number(*_HIDDEN)
        outside = [name for name in self.outside if not _OTHER_STACKS.search(name)]
        heads = [name for name in outside if _HEAD.search(name)]
        alike = {n for n in outside if (meta := self.metas[n]) and meta.shape == (rows, hidden)}
        embeddings = [n for n in outside if _EMBEDDING.search(n) or n in alike.difference(heads)]
        tied = self.config.values.get("tie_word_embeddings")
        classes = str(self.config.values.get("architectures") or "CausalLM")
        has_head = re.search("CausalLM|LMHead|Conditional", classes) is not None
        if not embeddings and not (tied and heads):
            yield _Finding("the embedding of the vocabulary is missing", "for example embed_tokens")
        if not heads and tied is None and has_head:
            message = "no output head: the embedding may be tied to it"
            facts = "the configuration lacks tie_word_embeddings"
            yield _Finding(message, facts, is_doubt=True)
        elif not heads and not tied and has_head:
            message = "the output head is missing, for example lm_head.weight"
            yield _Finding(message, "tie_word_embeddings is false")
        has_norms = any("norm" in name.lower() for name in set().union(*self.layers.values()))
        if has_norms and not any("norm" in name.lower() for name in self.outside):
            yield _Finding("the norm behind the last layer is missing", "layers have norms")
        for name in (*embeddings, *heads):
            meta = self.metas[name]
            if meta is None or len(meta.shape) != 2 or rows is None or self.is_packed:
                continue
            if meta.shape[0] < rows:
                yield _Finding(f"{name}: another shape", _facts(meta, f"vocab_size {rows}"))
            elif meta.shape[0] > rows:
                message = f"{name}: more rows than words, perhaps padded"
                yield _Finding(message, _facts(meta, f"vocab_size {rows}"), is_doubt=True)

    def _scales(self) -> Iterator[_Finding]:
        """Compare Float8 weights, and their scales, with ``quantization_config``."""
        float8 = [n for n, meta in self.metas.items() if meta and meta.dtype in FLOAT8]
        scales = [n for n in self.metas if n.endswith(("weight_scale_inv", "weight_scale"))]
        is_fp8 = self.quantized.get("quant_method") == "fp8"
        if is_fp8 and not float8 and None not in self.metas.values():
            yield _Finding("no weight is Float8", "quantization_config says fp8")
        if (float8 or scales) and not self.quantized:
            facts = f"{count(len(float8), 'Float8 weight')}, {count(len(scales), 'scale')}"
            yield _Finding("weights are quantized, and no quantization_config says how", facts)
        bare = (name.removesuffix("weight") + "scale" for name in float8)
        lost = [
            f"{name}_scale_inv"
            for name, other in zip(float8, bare, strict=True)
            if not {f"{name}_scale_inv", f"{name}_scale", other} & self.metas.keys()
        ]
        self._lose(lost, "Float8 weights mean nothing without their scales")

    def _heads(self) -> Iterator[_Finding]:
        """Compare the rows of attention weights with the numbers of heads."""
        number, config = self.config.number, self.config.values
        heads, hidden = number(*_HEADS), number(*_HIDDEN)
        if not heads:
            return
        others = [key for key in config if key.endswith("head_dim") and key != "head_dim"]
        size = number("head_dim") or (hidden and hidden // heads)
        groups = heads if number(*_KV_HEADS) is None else number(*_KV_HEADS) or heads
        sizes: dict[str, tuple[int, int]] = {}  # suffix to axis and its size
        if number("kv_lora_rank") and number("v_head_dim"):
            nope, rope, value = (
                number(f"{key}_head_dim") or 0 for key in ("qk_nope", "qk_rope", "v")
            )
            queries = (0, heads * (nope + rope))
            sizes = {"q_proj": queries, "q_b_proj": queries, "o_proj": (1, heads * value)}
            sizes["kv_b_proj"] = (0, heads * (nope + value))
        elif size and not others:
            gate = 1 + bool(config.get("attn_output_gate"))
            sizes = {"q_proj": (0, gate * heads * size), "o_proj": (1, heads * size)}
            sizes |= dict.fromkeys(("k_proj", "v_proj"), (0, groups * size))
            if number(*_KV_HEADS) is not None:
                fused = ("linear_qkv", "qkv_proj", "query_key_value")
                sizes |= dict.fromkeys(fused, (0, (heads + 2 * groups) * size))
        elif others:
            message = "heads are not compared with the configuration"
            yield _Finding(message, f"it has several sizes of heads: {others[0]}", is_doubt=True)
        told = f"{heads} heads, {groups} of keys and values"
        told += f", {size} elements each" if size and not others else ""
        wrong: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for name in set().union(*self.layers.values()):
            module, _, kind = name.rpartition(".")
            if kind != "weight" or (module := module.rpartition(".")[2]) not in sizes:
                continue
            axis, expected = sizes[module]
            there = {n: self.metas.get(f"{self.stack}{n}.{name}") for n in self.layers}
            metas = {n: meta for n, meta in there.items() if meta and len(meta.shape) == 2}
            fitting = {self._kind(n) for n, meta in metas.items() if meta.shape[axis] == expected}
            for n, meta in metas.items():
                if meta.shape[axis] != expected:  # perhaps another attention, of its own kind
                    facts = f"{_facts(meta, f'expected {expected} in axis {axis}')}: {told}"
                    wrong[facts, bool(fitting) and self._kind(n) not in fitting].append(meta.name)
        for (facts, is_doubt), tensors in wrong.items():
            for folded, _ in fold_subtrees(tensors, self.metas):
                yield _Finding(f"{folded}: heads do not fit", facts, is_doubt)

    def _kind(self, layer: int) -> object:
        return self.kinds[min(layer, self.layers_wanted - 1)]  # MTP layers are as the last one


def _facts(meta: TensorMeta, told: str) -> str:
    return f"{format_shape(meta.shape)}; {told}"


def _kinds(config: Config, layers: int) -> list[tuple[object, ...]]:
    """Return the kind of each layer, by all keys that may tell layers apart."""
    kinds: list[list[object]] = [[] for _ in range(layers)]
    for key, value in sorted(config.values.items()):
        by_layer: list[object] = []
        if isinstance(value, str) and "pattern" in key and len(value) == layers:
            by_layer = [*value]
        elif isinstance(value, list) and _BY_LAYER.search(key):
            is_each = len(value) >= layers
            by_layer = [repr(value[n]) if is_each else n in value for n in range(layers)]
        elif isinstance(value, int) and 0 < value < layers and key not in (*_LAYERS, *_MTP):
            if _EVERY.search(key):
                by_layer = [n % value for n in range(layers)]
            elif key.startswith("first_k_"):
                by_layer = [n < value for n in range(layers)]
            elif key.endswith("_layers") and value > 1:
                by_layer = [(n < value, n >= layers - value) for n in range(layers)]
        for kind, item in zip(kinds, by_layer, strict=False):
            kind.append(item)
    return [*map(tuple, kinds)]
