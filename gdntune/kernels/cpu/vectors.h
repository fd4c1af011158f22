// Vectors of `vec` fp32 lanes, the state's dtypes in memory, and the mathematics of the gates.
//
// GCC vector extensions instead of intrinsics: one text serves SSE, AVX, AVX-512 and Arm. Plain loops reached 70% of
// streaming bandwidth where these reached 93% (AMD EPYC, AVX-512). Nothing here needs -ffast-math, which would flush
// denormals in the whole process. All names are in an anonymous namespace: objects of different settings are linked
// into one library.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

// The 16-bit dtypes by their bits. GCC has _Float16 on x86 from 12 on only; where F16C's instructions are not at hand
// the compiler's type is asked.
struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
#if defined(__aarch64__)
typedef __fp16 NativeHalf;
#elif !defined(__F16C__)
typedef _Float16 NativeHalf;
#endif

// A vector of N lanes of T, and the same with the alignment of one element, as it lies in a pool of any stride.
template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
  typedef T loose __attribute__((vector_size(sizeof(T) * N), aligned(alignof(T)), may_alias));
};
template <class T, int N>
using Vector = typename VectorOf<T, N>::type;
template <class T, int N>
using Loose = typename VectorOf<T, N>::loose;

template <int N>
using Floats = Vector<float, N>;
template <int N>
using Ints = Vector<int32_t, N>;
template <int N>
using Words = Vector<uint32_t, N>;

// One element.
inline float value(const float* p) { return *p; }
inline float value(const Bf16* p) {
  const uint32_t bits = uint32_t(p->bits) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float value(const Half* p) {
#if defined(__F16C__)
  const Vector<short, 8> raw = {static_cast<short>(p->bits)};
  return __builtin_ia32_vcvtph2ps(raw)[0];
#else
  NativeHalf x;
  memcpy(&x, p, 2);
  return static_cast<float>(x);
#endif
}

template <int N, class V>
inline auto join(V low, V high) {
  Vector<std::decay_t<decltype(low[0])>, 2 * N> r;
  memcpy(&r, &low, sizeof(low));
  memcpy(reinterpret_cast<char*>(&r) + sizeof(low), &high, sizeof(high));
  return r;
}

// By shuffles where there are: GCC 12 sends a memcpy through the stack.
template <int N, bool upper, int... I>
inline Floats<N / 2> half_of(Floats<N> x, std::integer_sequence<int, I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, x, (I + upper * N / 2)...);
#else
  return Floats<N / 2>{x[I + upper * N / 2]...};
#endif
}
template <int N, bool upper>
inline Floats<N / 2> half_of(Floats<N> x) {
  return half_of<N, upper>(x, std::make_integer_sequence<int, N / 2>{});
}

template <int N>
inline Floats<N> splat(float x) {
  return x - Floats<N>{};
}

template <int N>
inline Floats<N> load(const float* p) {
  return *reinterpret_cast<const Loose<float, N>*>(p);
}

template <int N>
inline void store(float* p, Floats<N> x) {
  *reinterpret_cast<Loose<float, N>*>(p) = x;
}

template <int N>
inline Floats<N> load(const Bf16* p) {
  Vector<uint16_t, N> raw = *reinterpret_cast<const Loose<uint16_t, N>*>(&p->bits);
  return (Floats<N>)(__builtin_convertvector(raw, Words<N>) << 16);
}

// To nearest, ties to even, in the upper half of each lane; by integers, since avx512_bf16's instruction would flush
// denormals. A NaN stays one where its lower half is zero, as `canonical` sees to: the arithmetic only hands on NaNs
// that it was given.
template <int N>
inline Words<N> round_to_bf16(Floats<N> x) {
  const Words<N> bits = (Words<N>)x;
  return bits + 0x7fff + ((bits >> 16) & 1);
}

template <int N>
inline Floats<N> canonical(Floats<N> x) {
  return x == x ? x : splat<N>(__builtin_nanf(""));
}

template <int N>
inline void store(Bf16* p, Floats<N> x) {
  const Words<N> upper = round_to_bf16<N>(canonical<N>(x)) >> 16;
  *reinterpret_cast<Loose<uint16_t, N>*>(&p->bits) = __builtin_convertvector(upper, Vector<uint16_t, N>);
}

// GCC 12 turns vector conversions of _Float16 into scalar ones, so F16C's are named. 4: round as the thread's rounding
// mode says.
template <int N>
inline Floats<N> load(const Half* p) {
#if defined(__F16C__)
  if constexpr (N == 4) {
    Vector<short, 8> raw{};
    memcpy(&raw, p, 8);
    return __builtin_ia32_vcvtph2ps(raw);
  } else if constexpr (N == 8) {
    return __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const Loose<short, 8>*>(p));
  } else {
#if defined(__AVX512F__)
    return __builtin_ia32_vcvtph2ps512_mask(*reinterpret_cast<const Loose<short, 16>*>(p), Floats<16>{}, -1, 4);
#else
    return join<8>(load<8>(p), load<8>(p + 8));
#endif
  }
#else
  Floats<N> x;
  for (int i = 0; i < N; i++) x[i] = value(p + i);
  return x;
#endif
}

template <int N>
inline Vector<short, N> to_half(Floats<N> x) {
#if defined(__F16C__)
  if constexpr (N == 4) {
    const auto eight = __builtin_ia32_vcvtps2ph(x, 4);
    Vector<short, 4> raw;
    memcpy(&raw, &eight, 8);
    return raw;
  } else if constexpr (N == 8) {
    return __builtin_ia32_vcvtps2ph256(x, 4);
  } else {
#if defined(__AVX512F__)
    return __builtin_ia32_vcvtps2ph512_mask(x, 4, Vector<short, 16>{}, -1);
#else
    return join<8>(to_half<8>(half_of<16, false>(x)), to_half<8>(half_of<16, true>(x)));
#endif
  }
#else
  Vector<short, N> raw;
  for (int i = 0; i < N; i++) {
    const NativeHalf h = static_cast<NativeHalf>(x[i]);
    short bits;
    memcpy(&bits, &h, 2);
    raw[i] = bits;
  }
  return raw;
#endif
}

template <int N>
inline void store(Half* p, Floats<N> x) {
  const auto raw = to_half<N>(x);
  memcpy(p, &raw, sizeof(raw));
}

// What one access to the state moves: `parts` vectors. bf16 comes in pairs: each of N words of 32 bits holds an even
// element in its lower and an odd one in its upper half, so that a shift and a mask convert 2N elements, where widening
// 16 bits to 32 takes three instructions for N (GCC 12, AVX-512). The price is an order of the lanes, even elements
// first, that everything multiplied with them must share: `arrange`.
template <class State, int N>
struct Pack {
  static constexpr int parts = std::is_same_v<State, Bf16> ? 2 : 1, size = parts * N;
  Floats<N> part[parts];
};

template <class State, int N>
inline Pack<State, N> load_pack(const float* p) {
  Pack<State, N> r;
  for (int i = 0; i < r.parts; i++) r.part[i] = load<N>(p + i * N);
  return r;
}

template <class State, int N>
inline void store_pack(float* p, const Pack<State, N>& x) {
  for (int i = 0; i < x.parts; i++) store<N>(p + i * N, x.part[i]);
}

template <class State, int N>
inline Pack<State, N> load_pack(const Half* p) {
  return {{load<N>(p)}};
}

template <class State, int N>
inline Pack<State, N> load_pack(const Bf16* p) {
  const Words<N> pair = *reinterpret_cast<const Loose<uint32_t, N>*>(p);
  return {{(Floats<N>)(pair << 16), (Floats<N>)(pair & 0xffff0000u)}};
}

// A pack as it lies in memory: rounded once where it is stored twice.
template <int N>
inline Floats<N> rounded(const Pack<float, N>& x) {
  return x.part[0];
}
template <int N>
inline auto rounded(const Pack<Half, N>& x) {
  return to_half<N>(x.part[0]);
}
template <int N>
inline Words<N> rounded(const Pack<Bf16, N>& x) {
  return round_to_bf16<N>(x.part[0]) >> 16 | (round_to_bf16<N>(x.part[1]) & 0xffff0000u);
}

// `around` goes around the cache where the machine can and `p` is aligned: lines that are written whole and not read
// soon need not be fetched first (T=4 writes a read: 2.0 instead of 2.7 ms, AMD EPYC, one thread). `settle` orders such
// stores before what follows.
template <bool around, class State, class Raw>
inline void store_raw(State* p, Raw raw) {
  float* to = reinterpret_cast<float*>(p);
  if (around && reinterpret_cast<uintptr_t>(p) % sizeof(raw) == 0) {
#if defined(__AVX512F__)
    if constexpr (sizeof(raw) == 64) return __builtin_ia32_movntps512(to, (Floats<16>)raw);
#endif
#if defined(__AVX__)
    if constexpr (sizeof(raw) == 32) return __builtin_ia32_movntps256(to, (Floats<8>)raw);
#endif
#if defined(__SSE__)
    if constexpr (sizeof(raw) == 16) return __builtin_ia32_movntps(to, (Floats<4>)raw);
#endif
  }
  memcpy(to, &raw, sizeof(raw));
}

inline void settle() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}

// n elements in the order of a pack's lanes, and back.
template <class State, int N>
inline void arrange(float* p, int n, bool back = false) {
  if constexpr (Pack<State, N>::parts == 2) {
    Ints<N> first, second;
    for (int i = 0; i < N; i++) {
      first[i] = back ? i / 2 + i % 2 * N : 2 * i;
      second[i] = back ? (i + N) / 2 + i % 2 * N : 2 * i + 1;
    }
    for (int i = 0; i < n; i += 2 * N) {
      Floats<N> x = load<N>(p + i), y = load<N>(p + i + N);
      store<N>(p + i, __builtin_shuffle(x, y, first));
      store<N>(p + i + N, __builtin_shuffle(x, y, second));
    }
  }
}

// The sums of four vectors' lanes, in the order a, c, b, d. Pairs of vectors are added lane by lane crosswise, so that
// four sums cost three such steps and log2(N/4) halvings instead of four times log2(N).
template <int N>
inline Floats<N> add_crosswise(Floats<N> x, Floats<N> y) {
  Ints<N> low, high;
  for (int i = 0; i < N; i++) {
    low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * N;
    high[i] = low[i] + 2;
  }
  return __builtin_shuffle(x, y, low) + __builtin_shuffle(x, y, high);
}

template <int N>
inline Floats<4> fold(Floats<N> x) {
  if constexpr (N == 4) return x;
  else return fold<N / 2>(half_of<N, false>(x) + half_of<N, true>(x));
}

template <int N>
inline Floats<4> sums(Floats<N> a, Floats<N> b, Floats<N> c, Floats<N> d) {
  return fold<N>(add_crosswise<N>(add_crosswise<N>(a, b), add_crosswise<N>(c, d)));
}

template <int N>
inline float sum(Floats<N> x) {
  Floats<4> s = fold<N>(x);
  return (s[0] + s[1]) + (s[2] + s[3]);
}

// exp(x) within 2 ulp, denormal results included; NaN stays NaN.
template <int N>
inline Floats<N> exp_of(Floats<N> x) {
  x = x < -104.0f ? splat<N>(-104.0f) : x;
  x = x > 89.0f ? splat<N>(89.0f) : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const Floats<N> shift = splat<N>(12582912.0f);
  Floats<N> t = x * 1.44269504f + shift;
  Ints<N> n = (Ints<N>)t - (Ints<N>)shift;
  t -= shift;
  Floats<N> r = x - t * 0.693359375f;
  r += t * 2.12194440e-4f;
  Floats<N> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  // 2^n in two factors, since n reaches -150 and 128.
  Ints<N> half = n >> 1;
  return y * (Floats<N>)((half + 127) << 23) * (Floats<N>)((n - half + 127) << 23);
}

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)): no exp overflows. log1p(t) = 2 atanh(t / (2 + t)), whose series to
// the 13th power is within 1.4e-8 for t <= 1, relative also at small t.
template <int N>
inline Floats<N> softplus_of(Floats<N> x) {
  Floats<N> t = exp_of<N>(x > 0.0f ? -x : x);
  Floats<N> s = t / (t + 2.0f);
  Floats<N> w = s * s;
  Floats<N> y = w * (2.0f / 13.0f) + 2.0f / 11.0f;
  y = y * w + 2.0f / 9.0f;
  y = y * w + 2.0f / 7.0f;
  y = y * w + 2.0f / 5.0f;
  y = y * w + 2.0f / 3.0f;
  y = y * w + 2.0f;
  return (x > 0.0f ? x : Floats<N>{}) + y * s;
}

template <int N>
inline Floats<N> sigmoid_of(Floats<N> x) {
  return 1.0f / (exp_of<N>(-x) + 1.0f);
}

}  // namespace
