// What every generated kernel starts with: element-wise functions with torch's meaning, written so that a compiler
// can vectorize loops over them. No C++ library headers: they would cost more to parse than a kernel to compile.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// glibc has vector versions of its math functions (libmvec). Its header announces them under -ffast-math only, which
// would break NaN and infinity; so they are announced here. clang finds them through -fveclib.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define VECTORIZED_1(name)                                                                      \
  extern "C" __attribute__((simd("notinbranch"), const)) double name(double) noexcept;          \
  extern "C" __attribute__((simd("notinbranch"), const)) float name##f(float) noexcept;
#define VECTORIZED_2(name)                                                                      \
  extern "C" __attribute__((simd("notinbranch"), const)) double name(double, double) noexcept;  \
  extern "C" __attribute__((simd("notinbranch"), const)) float name##f(float, float) noexcept;
#if __GLIBC_PREREQ(2, 22)
VECTORIZED_1(exp)
VECTORIZED_1(log)
VECTORIZED_1(sin)
VECTORIZED_1(cos)
VECTORIZED_2(pow)
#endif
#if __GLIBC_PREREQ(2, 35)
VECTORIZED_1(exp2)
VECTORIZED_1(expm1)
VECTORIZED_1(log2)
VECTORIZED_1(log10)
VECTORIZED_1(log1p)
VECTORIZED_1(tan)
VECTORIZED_1(asin)
VECTORIZED_1(acos)
VECTORIZED_1(atan)
VECTORIZED_1(sinh)
VECTORIZED_1(cosh)
VECTORIZED_1(tanh)
VECTORIZED_1(asinh)
VECTORIZED_1(acosh)
VECTORIZED_1(atanh)
VECTORIZED_1(erf)
VECTORIZED_1(erfc)
VECTORIZED_2(atan2)
VECTORIZED_2(hypot)
#endif
#endif

#define INLINE static inline __attribute__((always_inline))

template <class To, class From>
INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- memory formats; branch-free integer code, because compilers do not vectorize short float types everywhere

INLINE float load_bf16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

INLINE uint16_t store_bf16(float x) {  // to nearest, ties to even
  const uint32_t u = bits<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t(x != x ? 0x7fc0u : rounded);
}

// The number of `Mantissa` bits and an exponent biased by `Bias` that is nearest to a positive float, ties to even, as
// its bits; exponents have no end above. `u`: the float's bits.
template <int Mantissa, int Bias>
INLINE uint32_t nearest(uint32_t u) {
  constexpr uint32_t least = (128u - Bias) << 23;  // the smallest normal number; those below share its unit
  const uint32_t power = u & 0x7f800000u, unit = power < least ? least : power;
  // Beside a power of two so much larger the adder drops what is less than a unit, and rounds for us.
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

// There is no infinity: what lies beyond 448 is 448, and NaN above E4M3_END.
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
INLINE float round_bf16(float x) { return load_bf16(store_bf16(x)); }
INLINE float round_f16(float x) { return load_f16(store_f16(x)); }

// ---- integers as torch has them: they wrap, and dividing by zero yields -1 (eager raises; a kernel cannot)

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
  T q = (a - rest) / b;  // a whole number but for one rounding
  if (rest != 0 && (b < 0) != (rest < 0)) q -= T(1);
  if (q == 0) return T(copysign(0.0, double(a / b)));
  T low = T(floor(double(q)));
  return q - low > T(0.5) ? low + T(1) : low;
}
INLINE float floor_div(float a, float b) { return float_floor_div(a, b); }
INLINE double floor_div(double a, double b) { return float_floor_div(a, b); }

template <class T>
INLINE T remainder_(T a, T b) {  // the divisor's sign, as in Python
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
INLINE float power(float a, float b) { return powf(a, b); }
INLINE double power(double a, double b) { return pow(a, b); }

template <class T>
INLINE T shift_left(T a, T by) {  // 0 when all bits leave, as in eager
  using U = typename unsigned_of<T>::type;
  return U(by) < 8 * sizeof(T) ? T(U(a) << U(by)) : T(0);
}
template <class T>
INLINE T shift_right(T a, T by) {  // all sign when all bits leave
  using U = typename unsigned_of<T>::type;
  return U(by) < 8 * sizeof(T) ? T(a >> by) : T(a < 0 ? -1 : 0);
}

// ---- functions of one or two numbers

template <class T>
INLINE T absolute(T x) { return x < 0 ? T(0 - x) : x; }
INLINE float absolute(float x) { return fabsf(x); }
INLINE double absolute(double x) { return fabs(x); }

template <class T>
INLINE T sign(T x) { return T((x > 0) - (x < 0)); }

template <class T>
INLINE T maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }  // NaN if either is
template <class T>
INLINE T minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }

template <class T>
INLINE T relu(T x) { return x < 0 ? T(0) : x; }

// exp of float32 is what training kernels spend their time in. Inline it keeps a loop's registers, and is within one
// unit in the last place (libmvec: 2.6), over the whole range, subnormal results, infinities and NaN included.
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
  const int32_t half = whole >> 1;  // 2^n in two factors: n may leave the range of an exponent
  p = p * bits<float>((half + 127) << 23) * bits<float>((whole - half + 127) << 23);
  p = x < -104.0f ? 0.0f : p;
  return x > 89.0f ? INFINITY : p;  // NaN has come through
}
#else
INLINE float exponential(float x) { return expf(x); }
#endif
INLINE double exponential(double x) { return exp(x); }

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE double sigmoid(double x) { return 1.0 / (1.0 + exponential(-x)); }

INLINE bool sign_bit(float x) { return int32_t(bits<uint32_t>(x)) < 0; }
INLINE bool sign_bit(double x) { return int64_t(bits<uint64_t>(x)) < 0; }
template <class T>
INLINE bool sign_bit(T x) { return x < 0; }

// ---- random numbers: Philox 4x32-10, word `position` of a stream (runtime/philox.py says which)

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

// Integers in the order of floats, NaN beyond every number: compilers vectorize an integer max, a NaN-aware one not.
// -0.0 comes before 0.0.
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

// Whether (x, at) is the better argmax: NaN first, then the larger, then the earlier.
template <class T>
INLINE bool before_max(T x, int64_t at, T best, int64_t best_at) {
  const bool nan = x != x, best_nan = best != best;
  return nan != best_nan ? nan : (x > best) | ((x == best) | nan) & (at < best_at);
}
template <class T>
INLINE bool before_min(T x, int64_t at, T best, int64_t best_at) {
  const bool nan = x != x, best_nan = best != best;
  return nan != best_nan ? nan : (x < best) | ((x == best) | nan) & (at < best_at);
}

// Where `key` is found first in an array that holds it, and that has room for a multiple of 64.
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

// Takes (x, at) into the extreme so far; a later one wins ties, a NaN wins over every number.
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

// ---- transposed reads: a block of memory turned round in registers, where reading it column by column would take each
// element by itself

template <int Bytes> struct bits_type;
template <> struct bits_type<1> { using type = uint8_t; };
template <> struct bits_type<2> { using type = uint16_t; };
template <> struct bits_type<4> { using type = uint32_t; };
template <> struct bits_type<8> { using type = uint64_t; };

#if defined(__GNUC__) && !defined(__clang__)
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 16
#endif
// to[i][j] = from[j][i] for i, j < Width, a power of two: rows i and i + Width/2 are interleaved log2(Width) times.
template <class T, int Width>
INLINE void transpose_square(T* to, int64_t to_step, const T* from, int64_t from_step) {
  typedef T Row __attribute__((vector_size(Width * sizeof(T))));
  Row rows[Width], low, high;
  for (int i = 0; i < Width; ++i) {
    low[i] = T((i & 1) * Width + i / 2);
    high[i] = T((i & 1) * Width + i / 2 + Width / 2);
  }
#pragma GCC unroll 16
  for (int i = 0; i < Width; ++i) memcpy(&rows[i], from + i * from_step, sizeof(Row));
#pragma GCC unroll 4
  for (int round = 1; round < Width; round *= 2) {
    Row next[Width];
#pragma GCC unroll 8
    for (int i = 0; i < Width / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + Width / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + Width / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < Width; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < Width; ++i) memcpy(to + i * to_step, &rows[i], sizeof(Row));
}
#endif

// tile[i][j] = from[i + step * j] for i < rows, j < columns; a row of the tile has room for `Columns` elements.
template <int Columns, class T>
INLINE void transpose_tile(T* tile, const T* from, int64_t step, int64_t rows, int64_t columns) {
  int64_t done = 0;
#ifdef VECTOR_BYTES
  using Bits = typename bits_type<sizeof(T)>::type;
  constexpr int width = VECTOR_BYTES / sizeof(T) < 16 ? VECTOR_BYTES / sizeof(T) : 16;
  const int64_t whole = rows / width * width;
  for (; done + width <= columns; done += width)
    for (int64_t i = 0; i < whole; i += width)
      transpose_square<Bits, width>((Bits*)tile + i * Columns + done, Columns, (const Bits*)from + i + step * done, step);
  for (int64_t j = 0; j < done; ++j)
    for (int64_t i = whole; i < rows; ++i) tile[i * Columns + j] = from[i + step * j];
#endif
  for (int64_t j = done; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) tile[i * Columns + j] = from[i + step * j];
}

// ---- index arithmetic (the printer uses / and % where both sides are known to be positive)

INLINE int64_t floor_mod(int64_t a, int64_t b) {
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

