// The gated delta rule of T tokens on a state S [V, K] a head, all in fp32 whatever the dtypes in memory:
//
//     S <- decay S;   u <- beta (v - S k);   S <- S + u k^T;   o <- S q
//
// One pass over S a token: with kd = decay k and qd = decay q, S k and S q are sums of the old S (`dots`), o = S qd + u (k.q), and the
// pass that applies one token's decay and u (`update`) takes the next token's dots along. So T tokens are T+1 passes over a tile of S,
// of which the first reads memory and the others L1: the tile is kept in fp32 between tokens.
//
// Both layouts are one loop. The contraction over K is walked in steps; `ilp` groups of rows are in flight at each step:
//
//     k_last   a step is `vec` keys, a group is one row of V: keys are loaded, u is one number, the dots' lanes are summed at the end
//     v_last   a step is one key, a group is `vec` rows of V: the key is one number, u is loaded, the dots are whole
//
// A task is `tile_v` rows of one head of one request.
#pragma once

#include <cmath>
#include <utility>

#include "arguments.h"
#include "vectors.h"

namespace {

constexpr int MAX_TOKENS = 16;


enum Argument { STATE, Q, KEY, VALUE, A, B, A_LOG, DT_BIAS, READ, WRITE, SLOT, ACCEPTED, CU_SEQLENS, INTERMEDIATE, OUTPUT,
                SCALE, SOFTPLUS_BETA, SOFTPLUS_THRESHOLD, LOWER_BOUND, BETA_SCALE, NULL_INDEX, L2NORM, ARGUMENTS };

constexpr const char* NAMES[ARGUMENTS] = {
    "state", "q", "k", "v", "a", "b", "A_log", "dt_bias", "read_index", "write_index", "slot_index", "accepted", "cu_seqlens", "intermediate", "output",
    "scale", "softplus_beta", "softplus_threshold", "lower_bound", "beta_scale", "null_index", "use_qk_l2norm"};

// What a call's arguments cannot tell.
//   writes: the final state goes to write_index where that is given (`by_index`), to row n (`by_row`), nowhere (`never`)
//   tokens: a ragged request's length is cut to this
enum class Writes { by_index, by_row, never };

// A call: its tensors, checked, and its numbers.
struct Call {
  Tensor state, q, k, v, a, b, A_log, dt_bias, read, write, slot, accepted, cu_seqlens, intermediate, output;
  float scale, softplus_beta, softplus_threshold, lower_bound, beta_scale;
  int64_t null_index;
  bool l2norm, by_key, slots, ragged;
  int64_t N, T, H, HV, V;
};

// Where one request's tokens and states are. `tokens` is 0 where nothing is to be done.
struct Request {
  int64_t batch, first;  // its place in q, k, v ...: [batch, first + t]
  int tokens;
  int64_t read, write, row;  // slots of the pool and row of the intermediate buffer; -1 where there is none
};

template <class Setting>
class Decode {
  using State = typename Setting::State;
  static constexpr bool k_last = Setting::k_last;
  static constexpr int K = Setting::K, tile_v = Setting::tile_v, ilp = Setting::ilp, vec = Setting::vec;
  using F = Floats<vec>;
  using P = Pack<State, vec>;
  static constexpr int parts = P::parts, lot = P::size;
  static constexpr int chunk = k_last ? ilp : ilp * lot;   // rows of V in flight
  static constexpr int steps = k_last ? K / lot : K;       // of the contraction
  static_assert(tile_v % chunk == 0 && tile_v % vec == 0 && K % lot == 0);

  // One token of one head: what `update` and `dots` multiply the state by.
  struct alignas(64) Keys {
    float decay[K], kd[K], qd[K];
    const float* k;
    float beta, kq;
  };

  // A thread's working memory: what tiles of one head share, and one tile; 16 KiB of it are `kept` at 32 rows of K=128.
  struct alignas(64) Scratch {
    float kept[tile_v * K];
    float v[tile_v], u[tile_v], o[tile_v];
    float q[MAX_TOKENS][K], k[MAX_TOKENS][K], kq[MAX_TOKENS];
    Keys keys[MAX_TOKENS];
  };

  // A step's factors of the contraction index: those of a lot of keys, or of one key.
  static P factor(const float* p, int step) {
    if constexpr (k_last) return load_pack<State, vec>(p + step * lot);
    P r;
    for (F& x : r.part) x = splat<vec>(p[step]);
    return r;
  }

  // The place of group i of the chunk at `row`, at a step. `stride` is V (v_last; a kept tile: tile_v): k_last's offsets are constants, one register
  // a tile, where a stride for each had GCC shuffle dozens of pointers (0.79 instead of 1.16 us a head, fp32, ilp 2, in L1, AMD EPYC).
  template <class E>
  static E* place(E* tile, int64_t stride, int row, int step, int i) {
    if constexpr (k_last) return tile + row * K + step * lot + i * K;
    return tile + step * stride + row + i * lot;
  }

  // What the rows in flight have of one sum each. v_last: a number a lane. k_last: partial sums over the keys, of both parts of a lot.
  static constexpr int sum_parts = k_last ? 1 : parts;
  struct Sum {
    F part[sum_parts];
  };

  // The next tile, fetched into the cache meanwhile, a share of its lines in each of this tile's `passes`, so that the memory never idles
  // (fp32, T=1: 93% of the floor's bandwidth; 52% without, 76% by one pass alone, AMD EPYC). None where `tile` is null.
  struct Ahead {
    const State* tile;
    int pass, passes;
  };

  // A pass over one chunk of a tile `from` memory or kept: applies the `last` token's decay and u, sums the `next` token's dots, keeps the rows in
  // fp32, stores them as the state after a token to `passing` and as the last to `final`, fetches the chunk of the tile `ahead` into the cache.
  template <bool update, bool dots, class From>
  __attribute__((always_inline)) static void sweep(const Keys& last, const P (&u)[ilp], const Keys& next, Sum (&sk)[ilp], Sum (&sq)[ilp], const From* from,
                                                   int64_t from_stride, float* keep, State* passing, State* final, Ahead ahead, int64_t stride, int row) {
    unsigned due = 0;
    if (ahead.tile) {
      for (int i = ahead.pass * groups_a_line; i < ilp; i += ahead.passes * groups_a_line) due |= 1u << i;
    }
    for (int step = 0; step < steps; step++) {
      P decay, k, kd, qd, s[ilp];
      if constexpr (update) decay = factor(last.decay, step), k = factor(last.k, step);
      if constexpr (dots) kd = factor(next.kd, step), qd = factor(next.qd, step);
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) {
        s[i] = load_pack<State, vec>(place(from, from_stride, row, step, i));
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++) {
          if constexpr (update) s[i].part[p] = s[i].part[p] * decay.part[p] + u[i].part[p] * k.part[p];
          if constexpr (dots) {
            sk[i].part[p % sum_parts] += s[i].part[p] * kd.part[p];
            sq[i].part[p % sum_parts] += s[i].part[p] * qd.part[p];
          }
        }
      }
      if (due && step % steps_a_line == 0) {
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i += groups_a_line) {
          if (due >> i & 1) __builtin_prefetch(place(ahead.tile, stride, row, step, i));
        }
      }
      if (dots && keep) {
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i++) store_pack<State, vec>(place(keep, tile_v, row, step, i), s[i]);
      }
      if constexpr (update) {
        if (!dots || passing) {
          decltype(rounded(s[0])) raw[ilp];
#pragma GCC unroll 8
          for (int i = 0; i < ilp; i++) raw[i] = rounded(s[i]);
          if (passing) {
#pragma GCC unroll 8
            for (int i = 0; i < ilp; i++) {
              if (Setting::around) store_around(place(passing, stride, row, step, i), raw[i]);
              else store_raw(place(passing, stride, row, step, i), raw[i]);
            }
          }
          if (final) {
#pragma GCC unroll 8
            for (int i = 0; i < ilp; i++) store_raw(place(final, stride, row, step, i), raw[i]);
          }
        }
      }
    }
  }
  static constexpr int bytes = lot * sizeof(State), steps_a_line = k_last && bytes < 64 ? 64 / bytes : 1, groups_a_line = !k_last && bytes < 64 ? 64 / bytes : 1;

  // u and the output of a chunk, from its dots: u <- beta (v - S k), o <- S q + u (k.q).
  __attribute__((always_inline)) static void finish(const Keys& keys, const Sum (&sk)[ilp], const Sum (&sq)[ilp], int row, Scratch& w) {
    if constexpr (k_last) {
#pragma GCC unroll 4
      for (int i = 0; i < ilp; i += 2) {
        const int pair = ilp > 1 ? 2 : 1, j = i + pair - 1;
        const Floats<4> s = sums<vec>(sk[i].part[0], sq[i].part[0], sk[j].part[0], sq[j].part[0]);
#pragma GCC unroll 2
        for (int l = 0; l < pair; l++) {
          const float x = keys.beta * (w.v[row + i + l] - s[l]);
          w.o[row + i + l] = s[2 + l] + x * keys.kq;
          w.u[row + i + l] = x;
        }
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) {
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++) {
          const int r = row + i * lot + p * vec;
          const F u = keys.beta * (load<vec>(w.v + r) - sk[i].part[p]);
          store<vec>(w.u + r, u);
          store<vec>(w.o + r, sq[i].part[p] + u * keys.kq);
        }
      }
    }
  }

  // u of a chunk as the last token's `finish` stored it.
  __attribute__((always_inline)) static void recall(P (&u)[ilp], int row, const Scratch& w) {
#pragma GCC unroll 8
    for (int i = 0; i < ilp; i++) {
#pragma GCC unroll 2
      for (int p = 0; p < parts; p++) u[i].part[p] = plain(k_last ? splat<vec>(w.u[row + i]) : load<vec>(w.u + row + i * lot + p * vec));
    }
  }

  // n floats from n elements of any dtype, `stride` elements apart.
  static void read(const Tensor& t, const char* p, int64_t stride, int n, float* to) {
    if (t.type == fp32) read_as<float>(p, stride, n, to);
    else if (t.type == bf16) read_as<Bf16>(p, stride, n, to);
    else read_as<Half>(p, stride, n, to);
  }
  template <class T>
  static void read_as(const char* p, int64_t stride, int n, float* to) {
    const T* from = reinterpret_cast<const T*>(p);
    if (stride == 1 && n % vec == 0) {
      for (int i = 0; i < n; i += vec) store<vec>(to + i, load<vec>(from + i));
    } else {
      for (int i = 0; i < n; i++) to[i] = value(from + i * stride);
    }
  }
  static float read_one(const Tensor& t, const char* p) {
    float x;
    read(t, p, 1, 1, &x);
    return x;
  }
  static void write(const Tensor& t, char* p, const float* from, int n) {
    for (int i = 0; i < n; i += vec) {
      F x = load<vec>(from + i);
      if (t.type == fp32) store<vec>(reinterpret_cast<float*>(p) + i, x);
      else if (t.type == bf16) store<vec>(reinterpret_cast<Bf16*>(p) + i, x);
      else store<vec>(reinterpret_cast<Half*>(p) + i, x);
    }
  }

  // What the state is multiplied with or receives: rounding to bf16 takes NaNs of one kind alone, 10% quicker than a look at each element.
  static F plain(F x) {
    if constexpr (parts == 2) return canonical<vec>(x);
    return x;
  }

  // q and k of a request's head: fp32, normalised, q scaled; and k.q.
  static void prepare_head(const Call& c, const Request& r, int64_t h, Scratch& w) {
    for (int t = 0; t < r.tokens; t++) {
      read(c.q, c.q.at(r.batch, r.first + t, h), 1, K, w.q[t]);
      read(c.k, c.k.at(r.batch, r.first + t, h), 1, K, w.k[t]);
      if (k_last) arrange<State, vec>(w.q[t], K), arrange<State, vec>(w.k[t], K);
      F qq{}, kk{}, kq{};
      for (int i = 0; i < K; i += vec) {
        F q = load<vec>(w.q[t] + i), k = load<vec>(w.k[t] + i);
        qq += q * q;
        kk += k * k;
        kq += k * q;
      }
      const Floats<4> s = sums<vec>(qq, kk, kq, kq);
      const float qn = c.scale * (c.l2norm ? 1.0f / std::sqrt(s[0] + 1e-6f) : 1.0f);
      const float kn = c.l2norm ? 1.0f / std::sqrt(s[2] + 1e-6f) : 1.0f;
      for (int i = 0; i < K; i += vec) {
        store<vec>(w.q[t] + i, load<vec>(w.q[t] + i) * qn);
        store<vec>(w.k[t] + i, plain(load<vec>(w.k[t] + i) * kn));
      }
      w.kq[t] = s[1] * qn * kn;
    }
  }

  // exp of the log decay; x is a or g, `bias` and A = exp(A_log) are not used where the log decay is given.
  static F decay_of(const Call& c, F x, F bias, F A) {
    if (c.A_log.given) {
      x += bias;
      if (Setting::lower_bound) {
        x = c.lower_bound * sigmoid_of<vec>(A * x);
      } else {
        F scaled = x * c.softplus_beta;
        x = -A * (scaled > c.softplus_threshold ? x : softplus_of<vec>(scaled) / c.softplus_beta);
      }
    }
    return plain(exp_of<vec>(x));
  }

  // The gates of a request's value head, folded into its keys.
  static void prepare_gates(const Call& c, const Request& r, int64_t h, int64_t hv, Scratch& w) {
    const int64_t a_head = c.A_log.size[0] == c.HV ? hv : h, bias_head = c.dt_bias.size[0] == c.HV ? hv : h;
    const F A = c.A_log.given ? exp_of<vec>(splat<vec>(read_one(c.A_log, c.A_log.at(a_head)))) : F{};
    float bias[K], g[K];
    F bias_of_head{}, decay{};
    if (c.dt_bias.given && c.by_key) read(c.dt_bias, c.dt_bias.at(bias_head), c.dt_bias.stride[1], K, bias);
    else if (c.dt_bias.given) bias_of_head = splat<vec>(read_one(c.dt_bias, c.dt_bias.at(bias_head)));
    for (int t = 0; t < r.tokens; t++) {
      Keys& keys = w.keys[t];
      const char* a = c.a.at(r.batch, r.first + t, hv);
      if (c.by_key) {
        read(c.a, a, c.a.stride[3], K, g);
        for (int i = 0; i < K; i += vec) {
          store<vec>(g + i, decay_of(c, load<vec>(g + i), c.dt_bias.given ? load<vec>(bias + i) : F{}, A));
        }
        if (k_last) arrange<State, vec>(g, K);
      } else {
        decay = decay_of(c, splat<vec>(read_one(c.a, a)), bias_of_head, A);
      }
      for (int i = 0; i < K; i += vec) {
        if (c.by_key) decay = load<vec>(g + i);
        store<vec>(keys.decay + i, decay);
        store<vec>(keys.kd + i, load<vec>(w.k[t] + i) * decay);
        store<vec>(keys.qd + i, load<vec>(w.q[t] + i) * decay);
      }
      const float beta = read_one(c.b, c.b.at(r.batch, r.first + t, hv));
      keys.beta = c.beta_scale * (Setting::beta_logit ? sigmoid_of<vec>(splat<vec>(beta))[0] : beta);
      keys.k = w.k[t];
      keys.kq = w.kq[t];
    }
  }

  static bool inside(int64_t index, int64_t size) { return index >= 0 && index < size; }
  static int64_t named(const Call& c, int64_t index, int64_t size) { return inside(index, size) && index != c.null_index ? index : -1; }

  static Request request(const Call& c, int64_t n) {
    Request r{n, 0, int(c.T), n, -1, -1};
    const int64_t slots = c.state.size[0];
    if (c.ragged) {
      const int64_t total = c.q.size[1];
      r.batch = 0;
      r.first = c.cu_seqlens.index(n);
      int64_t end = c.cu_seqlens.index(n + 1);
      r.first = r.first < 0 ? 0 : r.first > total ? total : r.first;
      end = end > total ? total : end;
      end = end - r.first > Setting::tokens ? r.first + Setting::tokens : end;
      r.tokens = end > r.first ? int(end - r.first) : 0;
    }
    if (c.slots) {
      const int64_t columns = c.slot.size[1];
      int64_t start = c.accepted.given ? c.accepted.index(n) : 1;
      start = start < 1 ? 1 : start > columns ? columns : start;
      r.read = named(c, c.slot.index(n, start - 1), slots);
    } else if (c.read.given) {
      r.read = named(c, c.read.index(n), slots);
    }
    if (c.write.given) r.write = named(c, c.write.index(n), slots);
    else if (Setting::writes == Writes::by_row) r.write = n;
    if (c.intermediate.given) r.row = c.slot.given ? named(c, c.slot.index(n), c.intermediate.size[0]) : n;
    return r;
  }

  static State* tile(char* head, int64_t row) { return reinterpret_cast<State*>(head) + (k_last ? row * K : row); }

  // Where the state after token t goes, beside the final one.
  static State* between(const Call& c, const Request& r, int64_t n, int64_t hv, int64_t row, int t) {
    if (c.slots) {
      const int64_t slot = t < c.slot.size[1] ? named(c, c.slot.index(n, t), c.state.size[0]) : -1;
      if (slot >= 0) return tile(c.state.at(slot, hv), row);
    } else if (r.row >= 0 && t < c.intermediate.size[1]) {
      return tile(c.intermediate.at(r.row, t, hv), row);
    }
    return nullptr;
  }

  static void task(const Call& c, const Request& r, int64_t n, int64_t hv, int64_t row, const State* ahead, Scratch& w) {
    const int end = r.tokens - 1;
    const State* from = tile(c.state.at(r.read, hv), row);
    State *passing = between(c, r, n, hv, row, end), *final = r.write < 0 ? nullptr : tile(c.state.at(r.write, hv), row);
    if (passing == final) passing = nullptr;
    const bool stores = passing || final;
    const int passes = r.tokens + stores;
    for (int t = 0; t <= end; t++) {
      read(c.v, c.v.at(r.batch, r.first + t, hv) + row * c.v.bytes(), 1, tile_v, w.v);
      if (!k_last) arrange<State, vec>(w.v, tile_v);
      if (end == 0) only_token(w.keys[0], from, passing, final, ahead, c.V, w);
      else if (t == 0) first_token(w.keys[0], from, {ahead, 0, passes}, c.V, w);
      else next_token(w.keys[t - 1], w.keys[t], between(c, r, n, hv, row, t - 1), {ahead, t, passes}, c.V, w);
      if (!k_last) arrange<State, vec>(w.o, tile_v, true);
      write(c.output, c.output.at(r.batch, r.first + t, hv) + row * c.output.bytes(), w.o, tile_v);
    }
    if (end > 0 && stores) after_tokens(w.keys[end], passing, final, {ahead, r.tokens, passes}, c.V, w);
  }

  // One token: no tile is kept, a chunk is read twice, from memory and from L1. The stores lag a chunk behind, so that the next chunk's dots run
  // while the sums over lanes, and u, are on their way: 1.4 instead of 1.9 us a head (bf16, ilp 2, in L1, AMD EPYC).
  __attribute__((noinline)) static void only_token(const Keys& keys, const State* from, State* passing, State* final, const State* ahead, int64_t stride, Scratch& w) {
    const bool stores = passing || final;
    for (int row = 0; row <= tile_v; row += chunk) {
      P u[ilp];
      Sum sk[ilp] = {}, sq[ilp] = {};
      if (row < tile_v) {
        sweep<false, true>(keys, u, keys, sk, sq, from, stride, nullptr, nullptr, nullptr, {ahead, 0, stores ? 2 : 1}, stride, row);
        finish(keys, sk, sq, row, w);
      }
      if (row > 0 && stores) {
        recall(u, row - chunk, w);
        sweep<true, false>(keys, u, keys, sk, sq, from, stride, nullptr, passing, final, {ahead, 1, 2}, stride, row - chunk);
      }
    }
  }

  __attribute__((noinline)) static void first_token(const Keys& next, const State* from, Ahead ahead, int64_t stride, Scratch& w) {
    for (int row = 0; row < tile_v; row += chunk) {
      P u[ilp];
      Sum sk[ilp] = {}, sq[ilp] = {};
      sweep<false, true>(next, u, next, sk, sq, from, stride, w.kept, nullptr, nullptr, ahead, stride, row);
      finish(next, sk, sq, row, w);
    }
  }

  __attribute__((noinline)) static void next_token(const Keys& last, const Keys& next, State* passing, Ahead ahead, int64_t stride, Scratch& w) {
    for (int row = 0; row < tile_v; row += chunk) {
      P u[ilp];
      Sum sk[ilp] = {}, sq[ilp] = {};
      recall(u, row, w);
      sweep<true, true, float>(last, u, next, sk, sq, w.kept, tile_v, w.kept, passing, nullptr, ahead, stride, row);
      finish(next, sk, sq, row, w);
    }
  }

  __attribute__((noinline)) static void after_tokens(const Keys& last, State* passing, State* final, Ahead ahead, int64_t stride, Scratch& w) {
    for (int row = 0; row < tile_v; row += chunk) {
      P u[ilp];
      Sum sk[ilp] = {}, sq[ilp] = {};
      recall(u, row, w);
      sweep<true, false, float>(last, u, last, sk, sq, w.kept, tile_v, nullptr, passing, final, ahead, stride, row);
    }
  }

  // A ragged request of no tokens: its start state is its final one.
  static void carry(const Call& c, const Request& r, int64_t hv, int64_t row) {
    if (r.write < 0 || r.write == r.read) return;
    const State* from = tile(c.state.at(r.read, hv), row);
    State* to = tile(c.state.at(r.write, hv), row);
    const int64_t lines = k_last ? 1 : K, size = k_last ? tile_v * K : tile_v, stride = k_last ? 0 : c.V;
    for (int64_t i = 0; i < lines; i++) memcpy(to + i * stride, from + i * stride, size * sizeof(State));
  }

  // Padding: its output rows are zero.
  static void pad(const Call& c, const Request& r, int64_t hv, int64_t row, Scratch& w) {
    for (float& x : w.o) x = 0.0f;
    for (int t = 0; t < r.tokens; t++) write(c.output, c.output.at(r.batch, r.first + t, hv) + row * c.output.bytes(), w.o, tile_v);
  }

  static void whole_heads(const Tensor& t, const char* name, int64_t V) {
    const int64_t given = t.stride[t.rank - 2], accepted = k_last ? K : V;
    if (given != accepted && t.size[t.rank - 2] > 1) {
      refuse("ValueError", "%s: rows %lld elements apart were given, accepted is %lld: each head contiguous", name, (long long)given, (long long)accepted);
    }
  }

  // The arguments, checked.
  static Call checked(const TVMFFIAny* values, int count) {
    const Arguments given(values, count, NAMES, ARGUMENTS);
    Call c{};
    int64_t keys = K, batch = -1, slots = -1, any = -1;
    c.T = c.H = c.HV = c.V = -1;
    c.state = given.tensor(STATE, type_in_memory<State>, k_last ? "[slots, HV, V, K]" : "[slots, HV, K, V]", {&slots, &c.HV, k_last ? &c.V : &keys, k_last ? &keys : &c.V}, true);
    whole_heads(c.state, "state", c.V);
    c.q = given.tensor(Q, floating, "[B, T, H, K]", {&batch, &c.T, &c.H, &keys}, true);
    c.k = given.tensor(KEY, floating, "[B, T, H, K]", {&batch, &c.T, &c.H, &keys}, true);
    c.v = given.tensor(VALUE, floating, "[B, T, HV, V]", {&batch, &c.T, &c.HV, &c.V}, true);
    c.output = given.tensor(OUTPUT, floating, "[B, T, HV, V]", {&batch, &c.T, &c.HV, &c.V}, true);
    c.by_key = given.rank(A) == 4;
    if (c.by_key) c.a = given.tensor(A, floating, "[B, T, HV, K]", {&batch, &c.T, &c.HV, &keys});
    else c.a = given.tensor(A, floating, "[B, T, HV]", {&batch, &c.T, &c.HV});
    c.b = given.tensor(B, floating, "[B, T, HV]", {&batch, &c.T, &c.HV});
    if (!given.is_none(A_LOG)) c.A_log = given.tensor(A_LOG, floating, "[HV] or [H]", {nullptr});
    if (!given.is_none(DT_BIAS) && c.by_key) c.dt_bias = given.tensor(DT_BIAS, floating, "[HV, K] or [H, K]", {nullptr, &keys});
    if (!given.is_none(DT_BIAS) && !c.by_key) c.dt_bias = given.tensor(DT_BIAS, floating, "[HV] or [H]", {nullptr});
    for (const auto& [t, i] : {std::pair(&c.A_log, A_LOG), std::pair(&c.dt_bias, DT_BIAS)}) {
      if (t->given && t->size[0] != c.HV && t->size[0] != c.H) refuse("ValueError", "%s: %lld heads were given, accepted are HV=%lld or H=%lld", NAMES[i], (long long)t->size[0], (long long)c.HV, (long long)c.H);
    }
    if (c.H < 1 || c.HV % c.H) refuse("ValueError", "v: %lld heads were given with %lld heads of q, accepted is a multiple", (long long)c.HV, (long long)c.H);
    if (c.V % tile_v) refuse("ValueError", "v: V=%lld was given, accepted are multiples of tile_v=%d", (long long)c.V, tile_v);

    c.ragged = !given.is_none(CU_SEQLENS);
    c.N = batch;
    if (c.ragged) {
      c.cu_seqlens = given.tensor(CU_SEQLENS, int32, "[N+1]", {nullptr});
      c.N = c.cu_seqlens.size[0] - 1;
      if (batch != 1) refuse("ValueError", "q: %lld rows were given with cu_seqlens, accepted is [1, total, H, K]", (long long)batch);
    } else if (c.T > MAX_TOKENS) {
      refuse("ValueError", "q: T=%lld was given, accepted are 1 to %d", (long long)c.T, MAX_TOKENS);
    }
    if (!given.is_none(INTERMEDIATE)) {
      c.intermediate = given.tensor(INTERMEDIATE, type_in_memory<State>, k_last ? "[rows, steps, HV, V, K]" : "[rows, steps, HV, K, V]",
                                    {nullptr, nullptr, &c.HV, k_last ? &c.V : &keys, k_last ? &keys : &c.V}, true);
      whole_heads(c.intermediate, "intermediate", c.V);
      if (!c.ragged && c.intermediate.size[1] < c.T) refuse("ValueError", "intermediate: %lld steps were given, accepted is T=%lld or more", (long long)c.intermediate.size[1], (long long)c.T);
      if (!given.is_none(SLOT)) c.slot = given.tensor(SLOT, int32, "[B]", {&c.N});
      else if (c.intermediate.size[0] < c.N) refuse("ValueError", "intermediate: %lld rows were given, accepted is B=%lld or more", (long long)c.intermediate.size[0], (long long)c.N);
    } else if (!given.is_none(SLOT)) {
      c.slots = true;
      c.slot = given.tensor(SLOT, int32, "[B, 1+S]", {&c.N, &any});
      if (any < 1 || (!c.ragged && any < c.T)) refuse("ValueError", "slot_index: %lld columns were given, accepted is T=%lld or more", (long long)any, (long long)c.T);
    }
    if (!given.is_none(ACCEPTED)) {
      if (!c.slots) refuse("TypeError", "accepted: a tensor was given, accepted is None where slot_index does not name pool slots [B, 1+S]");
      c.accepted = given.tensor(ACCEPTED, int32, "[B]", {&c.N});
    }
    if (!given.is_none(READ)) {
      if (c.slots) refuse("TypeError", "read_index: a tensor was given, accepted is None where slot_index names the pool's slots");
      c.read = given.tensor(READ, int32, "[B]", {&c.N});
    } else if (!c.slots && slots < c.N) {
      refuse("ValueError", "state: %lld rows were given, accepted is B=%lld or more without read_index", (long long)slots, (long long)c.N);
    }
    if (Setting::writes == Writes::by_index) c.write = given.tensor(WRITE, int32, "[B]", {&c.N});
    else if (!given.is_none(WRITE)) refuse("TypeError", "write_index: a tensor was given, accepted is None: this function was compiled %s", Setting::writes == Writes::never ? "for a frozen state" : "without a pool");

    c.scale = float(given.number(SCALE));
    c.softplus_beta = float(given.number(SOFTPLUS_BETA));
    c.softplus_threshold = float(given.number(SOFTPLUS_THRESHOLD));
    c.lower_bound = float(given.number(LOWER_BOUND));
    c.beta_scale = float(given.number(BETA_SCALE));
    c.null_index = int64_t(given.number(NULL_INDEX));
    c.l2norm = given.number(L2NORM) != 0;
    return c;
  }

  // A fork takes as long as a few heads.
  static constexpr int64_t serial_elements = 4 * 128 * 128;

  static void run(const Call& c) {
    const int64_t tiles = c.V / tile_v, tasks = c.N * c.HV * tiles, shared = c.HV / c.H;
#pragma omp parallel if (tasks * tile_v * K > serial_elements)
    {
      Scratch w;
      Request r{}, after{};
      int64_t n = -1, head = -1, value_head = -1, after_n = -1;
      // Contiguous shares: neighbours share a request's q and k, which are prepared again only where they change.
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < tasks; i++) {
        const int64_t hv = i / tiles % c.HV, row = i % tiles * tile_v;
        if (n != i / tiles / c.HV) {
          n = i / tiles / c.HV;
          r = request(c, n);
        }
        if (r.read < 0) {
          pad(c, r, hv, row, w);
        } else if (r.tokens == 0) {
          carry(c, r, hv, row);
        } else {
          if (head != n * c.H + hv / shared) {
            head = n * c.H + hv / shared;
            prepare_head(c, r, hv / shared, w);
          }
          if (value_head != n * c.HV + hv) {
            value_head = n * c.HV + hv;
            prepare_gates(c, r, hv / shared, hv, w);
          }
          const State* ahead = nullptr;
          if (Setting::ahead && i + 1 < tasks) {
            const int64_t next = (i + 1) / tiles;
            if (after_n != next / c.HV) {
              after_n = next / c.HV;
              after = request(c, after_n);
            }
            if (after.read >= 0) ahead = tile(c.state.at(after.read, next % c.HV), (i + 1) % tiles * tile_v);
          }
          task(c, r, n, hv, row, ahead, w);
        }
      }
      if (Setting::around) settle();
    }
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    return answer(result, [&] { run(checked(values, count)); });
  }
};

}  // namespace
