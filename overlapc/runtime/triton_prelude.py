"""Device functions that generated Triton kernels call as `ops.…`, with torch's semantics where Triton has no such op.

Reductions and scans take a tile `[x, r]` and run along axis 1, keeping it. Nothing here uses
`triton.language.standard`, so that the same source also runs in Triton's interpreter (see triton_interpreter.py).
"""

# ruff: noqa: RET505 - Triton drops a branch that is not taken, but would compile the code after an `if` without `else`.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

pipelined = tl.range  # under this name triton_interpreter.py replaces it: the interpreter's `tl.range` fails


@triton.jit
def maximum(a, b):
    """Return the larger one; NaN if either float is NaN, as in torch.maximum."""
    if a.dtype.is_floating():
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    """Return the smaller one; NaN if either float is NaN, as in torch.minimum."""
    if a.dtype.is_floating():
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b)


@triton.jit
def fma(a, b, c):
    """Return a * b + c with one rounding; no other code is contracted (runtime/triton_binary.py)."""
    return tl.fma(a, b, c)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def _first_largest(a, i, b, j):
    a_wins = (a > b) | ((a != a) & (b == b))
    same = (a == b) | ((a != a) & (b != b))
    keep = a_wins | (same & (i < j))
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def _first_smallest(a, i, b, j):
    a_wins = (a < b) | ((a != a) & (b == b))
    same = (a == b) | ((a != a) & (b != b))
    keep = a_wins | (same & (i < j))
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def reduce_sum(v):
    return tl.reduce(v, 1, add, keep_dims=True)


@triton.jit
def reduce_prod(v):
    return tl.reduce(v, 1, multiply, keep_dims=True)


@triton.jit
def row_sum(v):
    """Return the sum of each row, as a tile without axis 1."""
    return tl.reduce(v, 1, add)


@triton.jit
def row_max(v):
    return tl.reduce(v, 1, maximum)


@triton.jit
def total_sum(v):
    return tl.reduce(v, 0, add, keep_dims=True)


@triton.jit
def total_prod(v):
    return tl.reduce(v, 0, multiply, keep_dims=True)


@triton.jit
def reduce_max(v):
    return tl.reduce(v, 1, maximum, keep_dims=True)


@triton.jit
def reduce_min(v):
    return tl.reduce(v, 1, minimum, keep_dims=True)


@triton.jit
def reduce_argmax(v, i):
    """Return (largest, its position): the first one on ties; NaN counts as larger than all numbers."""
    return tl.reduce((v, i), 1, _first_largest, keep_dims=True)


@triton.jit
def reduce_argmin(v, i):
    """Return (smallest, its position): the first one on ties; NaN counts as smaller than all numbers."""
    return tl.reduce((v, i), 1, _first_smallest, keep_dims=True)


@triton.jit
def log_add_exp(a, b):
    """Return log(exp(a) + exp(b)); NaN if either is NaN."""
    low, high = minimum(a, b), maximum(a, b)
    same = (low == high) & (tl.abs(low) == float("inf"))
    return tl.where(same, low, high + libdevice.log1p(libdevice.exp(low - high)))


@triton.jit
def later_max(a, b):
    """Return the larger of two elements, the second on ties (such as zeros of both signs); NaN if either is NaN."""
    return tl.where((b != b) | (b >= a), b, a)


@triton.jit
def later_min(a, b):
    """Return the smaller of two elements, the second on ties (such as zeros of both signs); NaN if either is NaN."""
    return tl.where((b != b) | (b <= a), b, a)


@triton.jit
def later_largest(a, i, b, j):
    """Return the larger of two elements and its position: the second one on ties; NaN counts as larger than numbers."""
    later = (b != b) | ((b >= a) & (a == a))
    return tl.where(later, b, a), tl.where(later, j, i)


@triton.jit
def later_smallest(a, i, b, j):
    """Return the smaller of two elements and its position: the second on ties; NaN counts as smaller than numbers."""
    later = (b != b) | ((b <= a) & (a == a))
    return tl.where(later, b, a), tl.where(later, j, i)


@triton.jit
def _last_largest(a, i, b, j):
    b_wins = (b > a) | ((b != b) & (a == a))
    same = (a == b) | ((a != a) & (b != b))
    keep = b_wins | (same & (j > i))
    return tl.where(keep, b, a), tl.where(keep, j, i)


@triton.jit
def _last_smallest(a, i, b, j):
    b_wins = (b < a) | ((b != b) & (a == a))
    same = (a == b) | ((a != a) & (b != b))
    keep = b_wins | (same & (j > i))
    return tl.where(keep, b, a), tl.where(keep, j, i)


@triton.jit
def reduce_last_max(v):
    return tl.reduce(v, 1, later_max, keep_dims=True)


@triton.jit
def reduce_last_min(v):
    return tl.reduce(v, 1, later_min, keep_dims=True)


@triton.jit
def reduce_last_argmax(v, i):
    """Return (largest, its position): the last one on ties; NaN counts as larger than all numbers."""
    return tl.reduce((v, i), 1, _last_largest, keep_dims=True)


@triton.jit
def reduce_last_argmin(v, i):
    """Return (smallest, its position): the last one on ties; NaN counts as smaller than all numbers."""
    return tl.reduce((v, i), 1, _last_smallest, keep_dims=True)


@triton.jit
def reduce_logsumexp(v):
    return tl.reduce(v, 1, log_add_exp, keep_dims=True)


@triton.jit
def scan_sum(v):
    return tl.associative_scan(v, 1, add)


@triton.jit
def scan_prod(v):
    return tl.associative_scan(v, 1, multiply)


@triton.jit
def scan_max(v):
    return tl.associative_scan(v, 1, later_max)


@triton.jit
def scan_min(v):
    return tl.associative_scan(v, 1, later_min)


@triton.jit
def scan_logsumexp(v):
    return tl.associative_scan(v, 1, log_add_exp)


@triton.jit
def scan_argmax(v, i):
    return tl.associative_scan((v, i), 1, later_largest)


@triton.jit
def scan_argmin(v, i):
    return tl.associative_scan((v, i), 1, later_smallest)


@triton.jit
def last(v):
    """Return the last column of a tile."""
    column = tl.arange(0, v.shape[1])[None, :]
    return reduce_sum(tl.where(column == v.shape[1] - 1, v, tl.full([], 0, v.dtype)))


@triton.jit
def fast_exp(x):
    """Return exp(x) in two instructions; its relative error grows with |x| to 1e-5, results below 1e-38 are 0."""
    if x.dtype == tl.float32:
        return exp2_approximately(x * 1.4426950408889634)
    else:
        return tl.exp(x)


@triton.jit
def exp2_approximately(x):
    """Return 2 ** x, or 0 if that is subnormal (Triton's exp2 takes three more instructions for subnormal results)."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal_approximately(x):
    """Return 1 / x, or 0 if that is subnormal."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def lanes_max(v):
    """Return the largest elements along the last of three axes."""
    return tl.reduce(v, 2, maximum)


@triton.jit
def lanes_sum(v):
    return tl.reduce(v, 2, add)


@triton.jit
def in_lanes(v, WIDTH: tl.constexpr):
    """Return a tile [x, r] as [x, r // WIDTH, WIDTH]."""
    return tl.reshape(v, [v.shape[0], v.shape[1] // WIDTH, WIDTH])


@triton.jit
def first_of_lanes(v, DOUBLINGS: tl.constexpr):
    """Return the first of every 2 ** DOUBLINGS neighbors along r."""
    first = v
    for _ in tl.static_range(DOUBLINGS):
        first, _second = tl.split(tl.reshape(first, [first.shape[0], first.shape[1] // 2, 2]))
    return first


@triton.jit
def to_lanes(v, WIDTH: tl.constexpr):
    """Return a tile with every element repeated WIDTH times along r."""
    return tl.reshape(tl.broadcast_to(v[:, :, None], [v.shape[0], v.shape[1], WIDTH]), [v.shape[0], v.shape[1] * WIDTH])


@triton.jit
def load_by_lane(pointer, DOUBLINGS: tl.constexpr):
    """Load from pointers of which every 2 ** DOUBLINGS neighbors along r are equal, with one load for all of these."""
    return to_lanes(tl.load(first_of_lanes(pointer, DOUBLINGS)), 2**DOUBLINGS)


@triton.jit
def load_by_lane_where(pointer, mask, DOUBLINGS: tl.constexpr):
    """`load_by_lane` where `mask` holds, which is equal for such neighbors, too; 0 elsewhere."""
    mask = first_of_lanes(tl.broadcast_to(mask, pointer.shape), DOUBLINGS)
    return to_lanes(tl.load(first_of_lanes(pointer, DOUBLINGS), mask, other=0), 2**DOUBLINGS)


@triton.jit
def deinterleave(v, AXIS: tl.constexpr):
    """Return a tile's even and its odd elements along an axis."""
    if len(v.shape) == 1:
        return tl.split(tl.reshape(v, [v.shape[0] // 2, 2]))
    elif AXIS == 1:
        return tl.split(tl.reshape(v, [v.shape[0], v.shape[1] // 2, 2]))
    else:
        return tl.split(tl.permute(tl.reshape(v, [v.shape[0] // 2, 2, v.shape[1]]), [0, 2, 1]))


@triton.jit
def interleave(even, odd, AXIS: tl.constexpr):
    """Return the tile with these even and odd elements along an axis."""
    both = tl.join(even, odd)
    if len(even.shape) == 1:
        return tl.reshape(both, [2 * even.shape[0]])
    elif AXIS == 1:
        return tl.reshape(both, [even.shape[0], 2 * even.shape[1]])
    else:
        return tl.reshape(tl.permute(both, [0, 2, 1]), [2 * even.shape[0], even.shape[1]])


@triton.jit
def online_peak(peak, v, WIDTH: tl.constexpr):
    """Return the lanes' maxima updated with a tile, of which WIDTH neighbors belong to each lane."""
    return maximum(peak, lanes_max(in_lanes(v, WIDTH)))


@triton.jit
def online_total(peak, top, total, v, WIDTH: tl.constexpr):
    """Return the lanes' sums of exp(v - peak), rescaled to their new maxima `top`, with this tile's terms added.

    This uses the fast exponential: its error grows with |v - top|, while the term's weight in the sum shrinks. As long
    as a lane has seen only -inf, its sum stays 0.
    """
    base = tl.where(top == float("-inf"), tl.full([], 0.0, top.dtype), top)
    terms = fast_exp(in_lanes(v, WIDTH) - base[:, :, None])
    return fma(total, fast_exp(peak - base), lanes_sum(terms))


@triton.jit
def online_rescale(peak, total, top):
    """Rescale lane totals to `top`, the largest peak; a lane with that peak, even an infinite one, keeps its total."""
    return tl.where(peak == top, total, total * libdevice.exp(peak - top))


@triton.jit
def online_finish(peak, total):
    """Return the sum of exp(v - peak): NaN if the peak is infinite, as exp(-inf - -inf) is in eager."""
    return total + (peak - peak)


@triton.jit
def online_finish_guarded(peak, total):
    """Return the sum of exp(v - peak), or, if the peak is infinite, that of exp(v), which is 0 or infinite."""
    return tl.where(peak == float("inf"), peak, total)


@triton.jit
def moments(mean, squares, count, v):
    """Add one element to each lane's mean, sum of squared distances from the mean, and number of elements."""
    count = count + 1.0
    step = v - mean
    if v.dtype == tl.float32:
        mean = fma(step, reciprocal_approximately(count), mean)  # an approximate mean suffices for the squares
    else:
        mean = mean + step / count
    return mean, fma(step, v - mean, squares), count


@triton.jit
def moments_where(inside, mean, squares, count, v):
    """`moments` for the lanes where `inside` holds; other lanes do not change."""
    new_mean, new_squares, new_count = moments(mean, squares, count, v)
    return tl.where(inside, new_mean, mean), tl.where(inside, new_squares, squares), tl.where(inside, new_count, count)


@triton.jit
def _joined_moments(mean, squares, count, other_mean, other_squares, other_count):
    both = count + other_count
    step = other_mean - mean
    share = other_count / tl.maximum(both, 1.0)
    # `count` or `share` is 0 if a side has no elements: multiply in this order, because step * step could be inf, and
    # inf * 0 is NaN.
    return fma(step, share, mean), fma(step * count, step * share, squares + other_squares), both


@triton.jit
def reduce_moments(mean, squares, count):
    """Return (mean, sum of squared distances from it, number of elements) over all lanes."""
    return tl.reduce((mean, squares, count), 1, _joined_moments, keep_dims=True)


@triton.jit
def to_bf16(x):
    """Convert to bfloat16, rounded to nearest even."""
    return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """Round float32 to bfloat16 two elements at a time: single conversions run at an eighth of the rate.

    Each thread must hold at least two elements.
    """
    pairs = tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )
    return pairs.to(tl.float32)


@triton.jit
def through_bf16(x):
    """Round float32 to bfloat16 one element at a time, for any number of elements per thread."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def to_fp8e4nv(x):
    """Convert to float8_e4m3fn, rounded to nearest even; NaN beyond the largest number (the instruction saturates)."""
    return tl.where(tl.abs(x) > 464.0, float("nan"), x).to(tl.float8e4nv)


@triton.jit
def to_fp8e4nv_saturated(x):
    """Convert to float8_e4m3fn, rounded to nearest even, and saturate at the largest number; NaN stays NaN."""
    return tl.where(tl.abs(x) > 448.0, tl.where(x < 0.0, -448.0, 448.0), x).to(tl.float8e4nv)


@triton.jit
def to_fp8e5(x):
    """Convert to float8_e5m2, rounded to nearest even; infinity beyond the largest number, where `cvt` saturates."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Adding a power of two that is 2^21 times larger makes the adder round to the target's last bit. Subnormal numbers
    # share the last bit of the smallest normal number.
    power = tl.maximum(magnitude & 0x7F800000, 113 << 23)
    shifted = power + (21 << 23)
    total = magnitude.to(tl.float32, bitcast=True) + shifted.to(tl.float32, bitcast=True)
    number = total.to(tl.uint32, bitcast=True) - shifted + (power >> 21) - (113 << 2)
    number = tl.where(magnitude >= 0x47700000, 0x7C, number)  # from 61440 on
    number = tl.where(magnitude > 0x7F800000, 0x7F, number)
    return (number | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def to_fp16(x):
    """Convert to float16, rounded to nearest even."""
    return x.to(tl.float16)


@triton.jit
def dot(a, b, accumulated, precision: tl.constexpr):
    """Return `a @ b + accumulated` of tiles, summed in float32; precision: how float32 factors are multiplied."""
    return tl.dot(a, b, accumulated, input_precision=precision)


@triton.jit
def divide(a, b):
    """Divide as IEEE says; Triton's `/` is off by up to 2 ulp in fp32."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def sqrt(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def sigmoid(x):
    return divide(tl.full([], 1.0, x.dtype), libdevice.exp(-x) + 1.0)


@triton.jit
def coarse_div(a, b):
    """Return a / b, off by at most two units in the last place.

    It multiplies by a reciprocal, which is computed once per row if b is one number per row. b is scaled by a power of
    two so that the reciprocal does not overflow.
    """
    size = tl.abs(b)
    scale = tl.where(size > 18446744073709551616.0, 5.421010862427522e-20, 1.0)
    scale = tl.where(size < 5.421010862427522e-20, 18446744073709551616.0, scale)
    return (a * scale) * reciprocal_approximately(b * scale)


@triton.jit
def coarse_exp(x):
    return fast_exp(x)


@triton.jit
def coarse_sigmoid(x):
    return reciprocal_approximately(1.0 + fast_exp(-x))


@triton.jit
def coarse_tanh(x):
    """Return 1 - 2 / (exp(2x) + 1), or a series where that cancels; the relative error is below 1e-5."""
    square = x * x
    series = fma(-x * square, fma(square, -2.0 / 15.0, 1.0 / 3.0), x)
    return tl.where(square < 0.01, series, fma(reciprocal_approximately(fast_exp(2.0 * x) + 1.0), -2.0, 1.0))


@triton.jit
def coarse_erf(x):
    """Abramowitz and Stegun 7.1.26, and a series near 0, where the formula's absolute error of 1.5e-7 is too large."""
    size = tl.abs(x)
    square = x * x
    t = reciprocal_approximately(fma(size, 0.3275911, 1.0))
    tail = fma(t, fma(t, fma(t, 1.061405429, -1.453152027), 1.421413741), -0.284496736)
    far = fma(-t * fma(t, tail, 0.254829592), fast_exp(-square), 1.0)
    series = x * fma(-square, fma(square, -0.1128379167, 0.3761263890), 1.1283791671)
    return tl.where(square < 0.01, series, tl.where(x < 0, -far, far))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def signbit(x):
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    elif x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x < 0


@triton.jit
def remainder(a, b):
    """Return a - floor(a / b) * b, which has the divisor's sign (Python's %)."""
    if a.dtype.is_floating():
        rest = libdevice.fmod(a, b)
    else:
        rest = a % b  # the dividend's sign, as in C
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_div(a, b):
    """Return a / b rounded down; for floats computed from the exact remainder, as in torch."""
    if a.dtype.is_floating():
        rest = libdevice.fmod(a, b)
        whole = divide(a - rest, b)
        whole = tl.where((rest != 0) & ((rest < 0) != (b < 0)), whole - 1.0, whole)
        down = tl.floor(whole)
        down = tl.where(whole - down > 0.5, down + 1.0, down)
        ratio = divide(a, b)
        down = tl.where(whole == 0, libdevice.copysign(tl.full([], 0.0, a.dtype), ratio), down)
        return tl.where(b == 0, ratio, down)
    else:
        rest = a % b
        whole = a // b  # toward zero
        return tl.where((rest != 0) & ((rest < 0) != (b < 0)), whole - 1, whole)


@triton.jit
def integer_power(a, b):
    """Return a ** b for integers, with wraparound; 0 for negative exponents, except for a = ±1."""
    one = tl.full([], 1, a.dtype)
    zero = (a ^ a) | (b ^ b)  # of the shape of both, as what a loop changes must be from its start
    result = zero | one
    base = zero | a
    left = zero | b
    for _ in range(63):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    if a.dtype.is_int_signed():
        odd = (b & 1) != 0
        negative = tl.where(a == 1, one, tl.where(a == -1, tl.where(odd, -one, one), one - one))
        result = tl.where(b < 0, negative, result)
    return result


@triton.jit
def shift_left(a, b, BITS: tl.constexpr):
    """Return a << b; 0 where b is negative or at least the width in bits."""
    out_of_range = (b < 0) | (b >= BITS)
    return tl.where(out_of_range, tl.full([], 0, a.dtype), a << tl.where(out_of_range, tl.full([], 0, b.dtype), b))


@triton.jit
def shift_right(a, b, LAST: tl.constexpr):
    """Return a >> b; shifts by LAST (all bits except the sign) where b is negative or larger."""
    last = tl.full([], LAST, b.dtype)
    return a >> tl.where((b < 0) | (b > last), last, b)


@triton.jit
def _philox(key, upper, block):
    """Return the four words of a block as uint32, by Philox 4x32-10 as in runtime/philox.py."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = upper.to(tl.uint32) + c0 - c0, (upper >> 32).to(tl.uint32) + c0 - c0
    factor0, factor1 = tl.full([], 0xD2511F53, tl.uint32), tl.full([], 0xCD9E8D57, tl.uint32)
    step0, step1 = tl.full([], 0x9E3779B9, tl.uint32), tl.full([], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, factor0), c0 * factor0
        high1, low1 = tl.umulhi(c2, factor1), c2 * factor1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + step0, k1 + step1
    return c0, c1, c2, c3


@triton.jit
def _word(key, upper, position):
    c0, c1, c2, c3 = _philox(key, upper, position >> 2)
    odd = (position & 1) != 0
    return tl.where((position & 2) != 0, tl.where(odd, c3, c2), tl.where(odd, c1, c0))


@triton.jit
def _fraction(word):
    """Return a number of [0, 1) made from the upper 24 bits."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def random_word(key, upper, position):
    """Return the word at a position, from 0 to 2^32 - 1, as int64."""
    return _word(key, upper, position).to(tl.int64)


@triton.jit
def random(key, upper, position):
    """Return the number of [0, 1) at a position."""
    return _fraction(_word(key, upper, position))


@triton.jit
def random_block(key, upper, first, BLOCK: tl.constexpr):
    """Return the numbers of [0, 1) at BLOCK positions from `first` (a multiple of 4) on, using all words of blocks."""
    block = ((tl.full([], 0, tl.int64) + first) >> 2) + tl.arange(0, BLOCK // 4)
    c0, c1, c2, c3 = _philox(key, upper, block)
    return _fraction(tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape([BLOCK]))


@triton.jit
def number_in_part(program, first: tl.constexpr):
    """Return `program - first`, int32, by an instruction that no other branch has.

    Otherwise branches would be merged, and all parts' pointers kept in registers (see codegen/triton/combo.py).
    """
    return tl.inline_asm_elementwise(
        f"sub.s32 $0, $1, {first};", "=r,r", [program], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def nothing():
    """Do nothing: a worker compiles this to warm up (triton_compile.py)."""
