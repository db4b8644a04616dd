"""The kinds of statements in random programs: each function returns a statement over existing variables, or raises
NotHere.

`d` is the author (`draw.Author`), which has the variables so far and the random number generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

INT_NAMES = ("I8", "I16", "I32", "I64", "U8")
CASTS = {"F32": 5, "F16": 3, "BF16": 4, "F64": 1, "I64": 1, "I32": 1, "U8": 0.4, "I8": 0.4, "I16": 0.4, "BOOL": 0.5}
STATEMENTS: dict[str, tuple[float, Callable[[Any], str]]] = {}


class NotHere(Exception):
    """No variable fits this kind of statement."""


def statement(weight: float) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    def register(function: Callable[[Any], str]) -> Callable[[Any], str]:
        STATEMENTS[function.__name__] = (weight, function)
        return function

    return register


def forms(text: str) -> list[str]:
    """Split a table of expressions at bars and line ends."""
    return [form.strip() for line in text.strip().splitlines() for form in line.split("|")]


UNARY = forms(
    """
    {x}.sin()|{x}.cos()|{x}.tanh()|{x}.sigmoid()|{x}.clamp(max=3.03).exp()|({x}.abs() + 0.5).log()|{x}.abs().sqrt()
    ({x}.abs() + 0.25).rsqrt()|{x}.relu()|F.gelu({x})|F.gelu({x}, approximate='tanh')|F.silu({x})|F.mish({x})
    F.softplus({x})|F.elu({x})|F.leaky_relu({x}, 0.1)|F.hardtanh({x}, -1.07, 0.93)|F.hardswish({x})
    F.hardsigmoid({x})|{x}.erf()|{x}.abs().log1p()|{x}.clamp(-2.02, 2.03).expm1()|({x} + 0.013).floor()
    ({x} + 0.011).ceil()|({x} + 0.007).round()|({x} - 0.012).trunc()|{x}.abs()|-{x}|{x}.sign()|{x}.square()
    1 / ({x}.abs() + 0.5)|{x}.clamp(-0.91, 0.93).asin()|{x}.atan()|{x}.clamp(-2.1, 2.1).sinh()
    {x}.nan_to_num(0.5, 2.0, -2.0)|F.logsigmoid({x})|F.softsign({x})|F.tanhshrink({x})|{x}.clamp(-0.81, 0.83).erfinv()
    F.hardshrink({x}, 0.43)|F.softshrink({x}, 0.27)|F.threshold({x}, 0.17, -0.5)|F.relu6({x})|{x}.asinh()
    ({x}.abs() + 1.1).acosh()|{x}.clamp(-0.9, 0.9).atanh()|({x}.abs() + 0.6).lgamma()|{x}.sigmoid().logit(1e-3)
    {x}.deg2rad()|{x}.abs().pow(1.5)|{x} ** 3|{x}.pow(2)|{x} * 0.5|{x} + 1|2 - {x}|{x} / 3|{x}.sgn()
    {x}.exp2().clamp(max=9.0)|{x}.cosh().clamp(max=20.0)|F.celu({x}, 1.3)|F.selu({x})|F.rrelu({x}, 0.2, 0.2)
    {x}.frac()|{x}.erfc()|F.normalize({x}, dim=-1)|({x}.abs() + 0.5).log2()|({x}.abs() + 0.5).log10()|{x}.sinc()
    torch.special.i0({x}.clamp(-3, 3))|{x}.tan().clamp(-5, 5)|torch.special.xlog1py({x}, {x}.abs())
    torch.special.entr({x}.abs() + 0.1)|torch.special.ndtr({x})|torch.logit({x}.sigmoid())
    """
)
BINARY = forms(
    """
    {x} + {y}|{x} - {y}|{x} * {y}|{x} / ({y}.abs() + 0.5)|torch.maximum({x}, {y})|torch.minimum({x}, {y})
    torch.add({x}, {y}, alpha=2)|torch.fmod({x}, {y}.abs() + 0.7)|torch.remainder({x}, {y}.abs() + 0.7)
    torch.atan2({x}, {y} + 0.1)|torch.hypot({x}, {y})|torch.copysign({x}, {y})|torch.where({x} > {y}, {x}, {y})
    torch.lerp({x}, {y}, 0.3)|torch.addcmul({x}, {x}, {y}, value=0.5)|torch.addcdiv({x}, {y}, {y}.abs() + 1, value=2)
    torch.clamp({x}, min={y})|torch.fmax({x}, {y})|torch.fmin({x}, {y})|({x}.abs() + 0.5) ** {y}.clamp(-1, 2)
    torch.xlogy({x}, {y}.abs() + 0.5)|torch.sub({x}, {y}, alpha=0.5)|{y} - {x}|torch.logaddexp({x}, {y})
    torch.logaddexp2({x}, {y})|torch.div({x}, {y}.abs() + 0.53, rounding_mode='floor')
    torch.heaviside({x}.detach(), {y}.detach())
    torch.div({x}, {y}.abs() + 0.53, rounding_mode='trunc')|torch.rsub({x}, {y})|torch.where({y} > 0.0131, {x}, 0.0)
    F.smooth_l1_loss({x}, {y}.expand_as({x}), reduction='none')|F.mse_loss({x}, {y}.expand_as({x}), reduction='none')
    F.huber_loss({x}, {y}.expand_as({x}), reduction='none', delta=0.7)|torch.clip({x}, {y} - 1, {y} + 1)
    F.prelu({x}, {x}.flatten()[:1].detach().to({x}.dtype))|torch.ldexp({x}, {y}.clamp(-2, 2).to(I32))
    F.binary_cross_entropy_with_logits({x}, {y}.expand_as({x}).sigmoid().to({x}.dtype), reduction='none')
    torch.float_power({x}.abs() + 0.3, 1.5)|torch.dist({x}, {y})
    """
)
INTEGER = forms(
    """
    {x} + 1|{x} * 3|{x} // 2|{x} % 3|-{x}|{x} - {y}|{x} * {y}|{x} & 3|torch.bitwise_or({x}, 4)|{x} ^ {y}|{x} << 1
    {x} >> 1|~{x}|{x}.abs()|{x}.sign()|torch.maximum({x}, {y})|torch.remainder({x}, 5)|torch.fmod({x}, 4)
    torch.div({x}, 3, rounding_mode='floor')|torch.div({x}, -2, rounding_mode='trunc')|{x}.clamp(-2, 5)
    torch.where({x} > {y}, {x}, {y})|{x} * 0.5|{x} / 2|{x}.pow(2)|torch.bitwise_left_shift({x}, 2)|{x} + 1.5|{x}.sum()
    {x}.cumsum(0)|{x}.amax()|{x}.prod(-1)|torch.gcd({x}, {y})|{x}.float().mean()|{x} == {y}|{x} < {y}|{x} >= 1
    {x}.flip(0)|{x} ** 2|{x}.square().sum(-1)|{x}.sort(-1).values|{x}.cummax(0).values|{x}.argmax()
    """
)
REDUCTION = forms(
    """
    {x}.sum({d}{k})|{x}.mean({d}{k})|{x}.amax({d}{k})|{x}.amin({d}{k})|{x}.var({d}{k})|{x}.std({d}, correction=0{k})
    {x}.norm(dim={d}{k})|{x}.logsumexp({d}{k})|{x}.softmax({d})|{x}.log_softmax({d})|{x}.sum()|{x}.mean()|{x}.max()
    {x}.min()|{x}.var()|{x}.max({d}{k}).values|{x}.min({d}{k})[0]|{x}.argmax({d}{k})|{x}.argmin({d}{k})|{x}.argmax()
    torch.var_mean({x}, {d}{k})[0]|{x}.abs().clamp(0.5, 1.5).prod({d}{k})|{x}.nansum({d}{k})|{x}.mean({d}).sum()
    torch.aminmax({x}, dim={d}{k}).max|{x}.count_nonzero({d})|{x}.sum({d}, dtype=F32{k})|{x}.softmax({d}, dtype=F32)
    {x}.norm(p=1, dim={d}{k})|{x} - {x}.mean({d}, keepdim=True)|{x} - {x}.amax({d}, keepdim=True)|{x}.sum(({d},){k})
    {x}.median({d}{k}).values|torch.linalg.vector_norm({x}, 3, {d}{k})|{x}.flatten().mean(0)|{x}.nanmean({d}{k})
    torch.cdist({x}, {x})
    """
)
SCAN = forms(
    """
    {x}.cumsum({d})|{x}.clamp(-1.1, 1.1).cumprod({d})|{x}.cummax({d}).values|{x}.cummin({d})[0]|{x}.cummax({d}).indices
    {x}.logcumsumexp({d})|{x}.sort({d}).values|{x}.sort({d}, descending=True)[1]|{x}.argsort({d}, stable=True)
    {x}.topk(1, {d}).values|{x}.diff(dim={d})|{x}.flip({d}).cumsum({d})|{x}.kthvalue(1, {d}).values
    {x}.topk(min(2, {x}.shape[{d}]), {d}, largest=False)[1]
    """
)
REARRANGED = forms(
    """
    torch.cat(({x}, {y}), {d})|torch.stack(({x}, {y}), {d})|torch.cat(({x}, {x}[:1], {y}))|{x}.roll(1, {d})
    {x}.flip({d})|{x}.repeat_interleave(2, {d})|{x}.tile(2)|{x}.clone()|F.pad({x}, (1, 2))|F.pad({x}, (0, 1), value=0.5)
    {x}.unsqueeze(0).repeat(2, *[1] * {x}.ndim)|F.pad({x}, (-1, 1))|torch.hstack(({x}, {y}))|torch.atleast_3d({x})
    torch.cat(({y}, {x}), {d}).narrow({d}, 1, {x}.shape[{d}])|F.pad({x}.unsqueeze(0), (1, 1), mode='replicate')
    F.pad({x}.unsqueeze(0), (1, 0), mode='reflect')|F.pad({x}.unsqueeze(0), (1, 1), mode='circular')
    """
)
CREATED = forms(
    """
    torch.arange({x}.shape[0], device=DEVICE)|torch.ones_like({x})|torch.zeros_like({x}, dtype=F32)|{x}.new_ones(3)
    torch.full_like({x}, 2)|torch.eye({x}.shape[0], device=DEVICE)|{x}.new_zeros({x}.shape)
    torch.linspace(-1, 1, {x}.shape[-1], device=DEVICE)|torch.tensor([1.0, -2.0, 0.5], device=DEVICE)
    torch.arange({x}.numel(), device=DEVICE).view({x}.shape) * 0.25|torch.empty_like({x}).fill_(1.5)
    F.one_hot(torch.arange({x}.shape[0], device=DEVICE) % 3, 3)|torch.tensor(0.5, device=DEVICE)
    torch.full((), 0.75, device=DEVICE)|torch.tril_indices(3, 3, device=DEVICE)[0]
    """
)
BOOLEAN = forms(
    """
    {x} & {y}|torch.bitwise_or({x}, {y})|{x} ^ {y}|~{x}|{x}.any()|{x}.all(-1)|{x}.sum(-1)|{x}.long()|{x}.float().mean()
    torch.logical_xor({x}, {y})|{x}.cumsum(-1)|{x} + 1|{x} * 0.5
    """
)
FUNCTIONS = forms(
    """
    vmap(lambda p: {p})({x})|vmap(lambda p, q: {pq})({x}, {y})|vmap(lambda p: {p}, in_dims=-1, out_dims=-1)({x})
    grad(lambda p: ({p}).sum())({x})|grad(lambda p, q: ({pq}).sum(), argnums=1)({x}, {y})
    vmap(grad(lambda p: ({p}).sum()))({x})|vjp(lambda p: {p}, {x})[1]({y})[0]|jvp(lambda p: {p}, ({x},), ({y},))[1]
    vmap(lambda p: p - p.mean())({x})|vmap(lambda p: p.sum(-1) * p.amax())({x})|jacrev(lambda p: ({p}).sum())({x})
    jacfwd(lambda p: ({p}).sum())({x})|vmap(Cubed.apply)({x})|vmap(lambda p: torch.where(p > 0.0131, p, -p))({x})
    hessian(lambda p: (p ** 3).sum())({x}.flatten()[:4])|vmap(vmap(lambda p: {p}))({x})
    vmap(lambda p: p + {x}.sum())({x})
    """
)
PRODUCTS = {
    1: forms("torch.dot({x}, {x})|torch.outer({x}, {x})|torch.einsum('i,j->ij', {x}, {x}).tril()"),
    2: forms(
        """
        {x} @ {x}.t()|torch.mm({x}.t(), {x}) * 0.1|torch.addmm({x} @ {x}.t(), {x}, {x}.t(), beta=0.5)
        torch.einsum('ij,kj->ik', {x}, {x})|torch.einsum('ij,ij->i', {x}, {x})|torch.mv({x}, {x}[0])
        F.conv1d({x}.unsqueeze(0), {x}.unsqueeze(0)[:, :, :1])|F.layer_norm({x}, {x}.shape[1:])
        F.scaled_dot_product_attention(*[{x}[None, None]] * 3)|F.rms_norm({x}, {x}.shape[1:], eps=1e-5)
        F.cross_entropy({x}, torch.arange({x}.shape[0], device=DEVICE) % {x}.shape[1])
        F.cosine_similarity({x}, {x}.flip(0), dim=1)|F.glu(torch.cat(({x}, {x}), 1))|torch.outer({x}[0], {x}[:, 0])
        F.batch_norm({x}, None, None, training=True)
        F.kl_div({x}.log_softmax(1), {x}.softmax(1).detach(), reduction='batchmean')
        """
    ),
    3: forms(
        """
        torch.bmm({x}, {x}.mT)|F.max_pool1d({x}, min(2, {x}.shape[-1]))|F.avg_pool1d({x}, min(2, {x}.shape[-1]))
        F.interpolate({x}, scale_factor=2)|F.group_norm({x}, 1)|F.adaptive_avg_pool1d({x}, 2)|F.instance_norm({x})
        F.interpolate({x}.unsqueeze(0), scale_factor=2, mode='bilinear')|F.pixel_shuffle({x}.repeat(4, 1, 1), 2)
        F.max_pool2d({x}, (2, 1))|F.avg_pool2d({x}, (1, 2), ceil_mode=True)
        """
    ),
}
CHANGED_FLOATS = forms(
    """
    .add_(1)|.mul_(0.5)|.neg_()|.zero_()|.fill_(0.25)|.clamp_(-1.02, 1.03)|.sin_()|.relu_()|.sigmoid_()|.square_()
    .add_({y})|.mul_({y})|.sub_({y}, alpha=0.5)|.copy_({y})|.copy_({z})|.masked_fill_({t} > 0.0131, 0.5)
    .add_({t}.amax())|.addcmul_({t}, {t})|.tanh_()|.div_(3)|.lerp_({t} * 2, 0.3)|.cumsum_(0)|.round_()|.pow_(2)|.exp_()
    .index_fill_(0, torch.tensor([0], device=DEVICE), 2)|.sub_({t}.mean())
    .index_add_(0, torch.tensor([0, 0], device=DEVICE), {t}[:1].expand(2, *{t}.shape[1:]) * 1)
    .index_put_((torch.tensor([0, -1], device=DEVICE),), {t}[:1] * 2)
    .scatter_(0, torch.zeros_like({t}, dtype=I64), 0.75)
    """
)
CHANGED_BOOLEANS = forms(".logical_not_()|.zero_()|.fill_(True)|.copy_({z})|.logical_or_({t})")
CHANGED_INTEGERS = forms(
    """
    .add_(1)|.mul_(2)|.zero_()|.add_({y})|.copy_({z})|.remainder_(3)|.clamp_(0, 4)|.bitwise_and_(3)|.neg_()
    .index_fill_(0, torch.tensor([0], device=DEVICE), 2)
    """
)
INDICES = ("0", "-1", "1:", "::2", "..., 0", "..., ::2", "..., -1:", ":", "torch.tensor([0, -1], device=DEVICE)")


@statement(10)
def unary(d: Any) -> str:
    x = d.floating()
    text = d.choice(UNARY)
    for _ in range(d.choice((0, 0, 1))):
        text = d.choice(UNARY).replace("{x}", f"({text})") if text.count("{x}") == 1 else text
    return f"{d.new()} = {text.format(x=x)}"


@statement(9)
def binary(d: Any) -> str:
    x = d.floating()
    return f"{d.new()} = {d.choice(BINARY).format(x=x, y=d.fitting(x, floats=True))}"


@statement(2)
def mixed_types(d: Any) -> str:
    x = d.tensor()
    return f"{d.new()} = {x} {d.choice('+-*')} {d.fitting(x)}"


@statement(4)
def integers(d: Any) -> str:
    x = d.integer()
    return f"{d.new()} = {d.choice(INTEGER).format(x=x, y=d.fitting(x, ints=True))}"


@statement(2)
def scalars(d: Any) -> str:
    x = d.floating()
    operation = d.choice(("+", "-", "*"))
    if d.random.random() < 0.5 and d.value(x).ndim:
        return f"{d.new()} = {x} {operation} {x}.shape[{d.dim(x)}]"
    return f"{d.new()} = {x} {operation} {d.constant()}"


@statement(3)
def compare(d: Any) -> str:
    x = d.floating()
    if d.random.random() < 0.4:
        return f"{d.new()} = {x} {d.choice(('>', '<', '>=', '<=', '==', '!='))} {d.fitting(x, floats=True)}"
    tests = ("> 0.0131", "<= -0.243", "!= 0", "== 0", ".isnan()", ".isinf()", ".bool()", ".isfinite()", ".signbit()")
    test = d.choice(tests)
    return f"{d.new()} = {x}{test if test[0] == '.' else ' ' + test}"


@statement(2)
def booleans(d: Any) -> str:
    x = d.boolean()
    return f"{d.new()} = {d.choice(BOOLEAN).format(x=x, y=d.fitting(x, bools=True))}"


@statement(5)
def cast(d: Any) -> str:
    x = d.tensor()
    form = d.weighted(CASTS)
    if form in INT_NAMES and d.value(x).dtype.is_floating_point:
        x = f"({x} * 3.03).clamp(-9, 9)" if form != "U8" else f"({x}.abs() * 3.03).clamp(max=9)"
    return f"{d.new()} = {x}.to({form})"


@statement(6)
def reduction(d: Any) -> str:
    x = d.floating(dims=1)
    return f"{d.new()} = {d.choice(REDUCTION).format(x=x, d=d.dim(x), k=d.choice(('', ', keepdim=True')))}"


@statement(3)
def scan(d: Any) -> str:
    x = d.floating(dims=1)
    return f"{d.new()} = {d.choice(SCAN).format(x=x, d=d.dim(x))}"


def view_of(d: Any, x: str) -> str:
    """Return an expression for a view of `x`, or for a copy where `reshape` and similar functions must copy."""
    value = d.value(x)
    if not value.ndim:
        return d.choice((f"{x}.unsqueeze(0)", f"{x}.expand(2, 3)", f"{x}.view(1, 1)", f"{x}.reshape(1)"))
    dim, other = d.dim(x), d.dim(x)
    size = value.shape[dim]
    n = f"{x}.shape[{dim}]"
    forms = [
        f"{x}.transpose({dim}, {other})",
        f"{x}.movedim({dim}, {other})",
        f"{x}.unsqueeze({dim})",
        f"{x}.reshape(-1)",
        f"{x}.flatten()",
        f"{x}.select({dim}, {d.random.randrange(-1, 2)})",
        f"{x}[{':, ' * dim}{d.choice(('1:', ':-1', '::2', '-2:', '1::2', ':1', 'None', '0', '-1', '...'))}]",
        f"{x}.narrow({dim}, {size // 3}, {max(1, size // 2)})",
        f"{x}.narrow({dim}, 0, {n} // 2)" if size > 1 else f"{x}.squeeze({dim})",
        f"{x}.unfold({dim}, {min(2, size)}, {d.choice((1, 2))})",
        f"{x}.chunk(2, {dim})[{d.choice((0, 0, -1))}]",
        f"{x}.split({max(1, size // 2)}, {dim})[{d.choice((0, -1))}]",
        f"{x}.unbind({dim})[{d.choice((0, -1))}]",
        f"{x}.unsqueeze({dim}).expand({'-1, ' * dim}2{', -1' * (value.ndim - dim)})",
        f"{x}.view(-1, {n})" if dim == value.ndim - 1 else f"{x}.flatten(0, 1)",
        f"{x}.T" if value.ndim == 2 else f"{x}.permute({', '.join(map(str, reversed(range(value.ndim))))})",
        f"{x}.contiguous()",
        f"{x}.swapaxes({dim}, {other}).contiguous()",
        f"{x}.view_as({x})",
        f"{x}.detach()",
        f"{x}[()]",
    ]
    if value.ndim > 1:
        forms += [f"{x}.diagonal()", f"{x}.diagonal(1, 0, -1)", f"{x}.flatten({value.ndim - 2})", f"{x}.mT"]
    if size % 2 == 0 and size:
        forms += [f"{x}.unflatten({dim}, (2, {n} // 2))", f"{x}.unflatten({dim}, (-1, 2))"]
    if 3 < value.numel() < 500 and d.random.random() < 0.7:
        forms += [as_strided_of(d, x)] * 2
    if value.dtype in (torch.float32, torch.int32) and d.random.random() < 0.1:
        forms += [f"{x}.view(I32)", f"{x}.contiguous().view(I32)"]
    return d.choice(forms)


def as_strided_of(d: Any, x: str) -> str:
    n = d.value(x).untyped_storage().nbytes() // d.value(x).element_size()
    shape, stride, offset = d.choice(
        (
            ((n // 2,), (2,), n % 2),
            ((2, max(n // 2, 1)), (max(n // 2, 1), 1), 0),
            ((n // 3 + 1, 2), (2, 1), 0),
            ((2, n // 4 + 1), (1, 2), 1),
            ((n - 1,), (1,), 1),
            ((3, 2), (1, 1), 0),
        )
    )
    return f"{x}.as_strided({shape}, {stride}, {offset})"


@statement(14)
def view(d: Any) -> str:
    x = d.tensor()
    text = view_of(d, x)
    return f"{d.new()} = {text}"


@statement(3)
def rearrange(d: Any) -> str:
    x = d.tensor(dims=1)
    flat = ["{x}.tril()", "{x}.triu(1)", "{x}.tril(-1)", "torch.rot90({x})", "{x}.transpose(0, 1).contiguous()"]
    kinds = REARRANGED + (flat if d.value(x).ndim > 1 else [])
    return f"{d.new()} = {d.choice(kinds).format(x=x, y=d.same_shape(x), d=d.dim(x))}"


def places(d: Any, size: str, n: int, distinct: bool = False) -> str:
    """Return an expression for a tensor of `n` (a number or an expression) indices below `size` (an expression)."""
    step = d.choice((1, 5, 7))
    if distinct:
        return d.choice((f"torch.arange({size} - 1, -1, -1, device=DEVICE)", f"torch.arange({size}, device=DEVICE)"))
    if d.random.random() < 0.5:
        try:
            x = d.integer()
            if d.value(x).dtype in (torch.int64, torch.int32) and d.value(x).numel():
                return f"{x}.flatten().remainder({size})[:{n}]"
        except NotHere:
            pass
    return f"torch.arange({n}, device=DEVICE) * {step} % {size}"


@statement(6)
def gathers(d: Any) -> str:
    x = d.tensor(dims=1)
    dim = d.dim(x)
    n = f"{x}.shape[{dim}]"
    where = places(d, n, d.choice((2, 3, 4)))
    every = f"(torch.arange({x}.numel(), device=DEVICE).reshape({x}.shape) * {d.choice((1, 3, 5))} % {n})"
    forms = [
        f"{x}.index_select({dim}, {where})",
        f"{x}.gather({dim}, {every})",
        f"{x}.gather({dim}, {every}.narrow({dim}, 0, 1))",
        f"{x}[{':, ' * dim}{where}]",
        f"{x}[torch.tensor([0, -1, 0], device=DEVICE)]",
        f"torch.take_along_dim({x}, {every}, {dim})",
        f"{x}.take({places(d, f'{x}.numel()', 4)})",
    ]
    if d.value(x).ndim == 2:
        forms += [f"F.embedding({places(d, f'{x}.shape[0]', 3)}, {x})"] * 3
        forms += [f"F.embedding({places(d, f'{x}.shape[0]', 3)}.view(1, -1), {x}, padding_idx=0)"]
        forms += [f"{x}[{places(d, f'{x}.shape[0]', 2)}[:, None], {places(d, f'{x}.shape[1]', 2)}[:2]]"]
        forms += [f"F.embedding_bag({places(d, f'{x}.shape[0]', 4)}.view(1, -1), {x}, mode='sum')"]
    return f"{d.new()} = {d.choice(forms)}"


@statement(6)
def scatters(d: Any) -> str:
    x = d.tensor(dims=1)
    dim = d.dim(x)
    n = f"{x}.shape[{dim}]"
    shape = f"{x}.shape"
    y = d.same_shape(x)
    y = f"{y}.to({x}.dtype)" if d.value(y).dtype != d.value(x).dtype else y
    every = f"(torch.arange({x}.numel(), device=DEVICE).reshape({shape}) * {d.choice((1, 3))} % {n})"
    along = ", ".join("-1" if axis == dim else "1" for axis in range(d.value(x).ndim))
    own = f"torch.arange({n}, device=DEVICE).flip(0).view({along}).expand({shape})"
    reduce = d.choice(("sum", "amax", "amin", "mean", "prod"))
    forms = [
        f"{x}.scatter_add({dim}, {every}, {y})",
        f"{x}.scatter({dim}, {own}, {y})",
        f"{x}.scatter({dim}, {every}, 0.5)" if d.value(x).is_floating_point() else f"{x}.scatter({dim}, {every}, 1)",
        f"{x}.scatter_reduce({dim}, {every}, {y}, '{reduce}', include_self={d.choice((True, False))})",
        f"{x}.index_add({dim}, {places(d, n, 1)}[:1], {y}.narrow({dim}, 0, 1))",
        f"{x}.index_add({dim}, {places(d, n, n)}, {y})"
        if d.random.random() < 0.5
        else f"{x}.index_fill({dim}, {places(d, n, 2)}, 1)",
        f"{x}.index_copy({dim}, {places(d, n, n, distinct=True)}, {y})",
        f"torch.index_put({x}, ({places(d, f'{x}.shape[0]', 3)},), {y}[:1], accumulate={d.choice((True, False))})",
        f"torch.select_scatter({x}, {y}.select({dim}, 0), {dim}, 1)",
        f"torch.slice_scatter({x}, {y}.narrow({dim}, 0, 1), {dim}, -1)",
        f"{x}.masked_fill({x} > 0.0131, 0.5)" if d.value(x).is_floating_point() else f"{x}.masked_fill({x} > 1, 1)",
        f"{x}.masked_scatter({x} > 0, {y})",
        f"torch.where({x} > 0, {y}, {x})",
    ]
    if d.value(x).ndim > 1:
        forms += [f"torch.diagonal_scatter({x}, {y}.diagonal())"]
    if d.random.random() < 0.3:
        forms += [f"torch.as_strided_scatter({x}.contiguous(), {y}.flatten()[:2], (2,), (1,), 1)"]
    if d.random.random() < 0.15:  # another dtype
        z = d.same_shape(x)
        forms += [f"torch.select_scatter({x}, {z}.select({dim}, 0), {dim}, 0)"] * 3
    return f"{d.new()} = {d.choice(forms)}"


@statement(13)
def change(d: Any) -> str:
    """Return a statement that changes a tensor in place, directly or through a view."""
    x = d.changeable()
    value = d.value(x)
    floats = value.is_floating_point()
    if value.ndim and d.random.random() < 0.25:
        index = d.choice(INDICES)
        part = f"{x}[{index}]"
        if d.random.random() < 0.2:
            return f"{x}[{x} > {0.0131 if floats else 1}] = {d.choice((1, 0.5, -2))}"
        if d.random.random() < 0.4:
            return f"{part} {d.choice(('+=', '*=', '-='))} {d.choice((1, 2, part, f'{x}.sum()'))}"
        return f"{part} = {d.choice((1, 2, f'{part} * 2', f'{part}.flip(0)', f'{x}.flip(0)[{index}]'))}"
    target = view_of(d, x) if d.random.random() < 0.6 else x
    if floats:
        y, kinds = d.fitting(x, floats=True), CHANGED_FLOATS
    elif value.dtype == torch.bool:
        y, kinds = x, CHANGED_BOOLEANS
    else:
        y, kinds = d.fitting(x, ints=True), CHANGED_INTEGERS
    form = d.choice(kinds).format(t=f"({target})" if target != x else x, y=y, z=d.fitting(x))
    if d.random.random() < 0.2:  # in-place methods return the tensor itself
        return f"{d.new()} = {target}{form}"
    return f"{target}{form}"


@statement(3)
def product(d: Any) -> str:
    x = d.floating(dims=1)
    w = d.fitting_matrix(x)
    kinds = [f"{x} @ {w}", f"torch.matmul({x}, {w}).relu()", f"F.linear({x}, {w}.mT)"]
    return f"{d.new()} = {d.choice(kinds + PRODUCTS.get(d.value(x).ndim, [])).format(x=x)}"


@statement(2)
def create(d: Any) -> str:
    return f"{d.new()} = {d.choice(CREATED).format(x=d.tensor(dims=1))}"


@statement(2)
def conditional(d: Any) -> str:
    x = d.floating()
    y = d.same_shape(x, same_dtype=True)
    yes, no = (d.choice(UNARY[:12]).format(x="p") for _ in range(2))
    test = d.choice(
        (f"{x}.sum() > 0.0131", f"{x}.numel() > 20", f"({x} > 0.512).any()", f"{x}.detach().flatten()[0] < 0.131")
    )
    if d.random.random() < 0.3:
        return f"{d.new()} = {x} * 2 if {test} else {y} + 1"
    return f"{d.new()} = cond({test}, lambda p, q: ({yes}) + q, lambda p, q: ({no}) - q * 2, ({x} * 1, {y} * 1))"


@statement(0.7)
def loop(d: Any) -> str:
    x = d.floating()
    if d.random.random() < 0.5:
        a = d.new()
        return f"{a} = {x}\nfor step in range(3):\n    {a} = {a} * 0.5 + step"
    body = "lambda i, s: (i + 1, s * 0.5 + i)"
    start = f"(torch.zeros((), dtype=I64, device=DEVICE), {x}.detach().clone())"
    return f"{d.new()} = while_loop(lambda i, s: i < 3, {body}, {start})[1]"


@statement(1)
def breaks(d: Any) -> str:
    x = d.floating()
    return d.choice(
        (
            "torch._dynamo.graph_break()",
            f"{d.new()} = {x} * (2 if float({x}.detach().sum()) > 0.1371 else -1)",
            f"with torch.no_grad():\n    {d.new()} = {x} * 2",
            f"{d.new()} = {x}.detach().clone()",
        )
    )


@statement(0.7)
def automatic_precision(d: Any) -> str:
    x = d.floating(dims=1)
    w = d.fitting_matrix(x)
    return f"with torch.autocast(DEVICE, dtype=BF16):\n    {d.new()} = F.gelu({x} @ {w})"


@statement(3)
def functions(d: Any) -> str:
    """torch.func"""
    x = d.floating(dims=1)
    y = d.same_shape(x, same_dtype=True)
    p, pq = d.choice(UNARY[:40]).format(x="p"), d.choice(BINARY[:20]).format(x="p", y="q")
    return f"{d.new()} = {d.choice(FUNCTIONS).format(x=x, y=y, p=p, pq=pq)}"


@statement(2)
def custom(d: Any) -> str:
    x = d.floating()
    y = d.same_shape(x, same_dtype=True)
    forms = (f"Cubed.apply({x})", f"Straight.apply({x} + 0.0131, 4)")
    if d.random.random() < 0.4:
        y = f"{y} * 1" if y == x else y  # torch 2.11 loses a gradient where one tensor is given twice
        at = d.choice((0, 0, 1, 2))
        return f"{d.new()} = Both.apply({x}, {y})[{at}]"
    return f"{d.new()} = {d.choice(forms)}"


@statement(0.5)
def random_numbers(d: Any) -> str:
    kinds = forms(
        "F.dropout({x}, 0.4)|torch.rand_like({x})|{x} + torch.randn_like({x}) * 0.1|torch.bernoulli({x}.sigmoid())"
    )
    return f"{d.new()} = {d.choice(kinds).format(x=d.floating())}"


@statement(3)
def checkpointed(d: Any) -> str:
    """Return a function of a few statements, some of them nested checkpoints, and its checkpointed call."""
    return d.block(2 + d.random.randrange(4))
