"""Gates of the bounded kernel: exact gradients, nothing dense kept, and LoRA's memory at most."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from stable_forgetting.common.bounded import eager as bounded_eager
from stable_forgetting.common.bounded import product as bounded_product
from stable_forgetting.common.bounded.attach import adapted_layers, attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.layer import reuse_weights, shared_weight
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.product import bounded_linear, build_weight, gemm_dtype

BENT = ("sine", "tanh", "sigmoid", "relu", "clip")
PHIS = (*BENT, "identity")
KINKS = {"relu": (0.0,), "clip": (-1.5, 1.5)}
K, D, R = 20, 6, 2
OUTER, INNER = 0.7, 1.3


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def fair_factors(phi):
    """Factors whose arguments are all away from a kink of phi."""
    for seed in range(0, 2000, 2):
        A, Bt = draw(seed, K, R), draw(seed + 1, R, D)
        arguments = INNER * (A @ Bt)
        if all((arguments - kink).abs().min() > 3e-3 for kink in KINKS.get(phi, ())):
            return A, Bt
    raise AssertionError("no such factors")


def built_weight(layer):
    """What a scope around ``layer`` shares in float32."""
    return shared_weight(layer, (layer.A, layer.Bt), torch.float32, layer.effective_weight)


def form(phi):
    return Bound(phi, OUTER, INNER)


def naive(x, weight, bias, A, Bt, bound, *, start=None):
    """The formula read literally, with autograd."""
    delta = bound.amplitude * bound.value(bound.frequency * (A @ Bt))
    if start is not None:
        delta = delta - bound.amplitude * bound.value(bound.frequency * (start[0] @ start[1]))
    return F.linear(x, weight + delta, bias)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows, of which 20 is no multiple."""
    monkeypatch.setattr(bounded_eager, "BLOCK_BYTES", 1)
    monkeypatch.setattr(bounded_eager, "MIN_ROWS", 16)
    monkeypatch.setattr(bounded_eager, "FEW_ROWS", 16)


MODES = {
    "full": {},
    "chunked": {},
    "split": {"split": True},
    "start": {"start": (draw(91, K, R), draw(92, R, D))},
    "split-start": {"split": True, "start": (draw(91, K, R), draw(92, R, D))},
}


def tensors(phi, mode):
    """x, W0, bias, A, Bt in float64; few tokens (N < d / 2) where the forward shall be chunked."""
    tokens = 2 if mode == "chunked" else 5
    A, Bt = fair_factors(phi)
    return [draw(5, tokens, D), draw(6, K, D), draw(7, K), A, Bt]


def options_of(mode, phi, inputs):
    """What the layer is given in a mode; "built" gives it the effective weight."""
    if mode != "built":
        return MODES[mode]
    _, weight, _, A, Bt = inputs
    return {"built": build_weight(weight, Update(A, Bt, form(phi)), A.dtype)}


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", PHIS)
def test_float64_gradcheck_with_dropout(phi, small_blocks):
    """The same mask in every call."""
    inputs = [t.requires_grad_() for t in tensors(phi, "split")]

    def layer(*arguments):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            return bounded_linear(*arguments, form(phi), split=True, dropout=0.4)

    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True)
    x = inputs[0].detach()
    plain = bounded_linear(x, *inputs[1:], form(phi), split=True)
    assert not torch.allclose(layer(x, *inputs[1:]), plain), "the mask acts"


def gradients(function, inputs, upstream=None):
    """Output and gradients of a weighted sum with respect to whatever requires one."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    out = function(*leaves)
    upstream = draw(8, *out.shape) if upstream is None else upstream
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def distance(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("mode", [*MODES, "built"])
@pytest.mark.parametrize("phi", PHIS)
def test_float64_equals_naive(phi, mode, small_blocks):
    inputs = [t.requires_grad_() for t in tensors(phi, mode)]
    options = MODES.get(mode, {}) if phi == "identity" else options_of(mode, phi, inputs)
    found = gradients(lambda *a: bounded_linear(*a, form(phi), **options), inputs)
    exact = gradients(lambda *a: naive(*a, form(phi), start=options.get("start")), inputs)
    for mine, theirs in zip(found, exact, strict=True):
        assert distance(mine, theirs) < 1e-13


@pytest.mark.parametrize("tokens", [10, 300])
@pytest.mark.parametrize("phi", PHIS)
def test_float32_within_1e5_of_naive(phi, tokens, small_blocks):
    """44 blocks, chunked (10 tokens) and full forward."""
    k, d = 700, 48
    inputs = [draw(5, tokens, d), draw(6, k, d), draw(7, k), draw(1, k, R), draw(2, R, d)]
    inputs = [t.float().requires_grad_() for t in inputs]
    assert len(bounded_eager.row_blocks(k, d, 4, tokens)) == 44
    upstream = draw(9, tokens, k)
    found = gradients(lambda *a: bounded_linear(*a, form(phi)), inputs, upstream)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = gradients(lambda *a: naive(*a, form(phi)), wide, upstream)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == torch.float32 and distance(mine, theirs) < 1e-5


@pytest.mark.parametrize("needed", range(5))
@pytest.mark.parametrize("mode", ["full", "chunked", "built"])
def test_each_gradient_alone(mode, needed, small_blocks):
    """Only what is asked for is returned, whatever else could be."""
    inputs = tensors("sine", mode)
    options = options_of(mode, "sine", inputs)
    inputs[needed].requires_grad_()
    found = gradients(lambda *a: bounded_linear(*a, form("sine"), **options), inputs)
    exact = gradients(lambda *a: naive(*a, form("sine")), inputs)
    assert len(found) == 2
    assert distance(found[1], exact[1]) < 1e-13


def test_shapes_layouts_and_empty_batches():
    _, weight, bias, A, Bt = (t.requires_grad_() for t in tensors("tanh", "full"))
    transposed = draw(3, D, 4).T
    expanded = draw(3, 1, D).expand(4, D)
    for x in (draw(3, D), draw(3, 2, 3, D), transposed, expanded, draw(3, 0, D), draw(3, 2, 0, D)):
        rest = [x.requires_grad_(), weight, bias, A, Bt]
        for upstream in (torch.ones(()).double().expand(*x.shape[:-1], K), None):
            mine = gradients(lambda *a: bounded_linear(*a, form("tanh")), rest, upstream)
            theirs = gradients(lambda *a: naive(*a, form("tanh")), rest, upstream)
            for one, two in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, two)


def test_non_contiguous_gradients():
    inputs = [t.requires_grad_() for t in tensors("sine", "full")]
    x = draw(3, 3, 5, D).requires_grad_()
    for view in (lambda y: y.permute(2, 1, 0), lambda y: y[..., ::2], lambda y: y[:, 1]):
        found, exact = (
            torch.autograd.grad(
                view(layer(x, *inputs[1:], form("sine"))).square().sum(), [x, *inputs[1:]]
            )
            for layer in (bounded_linear, naive)
        )
        for mine, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_there_is_no_second_derivative():
    x, *rest = tensors("sine", "full")
    out = bounded_linear(x.requires_grad_(), *rest, form("sine"))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# Precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["full", "chunked", "split"])
@pytest.mark.parametrize("phi", PHIS)
def test_autocast_multiplies_as_a_linear_layer_does(phi, mode, dtype):
    inputs = [t.float().requires_grad_() for t in tensors(phi, mode)]
    plain = nn.Linear(D, K)
    with torch.autocast("cpu", dtype=dtype):
        assert plain(inputs[0]).dtype == dtype == gemm_dtype(inputs[0], inputs[1])
        found = gradients(lambda *a: bounded_linear(*a, form(phi), **MODES[mode]), inputs)
    exact = gradients(lambda *a: naive(*a, form(phi)), inputs)
    assert found[0].dtype == dtype
    for mine, theirs in zip(found, exact, strict=True):
        assert distance(mine, theirs) < (2e-2 if dtype == torch.bfloat16 else 3e-3)
    for mine in found[1:]:
        assert mine.dtype == torch.float32, "gradients come in their parameters' precision"


def test_phi_is_float32_under_autocast_and_float64_stays():
    """Arguments of hundreds of radians: in bfloat16 their sine would be noise."""
    A, Bt, weight = (t.float() for t in (draw(1, K, R), draw(2, R, D), draw(3, K, D)))
    x = torch.eye(D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = bounded_linear(x, weight * 0, None, A, Bt, Bound("sine", 1.0, 500.0))
    exact = torch.sin(500.0 * (A.double() @ Bt.double())).T
    assert (out.double() - exact).abs().max() < 5e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = bounded_linear(x.double(), weight.double(), None, A, Bt, form("sine"))
        assert wide.dtype == nn.Linear(D, K).double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phi", PHIS)
def test_low_precision_weights(phi, dtype, small_blocks):
    for mode in ("full", "chunked", "split"):
        x, weight, bias, A, Bt = tensors(phi, mode)
        low = [t.to(dtype) for t in (x, weight, bias)]
        inputs = [t.requires_grad_() for t in (*low, A.float(), Bt.float())]
        found = gradients(lambda *a: bounded_linear(*a, form(phi), **MODES[mode]), inputs)  # noqa: B023
        wide = [t.detach().double().requires_grad_() for t in inputs]
        exact = gradients(lambda *a: naive(*a, form(phi)), wide)
        for mine, theirs in zip(found, exact, strict=True):
            assert distance(mine, theirs) < (2e-2 if dtype == torch.bfloat16 else 3e-3)
        assert [g.dtype for g in found[1:]] == [t.dtype for t in inputs]


def test_a_wrong_dtype_raises_as_in_a_linear_layer():
    for mode in ("full", "chunked"):
        x, *rest = tensors("sine", mode)
        with pytest.raises(RuntimeError):
            bounded_linear(x.float(), *rest, form("sine"))


# Memory ------------------------------------------------------------------------------------------

LAYERS = [(768, 192, 197), (192, 768, 197), (192, 192, 197), (192, 192, 788), (512, 512, 200)]


def lora(model, targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets)
    return peft.inject_adapter_in_model(config, model)


def ours(model, targets, **fields):
    fields = {"phi": "sine", "omega": 30.0} | fields
    attach(model, targets, AdapterConfig(**fields), torch.Generator().manual_seed(0))
    for _, layer in adapted_layers(model):
        layer.A.data.add_(1e-3)
    return model


def one_layer(k, d):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(d, k)).requires_grad_(False)


def kept_bytes(model, x):
    """Bytes of unique storages that autograd keeps, without x and the parameters."""
    known = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(768, 192, 197), (512, 512, 200)])
def test_no_more_is_kept_than_by_peft_lora(shape, autocast):
    k, d, n = shape
    x = draw(1, n, d).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        theirs = kept_bytes(lora(one_layer(k, d), ["0"]), x)
        assert theirs >= n * 8 * (2 if autocast else 4)
        for phi in BENT:
            mine = kept_bytes(ours(one_layer(k, d), ["0"], phi=phi), x)
            assert mine == (2 * n * d if autocast else 0), "x as it was multiplied, and no more"
            assert mine <= theirs
        assert kept_bytes(ours(one_layer(k, d), ["0"], phi="identity"), x) <= theirs
        assert kept_bytes(ours(one_layer(k, d), ["0"], mode="split"), x) <= theirs


def peak_bytes(run):
    """The most that ``run`` holds at once beyond what there was, from the profiler's ledger."""
    run()  # lazily made state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    assert changes, "the profiler recorded no allocation"
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def test_the_ledger_sees_a_peak():
    def run():
        a = torch.ones(1000, 256)
        b = a + 1
        del a
        return b.sum()

    assert 2 * 1024000 <= peak_bytes(run) < 2.1 * 1024000


@pytest.mark.parametrize("phi", ["sine", "identity"])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_a_layer_peaks_no_higher_than_peft_lora(shape, phi):
    k, d, n = shape
    x, upstream = draw(1, n, d).float().requires_grad_(), draw(2, n, k).float()

    def peak(model):
        wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
        return peak_bytes(lambda: torch.autograd.grad(model(x), wanted, upstream))

    theirs = peak(lora(one_layer(k, d), ["0"]))
    assert peak(ours(one_layer(k, d), ["0"], phi=phi)) <= 1.02 * theirs


class Block(nn.Module):
    """A transformer block of ViT-Ti's widths."""

    def __init__(self, width=192, heads=3):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def small_vit():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(3)), nn.LayerNorm(192), nn.Linear(192, 10))


def test_a_step_peaks_no_higher_than_peft_lora():
    names = {"ffn": ["fc1", "fc2"], "all": ["qkv", "proj", "fc1", "fc2"]}
    x, labels = draw(1, 2, 197, 192).float(), torch.tensor([1, 2])

    def peak(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

        def run():
            F.cross_entropy(model(x).mean(1), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return peak_bytes(run)

    for chosen in names.values():
        theirs = peak(lora(small_vit().requires_grad_(False), chosen))
        mine = peak(ours(small_vit(), [f"*.{name}" for name in chosen]))
        assert mine <= 1.02 * theirs, (chosen, mine / theirs)


@pytest.mark.parametrize("k", [1, 15, 16, 255, 256, 257, 768, 3072, 5000])
@pytest.mark.parametrize("d", [1, 48, 768, 4096])
@pytest.mark.parametrize("tokens", [None, 0, 1, 197, 5000])
def test_blocks_cover_every_row_once(k, d, tokens):
    blocks = bounded_eager.row_blocks(k, d, 4, tokens)
    assert [row for block in blocks for row in range(k)[block]] == list(range(k))
    sizes = [block.stop - block.start for block in blocks]
    limit = max(bounded_eager.BLOCK_BYTES // (4 * d), bounded_eager.MIN_ROWS)
    assert max(sizes) <= limit + 15 and sizes[0] == max(sizes)


# Checkpointing, and the other kernels ------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tiny, reentrant, reuse):
    config = AdapterConfig(rank=2, phi="sine", omega=4.0, mode="split", dropout=0.3)
    grads = []
    for checkpointed in (False, True):
        model = tiny.net().train()
        attach(model, ("blocks.*.mlp.fc*",), config, torch.Generator().manual_seed(0))
        x = draw(1, 7, 8).float().requires_grad_()
        scope = reuse_weights(model) if reuse else torch.enable_grad()
        with torch.random.fork_rng(devices=[]), scope:
            torch.manual_seed(3)
            y = x
            for block in model.blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if checkpointed else block(y)
            y.square().sum().backward()
        grads.append([x.grad, *(la.A.grad for _, la in adapted_layers(model))])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again) and plain.abs().max() > 0


def test_triton_is_asked_where_it_could_run(monkeypatch):
    """The kernels of a GPU replace the eager ones call by call, and get what they were promised."""
    calls = []

    class Kernels:
        DTYPES = (torch.float32,)

        @staticmethod
        def available(tensor):
            return True

        @staticmethod
        def build_weight(weight, update, dtype):
            calls.append("build")
            return bounded_eager.build_weight(weight, update, dtype)

        @staticmethod
        def contract(g, x, update, *, need_A=True, need_Bt=True, room=None):
            calls.append("contract")
            assert g.is_contiguous() and x.is_contiguous() and len(g) and g.dtype == x.dtype
            assert room is not None and room.shape == update.A.shape[:1] + x.shape[1:]
            return bounded_eager.contract(g, x, update)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(bounded_product, "_triton", lambda: Kernels)
    inputs = [t.float().requires_grad_() for t in tensors("sine", "chunked")]
    found = gradients(lambda *a: bounded_linear(*a, form("sine")), inputs)
    assert calls == ["build", "build", "contract"]
    exact = gradients(lambda *a: naive(*a, form("sine")), inputs)
    for mine, theirs in zip(found, exact, strict=True):
        assert distance(mine, theirs) < 1e-5
    calls.clear()
    wide = [t.detach().double().requires_grad_() for t in inputs]
    gradients(lambda *a: bounded_linear(*a, form("sine")), wide)
    assert not calls, "float64 is not theirs"


# The reuse scope ---------------------------------------------------------------------------------


def adapted(tiny, **fields):
    model = tiny.net()
    fields = {"rank": 2, "phi": "sine", "omega": 4.0} | fields
    attach(model, ("blocks.*.mlp.fc*",), AdapterConfig(**fields), torch.Generator().manual_seed(0))
    for index, (_, layer) in enumerate(adapted_layers(model)):
        layer.A.data.copy_(draw(index, *layer.A.shape))
    return model


@pytest.mark.parametrize("mode", ["merged", "split"])
def test_a_scope_builds_once_and_keeps_the_gradients(tiny, builds, mode):
    batches = [draw(seed, 9, 6).float() for seed in range(3)]
    grads = []
    for scope in (torch.enable_grad, None):
        model = adapted(tiny, mode=mode)
        with reuse_weights(model) if scope is None else scope():
            for x in batches:
                model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(builds) == len(set(builds)) == 4, "4 layers, 3 micro-batches"
    for plain, shared in zip(*grads, strict=True):
        torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-6)


def test_a_scope_ends_also_on_an_exception_and_nests(tiny):
    model, x = adapted(tiny), draw(1, 3, 6).float()
    layer = next(adapted_layers(model))[1]
    with reuse_weights(model):
        with reuse_weights(model):
            model(x)
            built = built_weight(layer)
        assert built_weight(layer) is built, "the outer scope goes on"
    assert built_weight(layer) is None
    with pytest.raises(KeyError), reuse_weights(model):
        raise KeyError
    assert built_weight(layer) is None
    before = model(x)
    layer.A.data.mul_(2.0)
    with reuse_weights(model):
        assert not torch.equal(model(x), before), "nothing survives from the scopes before"


def test_a_shared_weight_that_was_overwritten_raises_in_backward(tiny):
    model, x = adapted(tiny), draw(1, 3, 6).float()
    layer = next(adapted_layers(model))[1]
    with reuse_weights(model):
        out = model(x)
        built_weight(layer).mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_step_inside_a_scope_is_refused_where_torch_counts_it(tiny):
    model, x = adapted(tiny), draw(1, 3, 6).float()
    with reuse_weights(model):
        model(x).sum().backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
        with pytest.raises(RuntimeError, match="inside reuse_weights"):
            model(x)


@pytest.mark.parametrize("swap", ["data", "parameter", "functional"])
def test_other_factors_inside_a_scope_are_refused(tiny, swap):
    """As a moving average puts them in, or a functional call: no version is raised."""
    model, x = adapted(tiny), draw(1, 3, 6).float()
    name, layer = next(adapted_layers(model))
    other = {}
    with reuse_weights(model):
        model(x)
        if swap == "data":
            layer.A.data = 2 * layer.A.data
        elif swap == "parameter":
            layer.A = nn.Parameter(2 * layer.A.detach())
        else:
            other = {f"{name}.A": 2 * layer.A.detach()}
        with pytest.raises(RuntimeError, match="inside reuse_weights"):
            torch.func.functional_call(model, other, (x,))


@pytest.mark.parametrize("reuse", [False, True])
def test_buffers_that_are_broadcast_between_forwards_change_nothing(tiny, reuse):
    """DistributedDataParallel writes every buffer anew, with equal values, before a forward."""
    model, x = adapted(tiny, phi="relu"), draw(1, 3, 6).float()
    assert all(layer.start is not None for _, layer in adapted_layers(model))

    def grads(broadcast):
        model.zero_grad()
        with reuse_weights(model) if reuse else torch.enable_grad():
            first = model(x)
            with torch.no_grad():
                for buffer in model.buffers() if broadcast else ():
                    buffer.copy_(buffer.clone())
            (first + model(x)).square().sum().backward()
        return [layer.A.grad.clone() for _, layer in adapted_layers(model)]

    for plain, found in zip(grads(False), grads(True), strict=True):
        assert torch.equal(plain, found) and plain.abs().max() > 0


def test_an_evaluation_may_build_what_training_saves(tiny, builds):
    model, x = adapted(tiny), draw(1, 3, 6).float()
    with reuse_weights(model):
        with torch.inference_mode():
            seen = model(x)
        out = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        out.sum().backward()
    torch.testing.assert_close(seen.clone(), out.detach())
    assert len(builds) == 8, "one more per layer for the other precision"


def test_threads_share_a_scope(tiny, builds):
    model, x = adapted(tiny), draw(1, 3, 6).float()
    expected, outputs = model(x).detach(), []

    def work():
        with reuse_weights(model), torch.no_grad():
            outputs.append(model(x))

    with reuse_weights(model):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outputs) == 4 and len(builds) == 4
    for out in outputs:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_models_without_a_bend_need_no_scope(tiny, builds):
    x = draw(1, 3, 6).float()
    for model in (tiny.net(), adapted(tiny, phi="identity")):
        before = model(x)
        with reuse_weights(model):
            assert torch.equal(model(x), before)
    assert not builds
