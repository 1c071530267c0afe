"""How far a right result may lie from the exact one. Every limit is derived from rounding; none is tuned.

Notation. ``u`` is the unit roundoff of the dtype a tensor is stored in, ``a`` that of the type the sums run in
(float32, or float64 for float64). A sum of n products carries a relative error below ``min(n, LAMBDA * sqrt(n)) * a``:
the first is the worst case, the second the probabilistic bound of Higham and Mary (2019), which with LAMBDA = 6 fails
about once in 10^8 sums. All formulas are first order, elementwise, and evaluated in float64 on the exact operands of
the problem at hand, so they grow with head size, key length and the magnitude of the operands and with nothing else.

* score  s = scale q.k + bias      e_s  = growth(D) scale |q|.|k| + 4 a (scale |q|.|k| + |bias|)
  A bias of n parts is their sum, and each costs two roundings: 2 (n + 1) a in place of 4 a, |bias| the sum of sizes.
* capped c t, t = tanh(x / c)      e_t  = (1 - t^2) (growth(D) + 4 a) scale |q|.|k| / c + 8 a |t|: a few ulps of tanh
  in place of scale q.k            the score's error is c e_t, its slope f = 1 - t^2, whose error is 2 |t| e_t + 3 a
* log-sum-exp                      e_l  = sum_j p e_s + growth(S) + 4 a + 3 a |lse|
* weight p = exp(s - lse)          e_p  = e_s + e_l + 2 a (|s| + |lse|) + 4 a              (relative)
* output o = sum_j p v             e_o  = sum_j p |v| (e_p + growth(S)) + u |o|
* delta = dO.o                     e_d  = growth(D_v) |dO|.|o| + |dO|.(e_o - u |o| + k |o|)
* dP = dO.v                        e_dp = growth(D_v) |dO|.|v|
* dS = p (dP - delta + dlse)       e_ds = e_p |dS| + p (e_dp + e_d + 3 a (|dP| + |delta| + |dlse|))
* sink's share z = exp(sink - lse) e_z  = e_l + 2 a (|sink| + |lse|) + 4 a  (relative);  dsink = sum z (dlse - delta)
* dQ, dK, dV, dbias: products with the errors above carried through, plus the growth of their own sum, plus u of the
  result.

``k`` is u times bfloat16's for bfloat16 and float16, which keep what rounding took from the output, otherwise u.
Weights and dS are not rounded to the storage type before they enter a product, as other libraries round them: for those
(``rounded``) e_p is u larger in out and value's gradient, e_ds by u |dS|, and k is u. The AMX kernels' products take
bfloat16 only: there (``halves``) weights and dS enter as the sum of two such numbers, which is as good as twice the
digits, and e_p, e_l and the errors of dS are u^2 larger. Where numbers are so small that their spacing no longer
shrinks, ``smallest`` stands in for u times them; an exponential may return 0 there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from switches import threads
from torch import Tensor

import mha_ext

LAMBDA = 6.0


def roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """What rounding costs next to zero: half the distance of the numbers there, and all of a weight too small."""
    return max(torch.finfo(dtype).tiny * roundoff(dtype), torch.finfo(sum_dtype(dtype)).tiny)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over tensors of ``dtype`` have to run."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def growth(terms: int, dtype: torch.dtype) -> float:
    """Relative error of a sum of ``terms`` products computed for tensors of ``dtype``."""
    return min(terms, LAMBDA * terms**0.5) * roundoff(sum_dtype(dtype))


@dataclass
class Exact:
    """One attention problem in float64, key and value heads already repeated for the query heads.

    ``weights`` are the softmax weights before dropout, ``drop`` the factor dropout multiplies them with (0 or 1/(1-p)).
    ``grad_scores`` is the exact gradient of the biased scores, (B, H, T, S). ``softcap`` is 0 where scores are not
    capped; ``sink`` (H,) is in ``lse``; ``added`` is the sum of the sizes of the ``parts`` that ``bias`` is made of.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    weights: Tensor
    drop: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    grad_out: Tensor
    grad_lse: Tensor
    grads: dict[str, Tensor]
    softcap: float = 0.0
    sink: Tensor | None = None
    added: Tensor | None = None
    parts: int = 1

    def grad_scores(self) -> Tensor:
        d_weights = self.drop * (self.grad_out @ self.value.mT)
        delta = (self.grad_out * self.out).sum(-1, keepdim=True)
        return self.weights * (d_weights - delta + self.grad_lse[..., None])


def fold_heads(grad: Tensor, heads: int) -> Tensor:
    """Sum over the query heads that share a key/value head: (B, H, S, D) -> (B, heads, S, D)."""
    return grad.unflatten(1, (heads, -1)).sum(2) if grad.shape[1] != heads else grad


@dataclass
class Scores:
    """Scores and how far they may be off: size and error with their bias, the slope of the cap and its error."""

    size: Tensor
    error: Tensor
    slope: Tensor | float = 1.0
    slope_error: Tensor | float = 0.0


def scores_of(exact: Exact, dtype: torch.dtype) -> Scores:
    """The first two formulas of the module's text."""
    a, sums = roundoff(sum_dtype(dtype)), growth(exact.query.shape[-1], dtype)
    products = abs(exact.scale) * (exact.query.abs() @ exact.key.abs().mT)
    added = exact.bias.nan_to_num(neginf=0.0).abs() if exact.added is None else exact.added
    rounded = 2 * (exact.parts + 1) * a
    if not exact.softcap:
        return Scores(products + added, sums * products + rounded * (products + added))
    turned = torch.tanh(exact.scale * (exact.query @ exact.key.mT) / exact.softcap)
    slope = 1 - turned.square()
    error = slope * (sums + 4 * a) * products / exact.softcap + 8 * a * turned.abs()
    size = exact.softcap * turned.abs() + added
    return Scores(size, exact.softcap * error + rounded * size, slope, 2 * turned.abs() * error + 3 * a)


def sink_limit(exact: Exact, e_l: Tensor, e_d: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit for the gradient of the sinks, (H,)."""
    a, sink, lse = roundoff(sum_dtype(dtype)), exact.sink[:, None, None].abs(), exact.lse[..., None]
    share = torch.exp(exact.sink[:, None, None] - lse)
    e_share = e_l + 2 * a * (sink + lse.abs()) + 4 * a
    size = delta + exact.grad_lse.abs()[..., None]
    change = (exact.grad_lse[..., None] - (exact.grad_out * exact.out).sum(-1, keepdim=True)).abs()
    error = share * (e_share * change + e_d + 3 * a * size + growth(lse.numel(), dtype) * change)
    return error.sum((0, 2, 3)) + smallest(dtype)


def halves(dtype: torch.dtype) -> float:
    """What weights and dS lose, relative to themselves, in products that take them as two numbers."""
    return roundoff(dtype) ** 2 if dtype == torch.bfloat16 and mha_ext.cpu_capability() == "amx" else 0.0


@threads(1)
def attention_limits(
    exact: Exact, dtype: torch.dtype, kv_heads: int, grads: bool = True, rounded: bool = False
) -> dict[str, Tensor]:
    """Elementwise limits for out, lse and the gradients of query, key, value and the biased scores (see the module's
    text)."""
    u, a = roundoff(dtype), roundoff(sum_dtype(dtype))
    half = dtype in (torch.bfloat16, torch.float16)
    h, split = u if half and rounded else 0.0, halves(dtype)
    kept = u * roundoff(torch.bfloat16) if half and not rounded else u
    tiny = smallest(dtype)
    queries, (keys, dim_v) = exact.query.shape[-2], exact.value.shape[-2:]
    scores = scores_of(exact, dtype)
    lse = exact.lse.nan_to_num(neginf=0.0)[..., None]
    e_s = torch.where(exact.weights > 0, scores.error, 0.0)
    e_l = (exact.weights * e_s).sum(-1, keepdim=True) + growth(keys, dtype) + 4 * a + 3 * a * lse.abs() + split
    if exact.sink is not None:
        e_l = e_l + 4 * a * exact.sink[:, None, None].abs()
    e_p = e_s + e_l + 2 * a * (scores.size + lse.abs()) + 4 * a
    used = exact.weights * exact.drop
    e_sum = (used * (e_p + growth(keys, dtype) + h + split)) @ exact.value.abs()
    e_sum = e_sum + tiny * (1 + exact.value.abs().sum(-2, keepdim=True))
    limits = {"out": e_sum + u * exact.out.abs(), "lse": e_l[..., 0]}
    if not grads:
        return limits
    d_out = exact.grad_out.abs()
    d_scores = exact.grad_scores().abs()
    d_weights = exact.drop * (d_out @ exact.value.abs().mT)
    delta = (d_out * exact.out.abs()).sum(-1, keepdim=True)
    e_d = growth(dim_v, dtype) * delta + (d_out * (e_sum + kept * exact.out.abs())).sum(-1, keepdim=True)
    e_dp = growth(dim_v, dtype) * d_weights
    rest = e_dp + e_d + 3 * a * (d_weights + delta + exact.grad_lse.abs()[..., None])
    e_ds = (e_p + h) * d_scores + exact.weights * rest + tiny * (1 + d_weights + delta)
    shared = queries * (exact.query.shape[1] // max(kv_heads, 1))
    d_products = d_scores * scores.slope
    e_dx = e_ds * scores.slope + d_scores * scores.slope_error
    query = (
        abs(exact.scale) * ((e_dx + (growth(keys, dtype) + split) * d_products) @ exact.key.abs())
        + u * exact.grads["query"].abs()
    )
    key = abs(exact.scale) * ((e_dx + (growth(shared, dtype) + h + split) * d_products).mT @ exact.query.abs())
    value = (used * (e_p + h + split + growth(shared, dtype)) + tiny).mT @ d_out
    limits["query"] = query + tiny
    limits["key"] = fold_heads(key, kv_heads) + u * exact.grads["key"].abs() + tiny
    limits["value"] = fold_heads(value, kv_heads) + u * exact.grads["value"].abs() + tiny
    limits["scores"] = e_ds
    if exact.sink is not None:
        limits["sink"] = sink_limit(exact, e_l, e_d, delta, dtype)
    return limits


@threads(1)
def bias_limit(exact: Exact, e_ds: Tensor, grad: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Limit for ``grad``, a float mask's gradient: the broadcast sum of the first ``columns`` scores' gradients."""
    d_scores = exact.grad_scores()[..., :columns].abs()
    terms = max(1, d_scores.numel() // max(1, grad.numel()))
    total = (e_ds[..., :columns] + growth(terms, dtype) * d_scores).sum_to_size(grad.shape)
    return total + roundoff(grad.dtype) * grad.double().abs() + smallest(grad.dtype)


@threads(1)
def assert_within(got: Tensor, want: Tensor, limit: Tensor | float, what: str = "result") -> None:
    """Shapes equal, NaN and infinities in the same places, and elsewhere ``|got - want| <= limit``."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    assert torch.equal(got.isnan(), want.isnan()), (
        f"{what}: {int(got.isnan().sum())} NaN, wanted {int(want.isnan().sum())}"
    )
    special = ~want.isfinite() | ~got.isfinite()
    same = torch.where(special, got.nan_to_num() == want.nan_to_num(), True)
    assert bool(same.all()), f"{what}: infinities in the wrong places"
    error = torch.where(special, 0.0, (got - want).abs())
    if not isinstance(limit, Tensor):
        limit = torch.full_like(error, limit)
    worst = error - limit.nan_to_num(nan=0.0).expand_as(error)
    if worst.numel() and float(worst.max()) > 0:
        i = int(worst.argmax())
        place = tuple(int(j) for j in torch.unravel_index(torch.tensor(i), worst.shape))
        raise AssertionError(
            f"{what}{list(place)}: got {got.flatten()[i]:.9g}, wanted {want.flatten()[i]:.9g}, "
            f"error {error.flatten()[i]:.3g} > limit {limit.expand_as(error).flatten()[i]:.3g}"
        )


def peer_limit(peer: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """For a whole layer: twice the error PyTorch's own layer makes in the same dtype on the same input, and 4 u of the
    scale.

    A layer chains four products and a softmax; the first-order bound of such a chain is loose by orders of magnitude,
    so the rounding error of another implementation of the same equations in the same dtype is the measure.
    """
    error = (peer.detach().double() - want.detach().double()).abs()
    size = float(want.detach().abs().max()) if want.numel() else 0.0
    return 2 * (float(error.max()) if error.numel() else 0.0) + 4 * roundoff(dtype) * size


def double_limit(want: Tensor, terms: int) -> float:
    """For float64 against another float64 computation of the same chain of products: ``terms`` roundings of the
    largest number.

    1000 leaves room for the four chained products and the exponential (its error is a few u); a fault in a mask, a
    scale or an index is larger by ten orders of magnitude.
    """
    size = float(want.detach().abs().max()) if want.numel() else 0.0
    return 1000 * growth(max(terms, 1), torch.float64) * max(size, 1.0)
