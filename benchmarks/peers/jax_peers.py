"""JAX: ``jax.nn.dot_product_attention``, compiled by XLA for the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import ForeignPeer, Runner, added_mask, merged_mask


class JaxAttention(ForeignPeer):
    """``jax.jit`` of ``jax.nn.dot_product_attention``, which takes (B, T, H, D).

    XLA makes as many threads as the process has processors; it cannot be told to bind them one by one.
    """

    name = "JAX"
    level = "core"
    by_default = False
    worker = "JAX"
    modules = ("jax",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Turns the axes and merges all masks beforehand."""
        import jax
        import jax.numpy as jnp

        arguments = [jnp.asarray(x.transpose(1, 2).contiguous().numpy()) for x in inputs.arguments]
        mask, causal = merged_mask(case, inputs, inputs.mask)
        options: dict[str, Any] = {"is_causal": causal}
        if mask is not None and mask.dtype == torch.bool:
            options["mask"] = jnp.asarray(mask.view((1,) * (4 - mask.dim()) + mask.shape).numpy())
        elif mask is not None:
            options["bias"] = jnp.asarray(added_mask(mask, mask.dtype).numpy())
        attention = jax.jit(lambda query, key, value: jax.nn.dot_product_attention(query, key, value, **options))

        def read(found: Any) -> tuple[Tensor, None]:
            return torch.from_numpy(np.array(found)).transpose(1, 2), None

        return Runner(lambda: attention(*arguments).block_until_ready(), {}, read)
