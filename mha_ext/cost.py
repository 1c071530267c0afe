"""What a multi-head attention layer costs: parameters, multiply-adds, the shape of every step, the key/value cache.

Plain integer arithmetic on sizes; nothing is allocated. Equation numbers are the chapter's (see ``reference.py``).
A multiply-add is one multiplication and one addition: two floating-point operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from mha_ext import checks

__all__ = ["LayerTrace", "TraceStep", "kv_cache_bytes", "parameter_count", "self_attention_flops", "shape_trace"]


def _sizes(function: str, **sizes: int) -> list[int]:
    """The sizes as ``int``, so that products of NumPy's integers do not overflow."""
    result = []
    for name, given in sizes.items():
        size = checks.integer(function, name, given)
        if size < 0:
            raise ValueError(f"{function}: {name} must not be negative, got {size}")
        result.append(size)
    return result


def _key_value_width(function: str, model_width: int, num_heads: int | None, num_kv_heads: int | None) -> int:
    """Width of the key (and of the value) projection: ``num_kv_heads`` heads of ``model_width / num_heads``."""
    if num_heads is None:
        if num_kv_heads is not None:
            raise ValueError(f"{function}: num_heads must be given with num_kv_heads, got None")
        return model_width
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    num_heads, num_kv_heads = _sizes(function, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads == 0:
            raise ValueError(f"{function}: {name} must be at least 1, got 0")
    if model_width % num_heads:
        raise ValueError(f"{function}: embed_dim {model_width} is not divisible by num_heads {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{function}: num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}")
    return model_width // num_heads * num_kv_heads


def parameter_count(
    model_width: int, *, num_heads: int | None = None, num_kv_heads: int | None = None, bias: bool = False
) -> int:
    """Number of parameters of one layer: ``4 d²`` whatever the number of heads (eq. 20.4).

    Fewer key/value heads than query heads shrink the key and the value projection by ``num_heads / num_kv_heads``.

    Args:
        model_width: d, the width of the layer's input and output.
        num_heads: H, needed only with ``num_kv_heads``; must divide ``model_width``.
        num_kv_heads: number of key/value heads; must divide ``num_heads``, which is also the default.
        bias: also count one bias for each of the four projections.

    Raises:
        ValueError: a size is negative, or a head count does not divide what it must.
        TypeError: a size is not an ``int``.

    Example:
        >>> parameter_count(512)
        1048576
        >>> parameter_count(512, num_heads=8, num_kv_heads=1)
        589824
    """
    (model_width,) = _sizes("parameter_count", model_width=model_width)
    kv_width = _key_value_width("parameter_count", model_width, num_heads, num_kv_heads)
    weights = 2 * model_width * model_width + 2 * model_width * kv_width
    return weights + (2 * model_width + 2 * kv_width if bias else 0)


def self_attention_flops(
    batch: int,
    length: int,
    model_width: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    bias: bool = False,
) -> int:
    """Leading multiply-adds of one self-attention layer: ``4 B T d² + 2 B T² d`` (eq. 20.5).

    The number of heads does not appear: H heads of width d / H do together what one head of width d does. Fewer
    key/value heads make two of the four projections narrower and leave the attention itself as it is.

    Args:
        batch: B, number of sequences.
        length: T, positions in each.
        model_width: d.
        num_heads: H, needed only with ``num_kv_heads``; must divide ``model_width``.
        num_kv_heads: number of key/value heads; must divide ``num_heads``, which is also the default.
        bias: also count one multiply-add for each element that a projection's bias is added to.

    Returns:
        Multiply-adds; twice that in floating-point operations.

    Raises:
        ValueError: a size is negative, or a head count does not divide what it must.
        TypeError: a size is not an ``int``.

    Example:
        >>> self_attention_flops(1, 1024, 512)
        2147483648
    """
    batch, length, model_width = _sizes("self_attention_flops", batch=batch, length=length, model_width=model_width)
    kv_width = _key_value_width("self_attention_flops", model_width, num_heads, num_kv_heads)
    projections = batch * length * (2 * model_width + 2 * kv_width) * (model_width + (1 if bias else 0))
    return projections + 2 * batch * length * length * model_width


def kv_cache_bytes(batch: int, length: int, num_kv_heads: int, head_dim: int, *, element_size: int = 4) -> int:
    """Bytes of a key/value cache: ``2 B T H_kv d_h`` numbers.

    Args:
        batch: B, number of sequences.
        length: T, positions held for each.
        num_kv_heads: key/value heads; a cache shared by groups of query heads is ``H / H_kv`` times smaller.
        head_dim: d_h, width of one head.
        element_size: bytes of one number.

    Raises:
        ValueError: a size is negative.
        TypeError: a size is not an ``int``.

    Example:
        >>> kv_cache_bytes(1, 4096, 32, 128, element_size=2) // kv_cache_bytes(1, 4096, 8, 128, element_size=2)
        4
    """
    batch, length, num_kv_heads, head_dim, element_size = _sizes(
        "kv_cache_bytes",
        batch=batch,
        length=length,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        element_size=element_size,
    )
    return 2 * batch * length * num_kv_heads * head_dim * element_size


@dataclass(frozen=True)
class TraceStep:
    """One step of a layer.

    Attributes:
        name: what the step makes.
        formula: how.
        shape: shape of the result.
        multiply_adds: multiply-adds of the step's matrix products (0 for a change of layout or a softmax).
        stored: whether this package ever holds the whole result; scores and weights live one tile at a time.
    """

    name: str
    formula: str
    shape: tuple[int, ...]
    multiply_adds: int = 0
    stored: bool = True

    @property
    def numel(self) -> int:
        """How many numbers the result has."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class LayerTrace:
    """Every step of one layer with its shape and cost, and the budget of the whole; ``print`` it for a table.

    Attributes:
        steps: the steps in the order in which they run.
        parameters: number of parameters of the layer (eq. 20.4).
    """

    steps: tuple[TraceStep, ...]
    parameters: int

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all steps (eq. 20.5 when queries, keys and values are one sequence)."""
        return sum(step.multiply_adds for step in self.steps)

    @property
    def attention_weights(self) -> int:
        """``B H Tq Tk``: the numbers that stored attention weights would take."""
        return self["weights"].numel

    def __getitem__(self, name: str) -> TraceStep:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r}; the steps are {', '.join(step.name for step in self.steps)}")

    def __str__(self) -> str:
        rows = [("step", "how", "shape", "numbers", "multiply-adds", "held in memory")]
        for step in self.steps:
            shape = "(" + ", ".join(map(str, step.shape)) + ")"
            held = "yes" if step.stored else "one tile at a time"
            cost = f"{step.multiply_adds:,}" if step.multiply_adds else "-"
            rows.append((step.name, step.formula, shape, f"{step.numel:,}", cost, held))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            left = [row[column].ljust(widths[column]) for column in (0, 1, 2)]
            right = [row[column].rjust(widths[column]) for column in (3, 4)]
            lines.append("  ".join([*left, *right, row[5]]).rstrip())
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append("")
        lines.append(f"parameters               {self.parameters:,}")
        lines.append(
            f"multiply-adds            {self.multiply_adds:,} ({2 * self.multiply_adds:,} floating-point operations)"
        )
        lines.append(f"attention weights        {self.attention_weights:,} numbers if they were stored")
        return "\n".join(lines)


def shape_trace(
    batch: int,
    length: int,
    model_width: int,
    num_heads: int,
    *,
    key_length: int | None = None,
    num_kv_heads: int | None = None,
    bias: bool = False,
) -> LayerTrace:
    """Shape and cost of every step of a layer, from ``(B, T, d)`` back to ``(B, T, d)``.

    Args:
        batch: B, number of sequences.
        length: Tq, number of queries.
        model_width: d.
        num_heads: H; must divide ``model_width``.
        key_length: Tk, number of keys, for cross-attention; ``length`` by default.
        num_kv_heads: number of key/value heads; must divide ``num_heads``, which is also the default.
        bias: whether the four projections have a bias.

    Raises:
        ValueError: a size is negative, or a head count does not divide what it must.
        TypeError: a size is not an ``int``.

    Example:
        >>> trace = shape_trace(2, 5, 12, 3)
        >>> trace["weights"].shape, trace["output"].shape
        ((2, 3, 5, 5), (2, 5, 12))
        >>> trace.multiply_adds == self_attention_flops(2, 5, 12)
        True
    """
    keys = length if key_length is None else key_length
    batch, length, model_width, keys, num_heads = _sizes(
        "shape_trace", batch=batch, length=length, model_width=model_width, key_length=keys, num_heads=num_heads
    )
    kv_width = _key_value_width("shape_trace", model_width, num_heads, num_kv_heads)
    head_dim = model_width // num_heads
    kv_heads = num_heads if num_kv_heads is None else checks.integer("shape_trace", "num_kv_heads", num_kv_heads)
    inputs = model_width + (1 if bias else 0)
    plus = " + b" if bias else ""
    products = batch * num_heads * length * keys * head_dim
    steps = (
        TraceStep("query input", "Xq", (batch, length, model_width)),
        TraceStep("key input", "Xk", (batch, keys, model_width)),
        TraceStep("value input", "Xv", (batch, keys, model_width)),
        TraceStep("query", f"Q = Xq W_Q{plus}", (batch, length, model_width), batch * length * model_width * inputs),
        TraceStep("key", f"K = Xk W_K{plus}", (batch, keys, kv_width), batch * keys * kv_width * inputs),
        TraceStep("value", f"V = Xv W_V{plus}", (batch, keys, kv_width), batch * keys * kv_width * inputs),
        TraceStep("query heads", "split_heads(Q), a view", (batch, num_heads, length, head_dim)),
        TraceStep("key heads", "split_heads(K), a view", (batch, kv_heads, keys, head_dim)),
        TraceStep("value heads", "split_heads(V), a view", (batch, kv_heads, keys, head_dim)),
        TraceStep("scores", "Q_h K_hᵀ / √d_h + mask", (batch, num_heads, length, keys), products, stored=False),
        TraceStep("weights", "softmax(scores)", (batch, num_heads, length, keys), stored=False),
        TraceStep("heads", "O_h = weights V_h", (batch, num_heads, length, head_dim), products),
        TraceStep("combined", "combine_heads(O), a view", (batch, length, model_width)),
        TraceStep("output", f"Y = O W_O{plus}", (batch, length, model_width), batch * length * model_width * inputs),
    )
    parameters = parameter_count(model_width, num_heads=num_heads, num_kv_heads=num_kv_heads, bias=bias)
    return LayerTrace(steps, parameters)
