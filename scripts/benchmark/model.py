"""A LLaMA-like model of a wished size, and how tensor, data and pipeline parallelism cut it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.dtypes import DTYPES
from ckpttool.model.layout import Layout

# All are divisible by 768, so that 8 ranks and 6, 64 and 48, 512 and 384 can cut them.
WIDTHS = (4608, 3072, 2304, 1536, 768)
VOCABULARY_STEP = 768
# Matrices of a layer, as multiples of the width, and the axis that MindFormers cuts.
MATRICES = {
    "attention.wq": (1, 1, 0),
    "attention.wk": (1, 1, 0),
    "attention.wv": (1, 1, 0),
    "attention.wo": (1, 1, 1),
    "feed_forward.w1": (3, 1, 0),
    "feed_forward.w2": (1, 3, 1),
    "feed_forward.w3": (3, 1, 0),
}
VECTORS = ("attention_norm", "ffn_norm")
EMBEDDING, HEAD, NORM = "model.tok_embeddings.embedding_weight", "lm_head.weight", "model.norm_out"
MOMENTS = ("adam_m.", "adam_v.")


class Tensor(Struct, frozen=True):
    """A full tensor: ``cut_axis`` is the one that MindFormers cuts, None for a vector.

    A ``tensor_map`` says more: the axis of the mesh that cuts each axis, 0 for tensor parallel and
    1 for data parallel.  With ``is_shared_out`` data parallel ranks share the slices.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int
    cut_axis: int | None
    tensor_map: tuple[tuple[int, ...], ...] = ()
    is_shared_out: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Mesh(Struct, frozen=True):
    """Tensor x data x pipeline parallel, and which axis of the matrices is cut.

    Attributes
    ----------
    axis
        ``"0"``, ``"last"``, or ``"mixed"`` as MindFormers does it.
    optimizer_shard
        Whether data parallel ranks share their slices out among themselves.
    """

    tensor: int
    data: int = 1
    pipeline: int = 1
    axis: str = "0"
    optimizer_shard: bool = False

    def __str__(self) -> str:
        axes = {"0": "axis 0", "last": "last axis", "mixed": "both axes"}[self.axis]
        parts = [f"tp{self.tensor}"]
        parts += [f"dp{self.data}{' opt' if self.optimizer_shard else ''}"] * (self.data > 1)
        parts += [f"pp{self.pipeline}"] * (self.pipeline > 1)
        return f"{' '.join(parts)}, {axes}"

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.tensor * self.data * self.pipeline

    @property
    def transposed(self) -> Mesh:
        """The same, with the other axis of every matrix cut."""
        return replace(self, axis={"0": "last", "last": "0", "mixed": "swapped"}[self.axis])

    def layout(self, tensor: Tensor) -> Layout:
        """How a tensor is cut in its stage."""
        cut: list[tuple[int, ...]] = [()] * len(tensor.shape)
        if tensor.tensor_map:
            cut = [*tensor.tensor_map[:: 1 if self.axis == "0" else -1]]
        elif tensor.cut_axis is not None:
            usual = tensor.cut_axis
            axes = {"0": 0, "last": -1, "mixed": usual, "swapped": 1 - usual}
            cut[axes[self.axis]] = (0,)
        layout = Layout((self.data, self.tensor), tuple(cut))
        is_shared_out = self.optimizer_shard and tensor.cut_axis is not None
        shard = layout.replicas if is_shared_out or tensor.is_shared_out else 1
        return replace(layout, optimizer_shard=shard)

    def stage_of(self, tensor: Tensor, layers: int) -> int:
        """The stage that has a tensor: the layers are dealt out evenly."""
        return min(tensor.layer * self.pipeline // layers, self.pipeline - 1)


class Model(Struct, frozen=True):
    """Tensors in the order in which they are saved."""

    tensors: tuple[Tensor, ...]
    layers: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, undivided."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that are no moments."""
        return tuple(one for one in self.tensors if not one.name.startswith(MOMENTS))


def make_model(nbytes: int, dtype: str, moments: bool) -> Model:
    """A model of about ``nbytes`` undivided: as wide as two layers allow, the rest vocabulary."""
    per_weight = DTYPES[dtype].itemsize + (2 * DTYPES["Float32"].itemsize if moments else 0)
    budget = nbytes // per_weight
    factor = sum(rows * columns for rows, columns, _ in MATRICES.values())
    width = next((w for w in WIDTHS if 2 * factor * w * w <= 0.8 * budget), WIDTHS[-1])
    layers = max(2, int(0.8 * budget) // (factor * width * width))
    rest = budget - layers * factor * width * width
    rows = max(1, rest // (2 * width * VOCABULARY_STEP)) * VOCABULARY_STEP
    weights = tuple(_weights(width, layers, rows, dtype))
    states = [
        replace(weight, name=prefix + weight.name, dtype="Float32")
        for prefix in (MOMENTS if moments else ())
        for weight in weights
    ]
    return Model((*weights, *states), layers)


def _weights(width: int, layers: int, vocabulary: int, dtype: str) -> Iterator[Tensor]:
    yield Tensor(EMBEDDING, dtype, (vocabulary, width), 0, 0)
    for layer in range(layers):
        for name in VECTORS:
            yield Tensor(f"model.layers.{layer}.{name}.weight", dtype, (width,), layer, None)
        for name, (rows, columns, axis) in MATRICES.items():
            shape = (rows * width, columns * width)
            yield Tensor(f"model.layers.{layer}.{name}.weight", dtype, shape, layer, axis)
    yield Tensor(f"{NORM}.weight", dtype, (width,), layers, None)
    yield Tensor(HEAD, dtype, (vocabulary, width), layers, 0)


def wide_model(count: int, ranks: int, columns: int) -> Model:
    """A model of ``count`` tensors for thousands of ranks: layers with the moments of Adam.

    Axis 0 of every matrix can be cut into ``ranks`` slices, and into three quarters of that.
    """
    rows = 3 * ranks
    bodies = {
        "attention.wq": ((rows, columns), 0),
        "attention.wk": ((rows, 2 * columns), 0),
        "attention.wv": ((rows, 2 * columns), 0),
        "attention.wo": ((rows, columns), 1),
        "feed_forward.w1": ((2 * rows, columns), 0),
        "feed_forward.w2": ((2 * rows, columns), 1),
        "feed_forward.w3": ((2 * rows, columns), 0),
        "attention.bias": ((rows,), 0),
        "attention_norm": ((columns,), None),
        "ffn_norm": ((columns,), None),
    }
    per_layer = len(bodies) * (1 + len(MOMENTS))
    names = (
        (layer, prefix, name)
        for layer in range(math.ceil(count / per_layer))
        for prefix in ("", *MOMENTS)
        for name in bodies
    )
    tensors = tuple(
        Tensor(
            f"{prefix}model.layers.{layer}.{name}.weight",
            "Float32" if prefix else "BFloat16",
            bodies[name][0],
            layer,
            bodies[name][1],
        )
        for layer, prefix, name in islice(names, count)
    )
    return Model(tensors, math.ceil(count / per_layer))


def dense_model(nbytes: int) -> tuple[dict[str, int], Model]:
    """A Llama of MindFormers 1.3 and its configuration, of about ``nbytes`` in bfloat16."""
    width, vocabulary = 2048, 8192
    wide = 3 * width
    layers = max(1, (nbytes // 2 - 2 * vocabulary * width) // (4 * width**2 + 3 * width * wide))
    square = dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    bodies = {f"attention.{name}": shape for name, shape in square.items()}
    bodies |= {"feed_forward.w1": (wide, width), "feed_forward.w3": (wide, width)}
    bodies |= {"feed_forward.w2": (width, wide), "attention_norm": (width,), "ffn_norm": (width,)}
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 16}
    config |= {"intermediate_size": wide}
    ends = ("model.tok_embeddings.embedding_weight", "model.norm_out.weight", "lm_head.weight")
    return config, _model_of("model.layers", bodies, ends, layers, width, vocabulary)


def expert_model(
    nbytes: int, width: int = 2048, wide: int = 768, experts: int = 16
) -> tuple[dict[str, int], Model]:
    """A Qwen3-MoE of MindFormers 2 and its configuration, of about ``nbytes`` in bfloat16."""
    vocabulary, heads, groups = 8192, 32, 4
    rows = (heads + 2 * groups) * 128
    of_layer = width * (rows + heads * 128) + 3 * experts * width * wide
    layers = max(1, (nbytes // 2 - 2 * vocabulary * width) // of_layer)
    bodies = {
        "input_layernorm": (width,),
        "pre_mlp_layernorm": (width,),
        "self_attention.linear_qkv": (rows, width),
        "self_attention.linear_proj": (width, heads * 128),
        "self_attention.q_layernorm": (128,),
        "self_attention.k_layernorm": (128,),
        "mlp.router": (experts, width),
        "mlp.experts.weight1": (experts * width, 2 * wide),
        "mlp.experts.weight2": (experts * wide, width),
    }
    config = {"hidden_size": width, "num_hidden_layers": layers, "head_dim": 128}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups}
    config |= {"num_experts": experts, "moe_intermediate_size": wide}
    ends = (
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    )
    return config, _model_of("decoder.layers", bodies, ends, layers, width, vocabulary)


def _model_of(
    home: str,
    bodies: Mapping[str, tuple[int, ...]],
    ends: tuple[str, str, str],
    layers: int,
    width: int,
    vocabulary: int,
) -> Model:
    def tensor(name: str, shape: tuple[int, ...], layer: int) -> Tensor:
        return Tensor(name, "BFloat16", shape, layer, 0 if shape[1:] else None)

    first, norm, last = ends
    tensors = [tensor(first, (vocabulary, width), 0)]
    for layer in range(layers):
        for body, shape in bodies.items():
            name = body if "weight" in body else f"{body}.weight"
            tensors.append(tensor(f"{home}.{layer}.{name}", shape, layer))
    tensors += [tensor(norm, (width,), layers), tensor(last, (vocabulary, width), layers)]
    return Model(tuple(tensors), layers)


def many_tensors(count: int, shape: tuple[int, int]) -> Model:
    """A model of ``count`` equal matrices, to see what headers cost."""
    return Model(
        tuple(
            Tensor(f"model.layers.{i // 9}.matrix_{i % 9}.weight", "Float32", shape, i, 0)
            for i in range(count)
        ),
        count,
    )


def mixed_tensors(count: int) -> Model:
    """A model of ``count`` small tensors of 40 shapes, 3 types and 5 layouts in random order.

    Half of the weights have their moments.  All axes can be cut by 4 x 2 ranks and by 3 x 2.
    """
    sizes = sorted((r * c, r, c) for r in range(1, 15) for c in range(1, 15))[:40]
    shapes = [(24 * rows, 12 * columns) for _, rows, columns in sizes]
    layouts = ((), ((0,), ()), ((), (0,)), ((0,), (1,)), ((0,), ()))  # the last is shared out
    choose = random.Random(36).randrange
    tensors: list[Tensor] = []
    for i in range(count // 2):
        place, dtype = choose(len(layouts)), ("Float32", "BFloat16", "Float16")[choose(3)]
        weight = Tensor(
            *(f"model.layers.{i // 9}.matrix_{i % 9}.weight", dtype, shapes[choose(40)], i, None),
            *(layouts[place], place == 4),
        )
        tensors.append(weight)
        if i % 2:
            names = (prefix + weight.name for prefix in MOMENTS)
            tensors += (replace(weight, name=name, dtype="Float32") for name in names)
    return Model(tuple(tensors), len(tensors))
