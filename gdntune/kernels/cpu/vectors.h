// Vectors of `vec` fp32 lanes, the state's dtypes in memory, and the mathematics of the gates.
//
// GCC vector extensions instead of intrinsics: one text serves SSE, AVX, AVX-512 and Arm. Plain loops reached 70% of streaming bandwidth
// where these reached 93% (AMD EPYC, AVX-512). Nothing here needs -ffast-math, which would flush denormals in the whole process.
// All names are in an anonymous namespace: objects of different settings are linked into one library.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif
struct Bf16 {
  uint16_t bits;
};


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

// To nearest, ties to even, in the upper half of each lane; by integers, since avx512_bf16's instruction would flush denormals. NaN stays NaN.
template <int N>
inline Words<N> round_to_bf16(Floats<N> x) {
  Words<N> bits = (Words<N>)x;
  Words<N> rounded = bits + 0x7fff + ((bits >> 16) & 1);
  Words<N> quiet = bits * 0 + 0x7fc00000;
  return x == x ? rounded : quiet;
}

template <int N>
inline void store(Bf16* p, Floats<N> x) {
  *reinterpret_cast<Loose<uint16_t, N>*>(&p->bits) = __builtin_convertvector(round_to_bf16<N>(x) >> 16, Vector<uint16_t, N>);
}

// GCC 12 turns vector conversions of _Float16 into scalar ones, so F16C's are named. 4: round as the thread's rounding mode says.
template <int N>
inline Floats<N> load(const Half* p) {
#if defined(__F16C__)
  if constexpr (N == 4) {
    int64_t raw;
    memcpy(&raw, p, 8);
    typedef int64_t Two __attribute__((vector_size(16)));
    typedef short Eight __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps((Eight)Two{raw, 0});
  } else if constexpr (N == 8) {
    return __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const Loose<short, 8>*>(p));
  } else {
#if defined(__AVX512F__)
    return __builtin_ia32_vcvtph2ps512_mask(*reinterpret_cast<const Loose<short, 16>*>(p), Floats<16>{}, -1, 4);
#else
    Floats<8> low = load<8>(p), high = load<8>(p + 8);
    Floats<16> x;
    memcpy(&x, &low, 32);
    memcpy(reinterpret_cast<char*>(&x) + 32, &high, 32);
    return x;
#endif
  }
#else
  Floats<N> x;
  for (int i = 0; i < N; i++) x[i] = static_cast<float>(p[i]);
  return x;
#endif
}

template <int N>
inline void store(Half* p, Floats<N> x) {
#if defined(__F16C__)
  if constexpr (N == 4) {
    auto raw = __builtin_ia32_vcvtps2ph(x, 4);
    memcpy(p, &raw, 8);
  } else if constexpr (N == 8) {
    auto raw = __builtin_ia32_vcvtps2ph256(x, 4);
    memcpy(p, &raw, 16);
  } else {
#if defined(__AVX512F__)
    auto raw = __builtin_ia32_vcvtps2ph512_mask(x, 4, Vector<short, 16>{}, -1);
    memcpy(p, &raw, 32);
#else
    Floats<8> low, high;
    memcpy(&low, &x, 32);
    memcpy(&high, reinterpret_cast<char*>(&x) + 32, 32);
    store<8>(p, low);
    store<8>(p + 8, high);
#endif
  }
#else
  for (int i = 0; i < N; i++) p[i] = static_cast<Half>(x[i]);
#endif
}

template <int N>
inline Floats<N> splat(float x) {
  return x - Floats<N>{};
}

// One element of any stride.
inline float value(const float* p) { return *p; }
inline float value(const Half* p) { return static_cast<float>(*p); }
inline float value(const Bf16* p) {
  const uint32_t bits = uint32_t(p->bits) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// What one access to the state moves: `parts` vectors. bf16 comes in pairs: N words of 32 bits hold the even elements in their upper and the odd
// ones in their lower halves' places, so that a shift and a mask convert 2N elements, where widening 16 bits to 32 takes three instructions for N
// (GCC 12, AVX-512). The price is an order of the lanes, even elements first, that everything multiplied with them must share: `arrange`.
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
inline void store_pack(Half* p, const Pack<State, N>& x) {
  store<N>(p, x.part[0]);
}

template <class State, int N>
inline Pack<State, N> load_pack(const Bf16* p) {
  Words<N> pair = *reinterpret_cast<const Loose<uint32_t, N>*>(p);
  return {{(Floats<N>)(pair << 16), (Floats<N>)(pair & 0xffff0000u)}};
}

template <class State, int N>
inline void store_pack(Bf16* p, const Pack<State, N>& x) {
  *reinterpret_cast<Loose<uint32_t, N>*>(p) = round_to_bf16<N>(x.part[0]) >> 16 | (round_to_bf16<N>(x.part[1]) & 0xffff0000u);
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

// The sums of four vectors' lanes, in the order a, c, b, d. Pairs of vectors are added lane by lane crosswise, so that four sums cost three
// such steps and log2(N/4) halvings instead of four times log2(N).
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
  if constexpr (N == 4) {
    return x;
  } else {
    Floats<N / 2> low, high;
    memcpy(&low, &x, sizeof(low));
    memcpy(&high, reinterpret_cast<char*>(&x) + sizeof(low), sizeof(high));
    return fold<N / 2>(low + high);
  }
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

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)): no exp overflows. log1p(t) = 2 atanh(t / (2 + t)), whose series to the 13th power is
// within 1.4e-8 for t <= 1, relative also at small t.
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
