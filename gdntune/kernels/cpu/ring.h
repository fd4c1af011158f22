// The gated delta rule behind a ring of corrections, as gdntune/kernels/spec.py lays it out: head by head, the live
// entries are folded into an fp32 copy of the state, and the tokens follow one after the other.
//
// Plain loops: it says what is right where there is no GPU; no speed is asked of it.
#pragma once

#include <memory>

#include "decode.h"

namespace {

// clang-format off
enum RingArgument {
  RING_K = ARGUMENTS, RING_U, RING_DECAY, RING_BASE, RING_COUNT, FLUSH_MIN, APPEND, RING_SEED, RING_ARGUMENTS,
};
constexpr auto RING_NAMES = names_with({
  "ring_k", "ring_u", "ring_decay", "ring_base", "ring_count", "flush_min", "append", "ring_seed",
});
// clang-format on

// A call's ring. Entry i of a window is at row (base + i) % rows.
struct Entries {
  Tensor k, u, decay, base, count, seed;
  int64_t rows, flush_min;
  bool append;
};

// A request's window: its live entries, and whether they are folded.
struct Window {
  int64_t base, count;
  bool folds;
};

// Philox-4x32 with seven rounds (Salmon et al., SC 2011): four words of a counter under a key.
inline void philox(uint32_t c[4], uint32_t x, uint32_t y) {
  for (int round = 0; round < 7; round++) {
    const uint64_t p = uint64_t(0xD2511F53) * c[0], q = uint64_t(0xCD9E8D57) * c[2];
    const uint32_t next[4] = {uint32_t(q >> 32) ^ c[1] ^ x, uint32_t(q), uint32_t(p >> 32) ^ c[3] ^ y, uint32_t(p)};
    memcpy(c, next, sizeof(next));
    x += 0x9E3779B9, y += 0xBB67AE85;
  }
}

template <class Setting, int capacity, bool at_random>
class Ring : Decode<Setting> {
  using Base = Decode<Setting>;
  using State = typename Setting::State;
  static constexpr int K = Setting::K, vec = Setting::vec;

  static Entries entries_of(const Arguments& given, Call& c) {
    Entries e{};
    int64_t slots = c.state.size[0], k = K;
    e.rows = -1;
    e.k = given.tensor(RING_K, c.k.type, "[slots, H, rows, K]", {&slots, &c.H, &e.rows, &k}, true);
    e.u = given.tensor(RING_U, fp32 | bf16, "[slots, HV, rows, V]", {&slots, &c.HV, &e.rows, &c.V}, true);
    if (c.by_key) e.decay = given.tensor(RING_DECAY, fp32, "[slots, HV, rows, K]", {&slots, &c.HV, &e.rows, &k}, true);
    else e.decay = given.tensor(RING_DECAY, fp32, "[slots, HV, rows]", {&slots, &c.HV, &e.rows});
    e.base = given.tensor(RING_BASE, int32, "[B]", {&c.N});
    e.count = given.tensor(RING_COUNT, int32, "[B]", {&c.N});
    e.flush_min = std::min(int64_t(given.number(FLUSH_MIN)), capacity + 1 - c.T);
    e.append = given.number(APPEND) != 0;
    int64_t two = 2;
    if (at_random) e.seed = given.tensor(RING_SEED, int32, "[2]", {&two});
    if (e.rows < capacity + c.T) {
      refuse("ValueError", "ring_u: %lld rows were given, expected ring + T = %lld or more", (long long)e.rows,
             (long long)(capacity + c.T));
    }
    return e;
  }

  static Window window_of(const Entries& e, int64_t n) {
    const int64_t base = std::min(std::max<int64_t>(e.base.index(n), 0), e.rows - 1);
    const int64_t count = std::min(std::max<int64_t>(e.count.index(n), 0), std::min<int64_t>(capacity, e.rows));
    return {base, count, count >= e.flush_min};
  }

  // A head's state, [V, K] in fp32, from memory and back.
  static void read_state(const State* from, int64_t V, float* to) {
    for (int64_t v = 0; v < V; v++) {
      for (int64_t k = 0; k < K; k++) to[v * K + k] = value(from + (Setting::k_last ? v * K + k : k * V + v));
    }
  }
  static void write_state(const Entries& e, const float* from, int64_t V, int64_t hv, int64_t slot, State* to) {
    float row[512];
    const int64_t rows = Setting::k_last ? V : K, size = Setting::k_last ? K : V;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t i = 0; i < size; i++) row[i] = from[Setting::k_last ? r * K + i : i * K + r];
      if constexpr (at_random) {
        for (int64_t i = 0; i < size; i += 8) draw(e, (r * size + i) / 8, hv, slot, row + i);
      }
      for (int64_t i = 0; i < size; i += vec) store<vec>(to + r * size + i, load<vec>(row + i));
    }
  }

  // Eight numbers up or down to ones that the state's dtype has: bits below those that it keeps are drawn and added,
  // and cut off. Infinities and NaNs are left to the store.
  static void draw(const Entries& e, int64_t place, int64_t hv, int64_t slot, float* x) {
    constexpr int dropped = type_in_memory<State> == bf16 ? 16 : 13;
    uint32_t c[4] = {uint32_t(place), uint32_t(hv), uint32_t(slot), 0};
    philox(c, uint32_t(e.seed.index(0)), uint32_t(e.seed.index(1)));
    for (int i = 0; i < 8; i++) {
      uint32_t bits;
      memcpy(&bits, x + i, sizeof(bits));
      if ((bits & 0x7F800000) == 0x7F800000) continue;
      bits += (c[i / 2] >> 16 * (i % 2)) & ((1u << dropped) - 1);
      bits &= ~((1u << dropped) - 1);
      memcpy(x + i, &bits, sizeof(bits));
    }
  }

  // S <- decay S + u k^T, with a decay a key.
  static void add(float* S, int64_t V, const float* decay, const float* u, const float* k) {
    for (int64_t v = 0; v < V; v++) {
      for (int64_t i = 0; i < K; i++) S[v * K + i] = decay[i] * S[v * K + i] + u[v] * k[i];
    }
  }

  static float dot(const float* x, const float* y) {
    float sums[vec] = {};
    for (int64_t i = 0; i < K; i += vec) {
      for (int j = 0; j < vec; j++) sums[j] += x[i + j] * y[i + j];
    }
    float sum = 0.0f;
    for (float x : sums) sum += x;
    return sum;
  }

  static float inverse_norm(const Call& c, const float* x) {
    return c.l2norm ? 1.0f / std::sqrt(dot(x, x) + 1e-6f) : 1.0f;
  }

  // One number for all K keys, or K numbers.
  static void spread(const Call& c, const Tensor& x, const char* from, int64_t stride, float* to) {
    if (c.by_key) Base::read(x, from, stride, K, to);
    else std::fill(to, to + K, Base::read_one(x, from));
  }

  // The decay of each key.
  static void decay_of(const Call& c, int64_t n, int64_t t, int64_t hv, float* decay) {
    const int64_t h = hv / (c.HV / c.H);
    typename Base::Rate rate{};
    if (c.A_log.given) rate = Base::rate_of(Base::read_one(c.A_log, c.A_log.at(c.A_log.size[0] == c.HV ? hv : h)));
    float gate[K], bias[K] = {};
    spread(c, c.a, c.a.at(n, t, hv), c.by_key ? c.a.stride[3] : 1, gate);
    if (c.dt_bias.given) {
      const int64_t head = c.dt_bias.size[0] == c.HV ? hv : h;
      spread(c, c.dt_bias, c.dt_bias.at(head), c.by_key ? c.dt_bias.stride[1] : 1, bias);
    }
    for (int64_t i = 0; i < K; i += vec) {
      store<vec>(decay + i, Base::decay_of(c, load<vec>(gate + i), load<vec>(bias + i), rate));
    }
  }

  // S k, of a row, with the decay of each key.
  static float met(const float* row, const float* decay, const float* k) {
    float kd[K];
    for (int64_t i = 0; i < K; i++) kd[i] = decay[i] * k[i];
    return dot(row, kd);
  }

  static void run_head(const Call& c, const Entries& e, const Request& r, int64_t n, int64_t hv, float* S) {
    const int64_t h = hv / (c.HV / c.H), V = c.V;
    const Window w = window_of(e, n);
    float k[K], q[K], decay[K], v[512], u[512], o[512];
    read_state(reinterpret_cast<const State*>(c.state.at(r.read, hv)), V, S);
    for (int64_t i = 0; i < w.count; i++) {
      const int64_t row = (w.base + i) % e.rows;
      Base::read(e.k, e.k.at(r.read, h, row), 1, K, k);
      Base::read(e.u, e.u.at(r.read, hv, row), 1, int(V), u);
      spread(c, e.decay, e.decay.at(r.read, hv, row), 1, decay);
      add(S, V, decay, u, k);
    }
    if (w.folds && r.write >= 0) write_state(e, S, V, hv, r.write, reinterpret_cast<State*>(c.state.at(r.write, hv)));
    for (int64_t t = 0; t < c.T; t++) {
      Base::read(c.k, c.k.at(n, t, h), 1, K, k);
      Base::read(c.q, c.q.at(n, t, h), 1, K, q);
      Base::read(c.v, c.v.at(n, t, hv), 1, int(V), v);
      const float ik = inverse_norm(c, k), iq = inverse_norm(c, q) * c.scale;
      decay_of(c, n, t, hv, decay);
      float beta = Base::read_one(c.b, c.b.at(n, t, hv));
      beta = c.beta_scale * (Setting::beta_logit ? sigmoid_of<vec>(splat<vec>(beta))[0] : beta);
      // over the norm, so that u k^T is of the key as it came
      for (int64_t i = 0; i < V; i++) u[i] = beta * ik * (v[i] - ik * met(S + i * K, decay, k));
      add(S, V, decay, u, k);
      for (int64_t i = 0; i < V; i++) o[i] = iq * dot(S + i * K, q);
      Base::write(c.output, c.output.at(n, t, hv), o, int(V));
      if (!e.append) continue;
      const int64_t row = (w.base + w.count + t) % e.rows;
      if (hv % (c.HV / c.H) == 0) Base::write(e.k, e.k.at(r.read, h, row), k, K);
      Base::write(e.u, e.u.at(r.read, hv, row), u, int(V));
      memcpy(e.decay.at(r.read, hv, row), decay, (c.by_key ? K : 1) * sizeof(float));
    }
  }

  static void pad_head(const Call& c, int64_t n, int64_t hv) {
    const float zeros[512] = {};
    for (int64_t t = 0; t < c.T; t++) Base::write(c.output, c.output.at(n, t, hv), zeros, int(c.V));
  }

  static void run(const Call& c, const Entries& e) {
#pragma omp parallel if (c.N * c.HV > 4)
    {
      std::unique_ptr<float[]> S(new float[c.V * K]);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < c.N * c.HV; i++) {
        const int64_t n = i / c.HV, hv = i % c.HV;
        const Request r = request_of(c, n, Setting::writes, Setting::tokens);
        if (r.read < 0) pad_head(c, n, hv);
        else run_head(c, e, r, n, hv, S.get());
      }
    }
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    return answer(result, [&] {
      const Arguments given(values, count, RING_NAMES.data(), RING_ARGUMENTS);
      Call c = checked<Setting>(values, ARGUMENTS);
      if (c.slots || c.ragged || c.intermediate.given || c.V > 512) {
        refuse("ValueError", "a ring with slots, cu_seqlens, intermediate states or V > 512: expected none");
      }
      run(c, entries_of(given, c));
    });
  }
};

}  // namespace
