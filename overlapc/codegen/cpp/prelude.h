// The beginning of every generated kernel: element-wise functions with torch's semantics, written so that compilers can
// vectorize loops over them. It includes no C++ library headers, math.h or stdlib.h, because parsing them takes long
// compared with compiling a kernel (of 95 ms for a small kernel, math.h took 22 ms and stdlib.h 5 ms).
#include <stdint.h>
#include <string.h>

#define DECLARE_1(name)                         \
  extern "C" double name(double) noexcept;      \
  extern "C" float name##f(float) noexcept;
#define DECLARE_2(name)                              \
  extern "C" double name(double, double) noexcept;   \
  extern "C" float name##f(float, float) noexcept;
DECLARE_1(sqrt) DECLARE_1(exp) DECLARE_1(exp2) DECLARE_1(expm1) DECLARE_1(log) DECLARE_1(log2) DECLARE_1(log10)
DECLARE_1(log1p) DECLARE_1(sin) DECLARE_1(cos) DECLARE_1(tan) DECLARE_1(asin) DECLARE_1(acos) DECLARE_1(atan)
DECLARE_1(sinh) DECLARE_1(cosh) DECLARE_1(tanh) DECLARE_1(asinh) DECLARE_1(acosh) DECLARE_1(atanh) DECLARE_1(erf)
DECLARE_1(erfc) DECLARE_1(lgamma) DECLARE_1(fabs) DECLARE_1(floor) DECLARE_1(ceil) DECLARE_1(trunc) DECLARE_1(nearbyint)
DECLARE_2(pow) DECLARE_2(fmod) DECLARE_2(atan2) DECLARE_2(hypot) DECLARE_2(copysign) DECLARE_2(nextafter)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

// sin, exp and similar functions have one implementation each, `same_sinf(x)`, so that a value has the same bits in a
// vector, in the scalar tail of a vector loop and in a scalar loop. If glibc has vector versions (libmvec), it is the
// one for the machine's widest vectors, because libmvec's other widths and the scalar functions round differently. The
// simd attribute makes GCC call `_ZGVbN4v_same_sinf` and so on; DEFINE_sin, in kernels that use sin, defines these by
// the widest version. Elsewhere (clang, other machines) the implementation is libm's.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
#define LIBMVEC 2
#elif __GLIBC_PREREQ(2, 22)
#define LIBMVEC 1
#endif
#endif
#ifndef LIBMVEC
#define LIBMVEC 0
#endif

#define PLAIN_1(name)                                                                     \
  static inline double same_##name(double x) { return name(x); }                          \
  static inline float same_##name##f(float x) { return name##f(x); }
#define PLAIN_2(name)                                                                     \
  static inline double same_##name(double x, double y) { return name(x, y); }             \
  static inline float same_##name##f(float x, float y) { return name##f(x, y); }
#define VECTORIZED_1(name)                                                                              \
  extern "C" __attribute__((simd("notinbranch"), const)) double same_##name(double) noexcept;          \
  extern "C" __attribute__((simd("notinbranch"), const)) float same_##name##f(float) noexcept;
#define VECTORIZED_2(name)                                                                              \
  extern "C" __attribute__((simd("notinbranch"), const)) double same_##name(double, double) noexcept;  \
  extern "C" __attribute__((simd("notinbranch"), const)) float same_##name##f(float, float) noexcept;

#if LIBMVEC
typedef float F4 __attribute__((vector_size(16)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F16 __attribute__((vector_size(64)));
typedef double D2 __attribute__((vector_size(16)));
typedef double D4 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));

// Repeats `x`, a number or a vector, in all lanes: unused lanes are computed, too, and 0 may be a slow argument.
template <class Wide, class Narrow>
static inline __attribute__((always_inline)) Wide repeated(Narrow x) {
  Wide wide;
  for (unsigned at = 0; at < sizeof(Wide); at += sizeof(Narrow)) memcpy((char*)&wide + at, &x, sizeof(Narrow));
  return wide;
}
template <class Narrow, class Wide>
static inline __attribute__((always_inline)) Narrow first_part(Wide wide, int part = 0) {
  Narrow x;
  memcpy(&x, (char*)&wide + part * sizeof(Narrow), sizeof(Narrow));
  return x;
}

// These define the function `symbol` on `T`: NARROWED by the function `wide` on the larger type `Wide`, ITSELF by a
// function on the same type, and TWICE by two calls of `wide` on the halves of `T`.
#define NARROWED_1(id, symbol, T, wide, Wide)                                             \
  static __attribute__((used)) T id(T x) __asm__(symbol);                                 \
  static T id(T x) { return first_part<T>(wide(repeated<Wide>(x))); }
#define NARROWED_2(id, symbol, T, wide, Wide)                                             \
  static __attribute__((used)) T id(T x, T y) __asm__(symbol);                            \
  static T id(T x, T y) { return first_part<T>(wide(repeated<Wide>(x), repeated<Wide>(y))); }
#define ITSELF_1(id, symbol, T, wide)                                                     \
  extern "C" T wide(T);                                                                   \
  static __attribute__((used)) T id(T x) __asm__(symbol);                                 \
  static T id(T x) { return wide(x); }
#define ITSELF_2(id, symbol, T, wide)                                                     \
  extern "C" T wide(T, T);                                                                \
  static __attribute__((used)) T id(T x, T y) __asm__(symbol);                            \
  static T id(T x, T y) { return wide(x, y); }
#define TWICE_1(id, symbol, T, wide, Wide)                                                \
  static __attribute__((used)) T id(T x) __asm__(symbol);                                 \
  static T id(T x) {                                                                      \
    Wide parts[2] = {wide(first_part<Wide>(x)), wide(first_part<Wide>(x, 1))};            \
    return first_part<T>(parts);                                                          \
  }
#define TWICE_2(id, symbol, T, wide, Wide)                                                \
  static __attribute__((used)) T id(T x, T y) __asm__(symbol);                            \
  static T id(T x, T y) {                                                                 \
    Wide parts[2] = {wide(first_part<Wide>(x), first_part<Wide>(y)),                      \
                     wide(first_part<Wide>(x, 1), first_part<Wide>(y, 1))};               \
    return first_part<T>(parts);                                                          \
  }

// Defines all widths of one function with `k` arguments by the machine's widest vector version. `v` is one letter v per
// argument, S the scalar type, V1 to V3 the vectors of 16, 32 and 64 bytes, and n1 to n3 their lanes.
#if defined(__AVX512F__) && defined(VECTORS_OF_64_BYTES)
#define WIDENED(k, name, v, S, V1, V2, V3, n1, n2, n3)                                                       \
  ITSELF_##k(e_##name, "_ZGVeN" #n3 #v "_same_" #name, V3, _ZGVeN##n3##v##_##name)                           \
  NARROWED_##k(d_##name, "_ZGVdN" #n2 #v "_same_" #name, V2, _ZGVeN##n3##v##_##name, V3)                     \
  NARROWED_##k(b_##name, "_ZGVbN" #n1 #v "_same_" #name, V1, _ZGVeN##n3##v##_##name, V3)                     \
  NARROWED_##k(s_##name, "same_" #name, S, _ZGVeN##n3##v##_##name, V3)
#elif defined(__AVX2__)
#define WIDENED(k, name, v, S, V1, V2, V3, n1, n2, n3)                                                       \
  ITSELF_##k(d_##name, "_ZGVdN" #n2 #v "_same_" #name, V2, _ZGVdN##n2##v##_##name)                           \
  TWICE_##k(e_##name, "_ZGVeN" #n3 #v "_same_" #name, V3, _ZGVdN##n2##v##_##name, V2)                        \
  NARROWED_##k(b_##name, "_ZGVbN" #n1 #v "_same_" #name, V1, _ZGVdN##n2##v##_##name, V2)                     \
  NARROWED_##k(s_##name, "same_" #name, S, _ZGVdN##n2##v##_##name, V2)
#else
#define WIDENED(k, name, v, S, V1, V2, V3, n1, n2, n3)                                                       \
  ITSELF_##k(b_##name, "_ZGVbN" #n1 #v "_same_" #name, V1, _ZGVbN##n1##v##_##name)                           \
  TWICE_##k(c_##name, "_ZGVcN" #n2 #v "_same_" #name, V2, _ZGVbN##n1##v##_##name, V1)                        \
  NARROWED_##k(s_##name, "same_" #name, S, _ZGVbN##n1##v##_##name, V1)
#endif
#define WIDENED_1(name) WIDENED(1, name##f, v, float, F4, F8, F16, 4, 8, 16) WIDENED(1, name, v, double, D2, D4, D8, 2, 4, 8)
#define WIDENED_2(name) WIDENED(2, name##f, vv, float, F4, F8, F16, 4, 8, 16) WIDENED(2, name, vv, double, D2, D4, D8, 2, 4, 8)
#endif

#if LIBMVEC >= 1
VECTORIZED_1(exp)
#define DEFINE_exp WIDENED_1(exp)
VECTORIZED_1(log)
#define DEFINE_log WIDENED_1(log)
VECTORIZED_1(sin)
#define DEFINE_sin WIDENED_1(sin)
VECTORIZED_1(cos)
#define DEFINE_cos WIDENED_1(cos)
VECTORIZED_2(pow)
#define DEFINE_pow WIDENED_2(pow)
#else
PLAIN_1(exp)
#define DEFINE_exp
PLAIN_1(log)
#define DEFINE_log
PLAIN_1(sin)
#define DEFINE_sin
PLAIN_1(cos)
#define DEFINE_cos
PLAIN_2(pow)
#define DEFINE_pow
#endif
#if LIBMVEC >= 2
VECTORIZED_1(exp2)
#define DEFINE_exp2 WIDENED_1(exp2)
VECTORIZED_1(expm1)
#define DEFINE_expm1 WIDENED_1(expm1)
VECTORIZED_1(log2)
#define DEFINE_log2 WIDENED_1(log2)
VECTORIZED_1(log10)
#define DEFINE_log10 WIDENED_1(log10)
VECTORIZED_1(log1p)
#define DEFINE_log1p WIDENED_1(log1p)
VECTORIZED_1(tan)
#define DEFINE_tan WIDENED_1(tan)
VECTORIZED_1(asin)
#define DEFINE_asin WIDENED_1(asin)
VECTORIZED_1(acos)
#define DEFINE_acos WIDENED_1(acos)
VECTORIZED_1(atan)
#define DEFINE_atan WIDENED_1(atan)
VECTORIZED_1(sinh)
#define DEFINE_sinh WIDENED_1(sinh)
VECTORIZED_1(cosh)
#define DEFINE_cosh WIDENED_1(cosh)
VECTORIZED_1(tanh)
#define DEFINE_tanh WIDENED_1(tanh)
VECTORIZED_1(asinh)
#define DEFINE_asinh WIDENED_1(asinh)
VECTORIZED_1(acosh)
#define DEFINE_acosh WIDENED_1(acosh)
VECTORIZED_1(atanh)
#define DEFINE_atanh WIDENED_1(atanh)
VECTORIZED_1(erf)
#define DEFINE_erf WIDENED_1(erf)
VECTORIZED_1(erfc)
#define DEFINE_erfc WIDENED_1(erfc)
VECTORIZED_2(atan2)
#define DEFINE_atan2 WIDENED_2(atan2)
VECTORIZED_2(hypot)
#define DEFINE_hypot WIDENED_2(hypot)
#else
PLAIN_1(exp2)
#define DEFINE_exp2
PLAIN_1(expm1)
#define DEFINE_expm1
PLAIN_1(log2)
#define DEFINE_log2
PLAIN_1(log10)
#define DEFINE_log10
PLAIN_1(log1p)
#define DEFINE_log1p
PLAIN_1(tan)
#define DEFINE_tan
PLAIN_1(asin)
#define DEFINE_asin
PLAIN_1(acos)
#define DEFINE_acos
PLAIN_1(atan)
#define DEFINE_atan
PLAIN_1(sinh)
#define DEFINE_sinh
PLAIN_1(cosh)
#define DEFINE_cosh
PLAIN_1(tanh)
#define DEFINE_tanh
PLAIN_1(asinh)
#define DEFINE_asinh
PLAIN_1(acosh)
#define DEFINE_acosh
PLAIN_1(atanh)
#define DEFINE_atanh
PLAIN_1(erf)
#define DEFINE_erf
PLAIN_1(erfc)
#define DEFINE_erfc
PLAIN_2(atan2)
#define DEFINE_atan2
PLAIN_2(hypot)
#define DEFINE_hypot
#endif

#define INLINE static inline __attribute__((always_inline))

template <class To, class From>
INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// A `where` without a branch: GCC moves the computation of a result that is used on one side only (an ELU's expm1) into
// branches, and does not vectorize what it made of them.
INLINE float chosen(bool condition, float a, float b) {
  const uint32_t mask = 0u - uint32_t(condition);
  return bits<float>((bits<uint32_t>(a) & mask) | (bits<uint32_t>(b) & ~mask));
}
INLINE double chosen(bool condition, double a, double b) {
  const uint64_t mask = uint64_t(0) - uint64_t(condition);
  return bits<double>((bits<uint64_t>(a) & mask) | (bits<uint64_t>(b) & ~mask));
}

// ---- memory formats; branch-free integer code, because compilers do not vectorize short float types everywhere

INLINE float load_bf16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

INLINE uint16_t store_bf16(float x) {  // to nearest, ties to even
  const uint32_t u = bits<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t(x != x ? 0x7fc0u : rounded);
}

// Rounds the positive float with bits `u` to the nearest number with `Mantissa` bits and an exponent biased by `Bias`,
// ties to even, and returns its bits. The exponent has no upper limit.
template <int Mantissa, int Bias>
INLINE uint32_t nearest(uint32_t u) {
  constexpr uint32_t least = (128u - Bias) << 23;  // the smallest normal number; those below share its unit
  const uint32_t power = u & 0x7f800000u, unit = power < least ? least : power;
  // Adding a power of two that is so much larger makes the hardware round to whole units.
  const uint32_t beside = unit + (uint32_t(23 - Mantissa) << 23);
  const uint32_t units = bits<uint32_t>(bits<float>(u) + bits<float>(beside)) - beside;
  return units + (unit >> (23 - Mantissa)) - (least >> (23 - Mantissa));
}

INLINE float load_f16(uint16_t x) {
  const uint32_t magnitude = uint32_t(x & 0x7fffu) << 13;
  const float scaled = bits<float>(magnitude) * 0x1p112f;  // exact, subnormals included
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t sign = uint32_t(x & 0x8000u) << 16;
  return bits<float>(((x & 0x7c00u) == 0x7c00u ? special : bits<uint32_t>(scaled)) | sign);
}

INLINE uint16_t store_f16(float x) {  // to nearest, ties to even
  const uint32_t u = bits<uint32_t>(x) & 0x7fffffffu;
  const uint32_t sign = (bits<uint32_t>(x) >> 16) & 0x8000u;
  uint32_t half = nearest<10, 15>(u);
  half = u >= 0x477ff000u ? 0x7c00u : half;
  half = u > 0x7f800000u ? 0x7e00u : half;
  return uint16_t(half | sign);
}

// The format has no infinity: numbers above 448 become 448, and NaN above E4M3_END.
INLINE uint8_t store_e4m3(float x) {
  const uint32_t u = bits<uint32_t>(x) & 0x7fffffffu;
  uint32_t number = nearest<3, 7>(u < 0x43e00000u ? u : 0x43e00000u);
  number = u > E4M3_END ? 0x7fu : number;
  return uint8_t(number | ((bits<uint32_t>(x) >> 24) & 0x80u));
}

INLINE float load_e4m3(uint8_t x) {
  const uint32_t magnitude = uint32_t(x & 0x7fu) << 20;
  const float scaled = bits<float>(magnitude) * 0x1p120f;  // exact, subnormals included
  const uint32_t number = magnitude == 0x7f00000u ? 0x7fc00000u : bits<uint32_t>(scaled);
  return bits<float>(number | (uint32_t(x & 0x80u) << 24));
}

INLINE uint8_t store_e5m2(float x) {
  const uint32_t u = bits<uint32_t>(x) & 0x7fffffffu;
  uint32_t number = u >= 0x47700000u ? 0x7cu : nearest<2, 15>(u);
  number = u > 0x7f800000u ? 0x7fu : number;
  return uint8_t(number | ((bits<uint32_t>(x) >> 24) & 0x80u));
}

INLINE float load_e5m2(uint8_t x) { return load_f16(uint16_t(x << 8)); }

INLINE float round_e4m3(float x) { return load_e4m3(store_e4m3(x)); }
INLINE float round_e5m2(float x) { return load_e5m2(store_e5m2(x)); }
INLINE float round_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  return bits<float>(x != x ? 0x7fc00000u : (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}
INLINE float round_f16(float x) { return load_f16(store_f16(x)); }

// ---- integers with torch's semantics: they wrap. Division by zero yields -1; where eager raises, lowering prevents it or
// adds a check (lowering/pointwise.py).

template <class T> struct unsigned_of;
template <> struct unsigned_of<int8_t> { using type = uint8_t; };
template <> struct unsigned_of<uint8_t> { using type = uint8_t; };
template <> struct unsigned_of<int16_t> { using type = uint16_t; };
template <> struct unsigned_of<int32_t> { using type = uint32_t; };
template <> struct unsigned_of<int64_t> { using type = uint64_t; };

template <class T>
INLINE T trunc_div(T a, T b) {
  return b == 0 ? T(-1) : b == T(-1) && T(-1) < T(0) ? T(0 - a) : T(a / b);  // lowest / -1 would trap
}
INLINE float trunc_div(float a, float b) { return truncf(a / b); }
INLINE double trunc_div(double a, double b) { return trunc(a / b); }

template <class T>
INLINE T fmod_(T a, T b) {
  return b == 0 || (b == T(-1) && T(-1) < T(0)) ? T(0) : T(a % b);
}
INLINE float fmod_(float a, float b) { return fmodf(a, b); }
INLINE double fmod_(double a, double b) { return fmod(a, b); }

template <class T>
INLINE T floor_div(T a, T b) {
  const T q = trunc_div(a, b);
  return b != 0 && fmod_(a, b) != 0 && (a < 0) != (b < 0) ? T(q - 1) : q;
}
template <class T>
INLINE T float_floor_div(T a, T b) {
  if (b == 0) return a / b;
  T rest = fmod_(a, b);
  T q = (a - rest) / b;  // an integer, except for one rounding error
  if (rest != 0 && (b < 0) != (rest < 0)) q -= T(1);
  if (q == 0) return T(copysign(0.0, double(a / b)));
  T low = T(floor(double(q)));
  return q - low > T(0.5) ? low + T(1) : low;
}
INLINE float floor_div(float a, float b) { return float_floor_div(a, b); }
INLINE double floor_div(double a, double b) { return float_floor_div(a, b); }

template <class T>
INLINE T remainder_(T a, T b) {  // has the divisor's sign, as in Python
  const T rest = fmod_(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? T(rest + b) : rest;
}

template <class T>
INLINE T power(T base, T exponent) {
  if (exponent < 0) return base == 1 ? T(1) : base == T(-1) ? T(exponent % 2 == 0 ? 1 : -1) : T(0);
  typename unsigned_of<T>::type result = 1, factor = base;
  for (; exponent != 0; exponent = T(exponent >> 1), factor *= factor)
    if (exponent & 1) result *= factor;
  return T(result);
}
INLINE float power(float a, float b) { return same_powf(a, b); }
INLINE double power(double a, double b) { return same_pow(a, b); }

template <class T>
INLINE T shift_left(T a, T by) {  // 0 if all bits are shifted out, as in eager
  using U = typename unsigned_of<T>::type;
  return U(by) < 8 * sizeof(T) ? T(U(a) << U(by)) : T(0);
}
template <class T>
INLINE T shift_right(T a, T by) {  // all sign bits if all bits are shifted out
  using U = typename unsigned_of<T>::type;
  return U(by) < 8 * sizeof(T) ? T(a >> by) : T(a < 0 ? -1 : 0);
}

// ---- functions of one or two numbers

template <class T>
INLINE T absolute(T x) { return x < 0 ? T(0 - x) : x; }
INLINE float absolute(float x) { return fabsf(x); }
INLINE double absolute(double x) { return fabs(x); }

// Converts a float to an integer. NaN and floats out of range become the lowest integer, as x86's instruction and eager
// have it; in C++ this is undefined, and GCC folds a NaN that it can predict (`x != x ? NAN : x`) to 0. Other machines
// saturate, and so does GCC for them.
template <class To, class From>
INLINE To truncated(From x) {
#if defined(__x86_64__)
  constexpr bool wide = sizeof(To) == 8;
  return absolute(x) < (wide ? From(0x1p63) : From(0x1p31)) ? To(x) : To(wide ? INT64_MIN : INT32_MIN);
#else
  return To(x);
#endif
}

template <class T>
INLINE T sign(T x) { return T((x > 0) - (x < 0)); }

template <class T>
INLINE T maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }  // NaN if either is
template <class T>
INLINE T minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }

template <class T>
INLINE T relu(T x) { return x < 0 ? T(0) : x; }

// Training kernels spend much of their time in exp of float32. This one is inline, so that a loop keeps its registers.
// Its error is at most one unit in the last place (libmvec: 2.6) over the whole range, including subnormal results,
// infinities and NaN.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
INLINE float exponential(float x) {
  const float shifted = __builtin_fmaf(x, 1.44269504f, 12582912.0f);  // + 1.5 * 2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = __builtin_fmaf(n, 1.90465432e-9f, __builtin_fmaf(n, -0.693147182f, x));  // x - n log 2
  float p = 0.0001989108046f;  // (exp(r) - 1 - r) / r^2 on |r| <= log(2)/2: a Chebyshev fit, error 1.4e-9
  p = __builtin_fmaf(p, r, 0.001393373072f);
  p = __builtin_fmaf(p, r, 0.008333310845f);
  p = __builtin_fmaf(p, r, 0.0416664642f);
  p = __builtin_fmaf(p, r, 0.1666666668f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p * r, r, r) + 1.0f;
  const int32_t whole = bits<int32_t>(shifted) - 0x4b400000;
  const int32_t half = whole >> 1;  // 2^n as two factors, because n may exceed the range of an exponent
  p = p * bits<float>((half + 127) << 23) * bits<float>((whole - half + 127) << 23);
  p = x < -104.0f ? 0.0f : p;
  return x > 89.0f ? INFINITY : p;  // a NaN has propagated to p
}

// erf of float32, with an error of at most two units in the last place (libmvec: four). It is a polynomial near zero,
// and 1 - 2^r with a polynomial r elsewhere, so that 1 + erf(x) is accurate for negative x, too (GELU).
INLINE float error_function(float x) {
  const float a = fabsf(x), s = x * x;
  float near = -0.0006090340327f;  // erf(x) / x - 1 over x * x, for |x| < 0.9
  near = __builtin_fmaf(near, s, 0.005011958799f);
  near = __builtin_fmaf(near, s, -0.02677890603f);
  near = __builtin_fmaf(near, s, 0.1128214073f);
  near = __builtin_fmaf(near, s, -0.3761252327f);
  near = __builtin_fmaf(near, s, 0.128379154f);
  const float b = a > 4.0f ? 4.0f : a;  // erf is 1 beyond 4; a NaN propagates
  float r = 0.0002859836285f;           // log2(1 - erf(b)) for 0.9 <= b <= 4
  r = __builtin_fmaf(r, b, -0.004422686461f);
  r = __builtin_fmaf(r, b, 0.03219448436f);
  r = __builtin_fmaf(r, b, -0.1502051249f);
  r = __builtin_fmaf(r, b, -0.9189613565f);
  r = __builtin_fmaf(r, b, -1.627067971f);
  r = __builtin_fmaf(r, b, -0.0002400252912f);
  const float shifted = r + 12582912.0f;  // as in exponential(), but one factor 2^n is enough for r
  const float f = r - (shifted - 12582912.0f);
  float p = 0.001327642768f;  // 2^f on |f| <= 1/2, error 8e-8
  p = __builtin_fmaf(p, f, 0.00967554098f);
  p = __builtin_fmaf(p, f, 0.05550713411f);
  p = __builtin_fmaf(p, f, 0.2402211973f);
  p = __builtin_fmaf(p, f, 0.693146967f);
  p = __builtin_fmaf(p, f, 1.000000072f);
  const float rest = p * bits<float>((bits<int32_t>(shifted) - 0x4b400000 + 127) << 23);
  return a < 0.9f ? __builtin_fmaf(near, x, x) : copysignf(1.0f - rest, x);
}
#else
INLINE float exponential(float x) { return same_expf(x); }
INLINE float error_function(float x) { return same_erff(x); }
#endif
INLINE double error_function(double x) { return same_erf(x); }
INLINE double exponential(double x) { return same_exp(x); }

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE double sigmoid(double x) { return 1.0 / (1.0 + exponential(-x)); }

INLINE bool sign_bit(float x) { return int32_t(bits<uint32_t>(x)) < 0; }
INLINE bool sign_bit(double x) { return int64_t(bits<uint64_t>(x)) < 0; }
template <class T>
INLINE bool sign_bit(T x) { return x < 0; }

// ---- random numbers: word `position` of a Philox 4x32-10 stream (runtime/philox.py defines the streams)

INLINE uint32_t philox(int64_t key, int64_t upper, int64_t position) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(uint64_t(key) >> 32);
  uint32_t c0 = uint32_t(position >> 2), c1 = uint32_t(uint64_t(position) >> 34);
  uint32_t c2 = uint32_t(upper), c3 = uint32_t(uint64_t(upper) >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint32_t low = position & 1 ? c1 : c0, high = position & 1 ? c3 : c2;
  return position & 2 ? high : low;
}
INLINE int64_t random_word(int64_t key, int64_t upper, int64_t position) { return philox(key, upper, position); }
INLINE float random(int64_t key, int64_t upper, int64_t position) {
  return float(int32_t(philox(key, upper, position) >> 8)) * 0x1p-24f;
}

// ---- reductions

// Maps floats to integers of the same order, and NaN to `of_nan`: compilers vectorize a max of integers, but not a max
// of floats that propagates NaN. -0.0 comes before 0.0.
INLINE int32_t ordered(float x, int32_t of_nan) {
  const int32_t u = bits<int32_t>(x);
  return x != x ? of_nan : u ^ ((u >> 31) & 0x7fffffff);
}
INLINE int64_t ordered(double x, int64_t of_nan) {
  const int64_t u = bits<int64_t>(x);
  return x != x ? of_nan : u ^ ((u >> 63) & INT64_MAX);
}
INLINE float from_ordered(int32_t key) {
  return key == INT32_MAX || key == INT32_MIN ? NAN : bits<float>(key ^ ((key >> 31) & 0x7fffffff));
}
INLINE double from_ordered(int64_t key) {
  return key == INT64_MAX || key == INT64_MIN ? (double)NAN : bits<double>(key ^ ((key >> 63) & INT64_MAX));
}

// Where the whole vectors of 16 elements of a loop end. GCC runs most of the rest one iteration after another, unless it
// is written as one vector with masks, which needs masks for elements of any size.
INLINE constexpr int64_t whole_vectors(int64_t begin, int64_t end) {
#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  return end - (end - begin) % 16;
#else
  return end;
#endif
}

#if defined(__GNUC__)
#if __GNUC__ >= 12 && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VECTOR_BYTES 64
#elif __GNUC__ >= 12 && defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif


// Sums the elements of a vector by adding halves until one element is left.
template <int Bytes, class T>
INLINE T folded(const char* from) {
  if constexpr (Bytes == sizeof(T)) {
    T number;
    memcpy(&number, from, sizeof(T));
    return number;
  } else {
    typedef T Half __attribute__((vector_size(Bytes / 2)));
    Half low, high;
    memcpy(&low, from, sizeof(low));
    memcpy(&high, from + sizeof(low), sizeof(high));
    low += high;
    return folded<Bytes / 2, T>((const char*)&low);
  }
}
#endif

// Sums `Count` terms in an order that depends only on the machine's vector width.
template <int Count, class T>
INLINE T sum_terms(const T* terms) {
  T sum = 0;
  int at = 0;
#ifdef VECTOR_BYTES
  constexpr int width = VECTOR_BYTES / sizeof(T);
  typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
  Vector even = {}, odd = {}, next;
  for (; at + 2 * width <= Count; at += 2 * width) {
    memcpy(&next, terms + at, sizeof(next));
    even += next;
    memcpy(&next, terms + at + width, sizeof(next));
    odd += next;
  }
  if (at + width <= Count) {
    memcpy(&next, terms + at, sizeof(next));
    even += next;
    at += width;
  }
  even += odd;
  sum = folded<VECTOR_BYTES, T>((const char*)&even);
#endif
  for (; at < Count; ++at) sum += terms[at];
  return sum;
}

// Returns the first position of `key` in an array that contains it and has room for a multiple of 64 elements.
template <class T>
INLINE int64_t first_equal(const T* keys, T key) {
  int64_t at = 0;
  for (;; at += 64) {
    int found = 0;
    for (int64_t j = 0; j < 64; ++j) found |= keys[at + j] == key;
    if (found) break;
  }
  while (keys[at] != key) ++at;
  return at;
}

// ---- scans

INLINE double log_add_exp(double a, double b) {  // log(exp(a) + exp(b)), NaN if either is
  const double low = minimum(a, b), high = maximum(a, b);
  return low == high && absolute(low) == (double)INFINITY ? low : high + log1p(exp(low - high));
}

// Scans x[i] for i < count; `so_far` is the combination of all elements before x[0], and is updated.
template <class Combine, class T>
INLINE void scan_in_order(T* x, int64_t count, T& so_far) {
  for (int64_t i = 0; i < count; ++i) x[i] = so_far = Combine::of(so_far, x[i]);
}

// Scans in another order, without dependences between lanes of a vector: it combines groups of four neighbours, then
// four groups, then these 16 elements with the result 16 positions before, which covers the rest. If it were inlined,
// GCC 12 would not vectorize its loops.
template <class Combine, class T>
static __attribute__((noinline)) void scan(T* x, int64_t count, T& so_far, T nothing) {
  enum { PART = 256 };
  T fours[PART + 12];  // fours[12 + i] covers i - 3 ... i
  for (int64_t i = 0; i < 12; ++i) fours[i] = nothing;
  for (; count > 0; x += PART, count -= PART) {
    const int64_t part = count < PART ? count : PART;
    T first = nothing;
    for (int64_t i = 0; i < 3 && i < part; ++i) fours[12 + i] = first = Combine::of(first, x[i]);
#pragma omp simd
    for (int64_t i = 3; i < part; ++i) {
      fours[12 + i] = Combine::of(Combine::of(x[i - 3], x[i - 2]), Combine::of(x[i - 1], x[i]));
    }
    const int64_t head = part < 16 ? part : 16;
#pragma omp simd
    for (int64_t i = 0; i < head; ++i) {
      const T near = Combine::of(fours[i + 8], fours[i + 12]);
      x[i] = Combine::of(so_far, Combine::of(Combine::of(fours[i], fours[i + 4]), near));
    }
#pragma omp simd safelen(16)
    for (int64_t i = 16; i < part; ++i) {
      const T near = Combine::of(fours[i + 8], fours[i + 12]);
      x[i] = Combine::of(x[i - 16], Combine::of(Combine::of(fours[i], fours[i + 4]), near));
    }
    so_far = x[part - 1];
  }
}

struct Sum {
  template <class T> INLINE T of(T a, T b) { return T(a + b); }
};
struct Product {
  template <class T> INLINE T of(T a, T b) { return T(a * b); }
};
struct Maximum {
  template <class T> INLINE T of(T a, T b) { return a > b ? a : b; }
};
struct Minimum {
  template <class T> INLINE T of(T a, T b) { return a < b ? a : b; }
};
struct LogAddExp {
  INLINE double of(double a, double b) { return log_add_exp(a, b); }
};

template <class T>
INLINE void scan_sums(T* x, int64_t count, T& so_far) { scan_in_order<Sum>(x, count, so_far); }
INLINE void scan_sums(double* x, int64_t count, double& so_far) { scan<Sum>(x, count, so_far, 0.0); }
template <class T>  // floats in order, too: 1e300 * 1e300 * 0 is NaN or 0, depending on the order
INLINE void scan_products(T* x, int64_t count, T& so_far) { scan_in_order<Product>(x, count, so_far); }
INLINE void scan_logs(double* x, int64_t count, double& so_far) { scan_in_order<LogAddExp>(x, count, so_far); }
// Computes running extremes of integers, or of floats mapped to integers by `ordered`, and their positions: the last of
// equal elements, with NaN before all numbers. x[0] is at position `first`; `so_far` is the extreme before x[0], at
// position `place`. `places` may be null. Most parts contain no element as good as `so_far` and are filled with it.
// Both zeros are compared as 0.0 (-0.0 is the integer before it); a result that is zero gets the sign of the last zero.
template <class Extreme, bool OfFloats, class T>
static __attribute__((noinline)) void scan_extremes(T* x, int64_t* places, int64_t count, int64_t first, T& so_far,
                                                    int64_t& place) {
  enum { PART = 256 };
  T given[PART], compared[PART];
  int32_t found[PART];
  for (; count > 0; x += PART, first += PART, count -= PART) {
    const int64_t part = count < PART ? count : PART, place_before = place;
    const T before = so_far, bar = OfFloats ? T(before + (before == -1)) : before;
    int32_t any = 0, negative_zeros = 0;
#pragma omp simd reduction(|: any, negative_zeros)
    for (int64_t i = 0; i < part; ++i) {
      const T number = OfFloats ? T(x[i] + (x[i] == -1)) : x[i];
      if (OfFloats) {
        given[i] = x[i];
        negative_zeros |= x[i] == -1;
      }
      x[i] = compared[i] = number;
      any |= Extreme::of(number, bar) == number;
    }
    if (!any) {
      for (int64_t i = 0; i < part; ++i) x[i] = before;
      if (places) {
        for (int64_t i = 0; i < part; ++i) places[i] = place_before;
      }
    } else {
      T best = bar;
      scan<Extreme>(x, part, best, bar);
      if (places) {
#pragma omp simd
        for (int64_t i = 0; i < part; ++i) found[i] = compared[i] == x[i] ? int32_t(i) : -1;
        int32_t last = -1;
        scan<Maximum>(found, part, last, last);
#pragma omp simd
        for (int64_t i = 0; i < part; ++i) places[i] = found[i] < 0 ? place_before : first + found[i];
        place = places[part - 1];
      }
      if (OfFloats && (negative_zeros | (before == -1))) {
#pragma omp simd
        for (int64_t i = 0; i < part; ++i) found[i] = compared[i] == 0 ? int32_t(2 * i + (given[i] == -1)) : -1;
        int32_t last = -1;
        scan<Maximum>(found, part, last, last);
#pragma omp simd
        for (int64_t i = 0; i < part; ++i) {
          const T zero = found[i] < 0 ? before : T(-(found[i] & 1));
          x[i] = x[i] == 0 ? zero : x[i];
        }
      }
      so_far = x[part - 1];
    }
    if (places) places += PART;
  }
}

template <bool OfFloats, class T>
INLINE void scan_maxima(T* x, int64_t count, T& so_far, int64_t* places, int64_t first, int64_t& place) {
  scan_extremes<Maximum, OfFloats>(x, places, count, first, so_far, place);
}
template <bool OfFloats, class T>
INLINE void scan_minima(T* x, int64_t count, T& so_far, int64_t* places, int64_t first, int64_t& place) {
  scan_extremes<Minimum, OfFloats>(x, places, count, first, so_far, place);
}
template <bool OfFloats, class T>
INLINE void scan_maxima(T* x, int64_t count, T& so_far) {
  int64_t place = 0;
  scan_maxima<OfFloats>(x, count, so_far, nullptr, 0, place);
}
template <bool OfFloats, class T>
INLINE void scan_minima(T* x, int64_t count, T& so_far) {
  int64_t place = 0;
  scan_minima<OfFloats>(x, count, so_far, nullptr, 0, place);
}

// Updates the running extreme by (x, at); the later of equal elements wins, and a NaN wins over every number.
template <class T>
INLINE int64_t running_argmax(T x, int64_t at, T& best, int64_t& best_at) {
  const bool later = (x != x) | (x >= best);
  best = later ? x : best;
  return best_at = later ? at : best_at;
}
template <class T>
INLINE int64_t running_argmin(T x, int64_t at, T& best, int64_t& best_at) {
  const bool later = (x != x) | (x <= best);
  best = later ? x : best;
  return best_at = later ? at : best_at;
}

// ---- transposed reads: blocks of memory are transposed in registers; reading columns would load elements one by one

template <int Bytes> struct bits_type;
template <> struct bits_type<1> { using type = uint8_t; };
template <> struct bits_type<2> { using type = uint16_t; };
template <> struct bits_type<4> { using type = uint32_t; };
template <> struct bits_type<8> { using type = uint64_t; };

#if defined(VECTOR_BYTES) && !defined(__clang__)
// Loads pieces of 16 bytes that are `step` bytes apart in memory into one vector.
typedef uint64_t Pieces1 __attribute__((vector_size(16)));
typedef uint64_t Pieces2 __attribute__((vector_size(32)));
typedef uint64_t Pieces4 __attribute__((vector_size(64)));
INLINE void gather_pieces(Pieces1& to, const char* from, int64_t) { memcpy(&to, from, sizeof(to)); }
#if __GNUC__ >= 12
INLINE void gather_pieces(Pieces2& to, const char* from, int64_t step) {
  Pieces1 low, high;
  gather_pieces(low, from, step);
  gather_pieces(high, from + step, step);
  to = __builtin_shufflevector(low, high, 0, 1, 2, 3);
}
INLINE void gather_pieces(Pieces4& to, const char* from, int64_t step) {
  Pieces2 low, high;
  gather_pieces(low, from, step);
  gather_pieces(high, from + 2 * step, step);
  to = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}
#endif

// to[i][j] = from[j][i] for i < 16 / sizeof(T), j < VECTOR_BYTES / sizeof(T). Every 16 bytes of a vector hold a square,
// because one cheap instruction interleaves two vectors within 16 bytes. Rows i and i + side/2 are interleaved; this is
// repeated log2(side) times.
template <class T>
INLINE void transpose_squares(T* to, int64_t to_step, const T* from, int64_t from_step) {
  constexpr int side = 16 / sizeof(T), width = VECTOR_BYTES / sizeof(T);
  typedef T Row __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint64_t Pieces __attribute__((vector_size(VECTOR_BYTES)));
  Row rows[side], low, high;
  for (int i = 0; i < width; ++i) {
    low[i] = T(i / side * side + i % side / 2 + (i & 1) * width);
    high[i] = T(low[i] + side / 2);
  }
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) {
    Pieces pieces;
    gather_pieces(pieces, (const char*)(from + i * from_step), side * from_step * sizeof(T));
    rows[i] = (Row)pieces;
  }
#pragma GCC unroll 4
  for (int round = 1; round < side; round *= 2) {
    Row next[side];
#pragma GCC unroll 8
    for (int i = 0; i < side / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + side / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + side / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < side; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) memcpy(to + i * to_step, &rows[i], sizeof(Row));
}
#endif

// tile[i][j] = from[i + step * j] for i < rows <= Rows, j < columns <= Columns. The tile has room for Rows x Columns
// elements; vectors leave arbitrary numbers in the others, which are not read.
template <int Rows, int Columns, class T>
INLINE void transpose_tile(T* tile, const T* from, int64_t step, int64_t rows, int64_t columns) {
#if defined(VECTOR_BYTES) && !defined(__clang__)
  using Bits = typename bits_type<sizeof(T)>::type;
  constexpr int side = 16 / sizeof(T), width = VECTOR_BYTES / sizeof(T);
  static_assert(Rows % side == 0 && Columns % width == 0, "a tile is whole vectors");
  // More than 16 cache lines whose distance is a power of two would evict each other from one set of the nearest cache
  // (8 to 12 lines) before they are used up, so such a block is copied first. A block that does not fill the tile is
  // copied, too, so that vectors read only inside of it.
  if (width <= 16 && rows == Rows && columns == Columns) {
    for (int64_t j = 0; j < Columns; j += width)
      for (int64_t i = 0; i < Rows; i += side)
        transpose_squares<Bits>((Bits*)tile + i * Columns + j, Columns, (const Bits*)from + i + step * j, step);
    return;
  }
  T copy[Columns * Rows];
  if (rows == Rows)
    for (int64_t j = 0; j < columns; ++j) memcpy(copy + Rows * j, from + step * j, Rows * sizeof(T));
  else
    for (int64_t j = 0; j < columns; ++j) memcpy(copy + Rows * j, from + step * j, rows * sizeof(T));
  for (int64_t j = 0; j < columns; j += width)
    for (int64_t i = 0; i < rows; i += side)
      transpose_squares<Bits>((Bits*)tile + i * Columns + j, Columns, (const Bits*)copy + i + Rows * j, Rows);
#else
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) tile[i * Columns + j] = from[i + step * j];
#endif
}

// ---- index arithmetic (beside floor_div and remainder_; the printer uses / and % if both sides are nonnegative)

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

