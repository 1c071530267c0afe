"""What ``test_distributed`` runs in two processes of a layer whose heads are on both: outputs, weights and gradients of
the layer in one process, by parameter name."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from distributed_checks import same
from layer_cases import SHARED_HEADS, causal_mask, inputs_for, last_hidden, make, sequence
from module_variant_cases import KEYWORDS, variant
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext.distributed import HeadParallel, HeadParallelAttention

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def parallel(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    return parallelize_module(copy.deepcopy(module), mesh, HeadParallel(**options))


def of_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the names of a layer in one process."""
    grads: dict[str, Any] = {n: p.grad for n, p in module.named_parameters()}
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    if "q_proj_weight" in grads and module.kdim == module.vdim == module.embed_dim:
        grads["in_proj_weight"] = torch.cat([grads.pop(n) for n in PROJECTIONS])
    return grads


def agree(one: Any, many: Any, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """Output, weights, and gradients of inputs, float masks and parameters."""
    results = []
    for module in (one, many):
        module.zero_grad()
        leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs}
        given = {
            n: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for n, x in options.items()
        }
        out, weights = module(*[leaves[id(x)] for x in inputs], **given)
        loss = out.square().sum() + (0.0 if weights is None else weights.pow(3).sum())
        loss.backward()
        masks = [x.grad for x in given.values() if isinstance(x, Tensor)]
        results.append(([out, weights, *masks, *[x.grad for x in leaves.values()]], of_parameters(module)))
    (want, want_grads), (got, got_grads) = results
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        same(a, b, f"{options.keys()} {n}")
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        same(got_grads[name], grad, name)


WEIGHTS: tuple[dict[str, Any], ...] = (
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
)


def heads_in_parallel(mesh: DeviceMesh) -> None:
    """Every parameter that belongs to heads is cut, and so is its gradient."""
    one = make(num_kv_heads=2)
    many = parallel(one, mesh)
    for weights in WEIGHTS:
        agree(one, many, inputs_for(one, 2), is_causal=True, **weights)
        agree(one, many, inputs_for(one), **weights)
    cut = {"q_proj_weight": 0, "k_proj_weight": 0, "v_proj_weight": 0, "out_proj.weight": 1}
    for name, parameter in many.named_parameters():
        want = (Shard(cut[name]) if name in cut else Replicate(),)
        assert parameter.placements == parameter.grad.placements == want, name
    assert many.q_proj_weight.to_local().shape == (8, 16)


def layers_in_parallel(mesh: DeviceMesh) -> None:
    for options in (
        {"bias": False, "add_bias_kv": True},
        {"kdim": 8, "vdim": 6, "add_zero_attn": True, "batch_first": False},
        SHARED_HEADS[2],
        {"num_kv_heads": 2, "head_dim": 6},
    ):
        one = make(**options)
        for weights in WEIGHTS[:2]:
            agree(one, parallel(one, mesh), inputs_for(one), **weights)
    for keywords in KEYWORDS.values():
        one = variant(keywords)
        agree(one, parallel(one, mesh), inputs_for(one), need_weights=False)


def masks_in_parallel(mesh: DeviceMesh) -> None:
    random = torch.Generator().manual_seed(5)
    one = make()
    many = parallel(one, mesh)
    biases = [
        torch.randn(n, generator=random, dtype=torch.float64) for n in ((8, 5, 7), (2, 4, 5, 7), (2, 5, 7), (5, 7))
    ]
    masks = [{"attn_mask": x} for x in (*biases, biases[0] > 0, causal_mask(5, 7))]
    for options in (*masks, {"key_padding_mask": last_hidden(2, 7), "attn_mask": biases[1]}):
        agree(one, many, inputs_for(one), **options)
    single = tuple(x[0] for x in inputs_for(one))
    agree(one, many, single, attn_mask=biases[1][0], average_attn_weights=False)


def layouts_in_parallel(mesh: DeviceMesh) -> None:
    """Parts of a sequence come in and go out; DTensors too."""
    one, x, rank = make(), sequence(2, 6), mesh.get_local_rank()
    want = one(x, x, x, need_weights=False)[0]
    want.square().sum().backward()
    part = slice(3 * rank, 3 * rank + 3)
    for local in (True, False):
        many = parallel(one, mesh, input_layouts=Shard(1), output_layouts=Shard(1), use_local_output=local)
        given = x[:, part].contiguous() if local else distribute_tensor(x, mesh, [Shard(1)])
        out = many(given, given, given, need_weights=False)[0]
        assert isinstance(out, DTensor) != local
        same(out, want[:, part] if local else want)
        (out if local else out.to_local()).square().sum().backward()
        for name, grad in of_parameters(many).items():
            same(grad, dict(one.named_parameters())[name].grad, name)


def in_a_model(mesh: DeviceMesh) -> None:
    """A converted encoder layer under a plan, a training step, a cache, checkpointing, and on top of it FSDP."""
    torch.manual_seed(1)
    block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    mha_ext.convert(block)
    many = parallelize_module(copy.deepcopy(block), mesh, {"self_attn": HeadParallel()})
    assert type(many.self_attn) is HeadParallelAttention
    x = sequence(2, 5)
    for step in range(2):
        losses = []
        for model in (block, many):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        same(losses[1], losses[0], f"step {step}")
    with torch.no_grad():
        same(many.eval()(x), block.eval()(x))
    one = make(num_kv_heads=2, rope=True).eval()
    caches = [mha_ext.KVCache(2, n, 8, 4, dtype=torch.float64) for n in (2, 1)]
    for chunk in x.split([3, 1, 1], 1):
        with torch.no_grad():
            want, got = (
                m(chunk, chunk, chunk, kv_cache=c, need_weights=False)[0]
                for m, c in zip((one, parallel(one, mesh)), caches, strict=True)
            )
        same(got, want)
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    one = make()
    both = parallel(one, grid["tp"])
    fully_shard(both, mesh=grid["dp"])
    agree(one, both, inputs_for(one, 2), need_weights=False)


def checkpoints_in_parallel(mesh: DeviceMesh) -> None:
    """What one process saved loads, and so does what the layer itself saves; values are the first process's."""
    first, other = make(num_kv_heads=2), make(seed=8 + mesh.get_local_rank(), num_kv_heads=2)
    many = parallel(other, mesh)
    same(many.out_proj.weight, make(seed=8, num_kv_heads=2).out_proj.weight)
    saved = many.state_dict()
    assert set(PROJECTIONS) < saved.keys() and "in_proj_weight" not in saved
    many.load_state_dict(first.state_dict())
    agree(first, many, inputs_for(first))
    again = parallel(other, mesh)
    again.load_state_dict(many.state_dict())
    agree(first, again, inputs_for(first))


def dropout_in_parallel(mesh: DeviceMesh) -> None:
    """Every process has its own mask, of the right density; gradients are those of the mask that the weights show."""
    many = parallel(make(dropout=0.4, dtype=torch.float64), mesh)
    x = sequence(2, 40)
    out, weights = many(x, x, x, average_attn_weights=False)
    kept = weights != 0
    assert not torch.equal(kept[:, :2], kept[:, 2:])
    assert abs(float(kept.double().mean()) - 0.6) < 4 * (0.24 / kept.numel()) ** 0.5
    torch.manual_seed(3)
    out = many(x, x, x, need_weights=False)[0]
    torch.manual_seed(3)
    again, weights = many(x, x, x, average_attn_weights=False)
    same(again, out)
    one = make()
    value = (x @ one.in_proj_weight[32:].mT + one.in_proj_bias[32:]).unflatten(-1, (4, 4)).transpose(1, 2)
    same(out, one.out_proj((weights @ value).transpose(1, 2).flatten(2)))
    out.sum().backward()
    want = torch.autograd.grad(
        one.out_proj((weights.detach() @ value).transpose(1, 2).flatten(2)).sum(), one.in_proj_weight
    )
    same(many.v_proj_weight.grad, want[0][32:])
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
    dist.all_gather(states, torch.get_rng_state())
    assert torch.equal(*states)  # the generators of the processes stay in step


def rowwise_output_alone(mesh: DeviceMesh) -> None:
    """PyTorch's own style for the output projection."""
    one = make()
    many = parallelize_module(copy.deepcopy(one), mesh, {"out_proj": RowwiseParallel(input_layouts=Replicate())})
    for weights in WEIGHTS:
        agree(one, many, inputs_for(one), **weights)


def slope_of(module: nn.Module, x: Tensor) -> Tensor:
    """To be differentiated in its turn."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(module(leaf, leaf, leaf)[0].sum(), leaf, create_graph=True)[0]


def refusals(mesh: DeviceMesh) -> None:
    class Sub(mha_ext.MultiheadAttention):
        pass

    grid = init_device_mesh("cpu", (1, 2))
    hooked = make()
    hooked.out_proj.register_forward_hook(lambda *_: None)
    late = parallel(make(), mesh)
    late.out_proj.register_forward_hook(lambda *_: None)
    x = sequence(2, 5)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], dtype=torch.float64)
    fine = parallel(make(), mesh)
    for call, error, text in (
        (lambda: parallel(make(num_heads=1), mesh), ValueError, "num_heads must divide by the mesh's 2 devices, got 1"),
        (lambda: parallel(make(num_kv_heads=1), mesh), ValueError, "num_kv_heads must divide"),
        (lambda: parallel(make(nn.MultiheadAttention), mesh), TypeError, "mha_ext.convert makes one"),
        (lambda: parallel(Sub(16, 4), mesh), TypeError, "must be a mha_ext.MultiheadAttention itself"),
        (lambda: parallel(make(), grid), ValueError, "device_mesh must have one axis, got 2"),
        (lambda: parallel(hooked, mesh), ValueError, "out_proj must be a plain linear layer without hooks"),
        (lambda: late(x, x, x), ValueError, "out_proj must be a plain linear layer without hooks"),
        (lambda: fine(nested, nested, nested), NotImplementedError, "query must be a dense tensor"),
        (lambda: fine.project_keys(x, x), NotImplementedError, "project_keys"),
        (lambda: slope_of(fine, x), NotImplementedError, "create_graph must be False"),
    ):
        try:
            call()
        except error as raised:
            assert text in str(raised), str(raised)
        else:
            raise AssertionError(f"nothing was raised: {text}")
