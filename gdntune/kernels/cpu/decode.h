// The gated delta rule of T tokens on a state S [V, K] a head, all in fp32 whatever the dtypes in memory:
//
//     S <- decay S;   u <- beta (v - S k);   S <- S + u k^T;   o <- S q
//
// One pass over S a token: with kd = decay k and qd = decay q, S k and S q are sums of the old S (`dots`), o = S qd + u
// (k.q), and the pass that applies one token's decay and u (`update`) takes the next token's dots along. So T tokens
// are T+1 passes over a tile of S, of which the first reads memory and the others L1: the tile is kept in fp32 between
// tokens.
//
// Both layouts are one loop. The contraction over K is walked in steps; `ilp` groups of rows are in flight at each
// step:
//
//     k_last   a step is a lot of keys, a group is one row of V: keys are loaded, u is a number, the dots' lanes summed
//     v_last   a step is one key, a group is a lot of rows of V: the key is a number, u is loaded, the dots whole
//
// A lot is what one access to the state moves. A task is `tile_v` rows of one head of one request.
#pragma once

#include <algorithm>
#include <cmath>

#include "call.h"

namespace {

// Where one request's tokens and states are.
struct Request {
  int64_t batch, first;  // of q, k, v ...: [batch, first + t]
  int tokens;
  int64_t read, write, row;  // slots of the state, row of the intermediate buffer; -1: none. No `read`: padding
};

inline Request request_of(const Call& c, int64_t n, Writes writes, int64_t most_tokens) {
  Request r{n, 0, int(c.T), n, -1, -1};
  const int64_t slots = c.state.size[0];
  if (c.ragged) {
    const int64_t total = c.q.size[1];
    int64_t first = c.cu_seqlens.index(n), end = c.cu_seqlens.index(n + 1);
    first = first < 0 ? 0 : first > total ? total : first;
    end = end > total ? total : end;
    end = end > first + most_tokens ? first + most_tokens : end;
    r.batch = 0;
    r.first = first;
    r.tokens = end > first ? int(end - first) : 0;
  }
  if (c.slots) {
    const int64_t columns = c.slot.size[1];
    int64_t start = c.accepted.given ? c.accepted.index(n) : 1;
    start = start < 1 ? 1 : start > columns ? columns : start;
    r.read = c.named(c.slot.index(n, start - 1), slots);
  } else if (c.read.given) {
    r.read = c.named(c.read.index(n), slots);
  }
  if (c.write.given) r.write = c.named(c.write.index(n), slots);
  else if (writes == Writes::by_row) r.write = n;
  if (c.intermediate.given) r.row = c.slot.given ? c.named(c.slot.index(n), c.intermediate.size[0]) : n;
  return r;
}

template <class Setting>
class Decode {
 protected:
  using State = typename Setting::State;
  static constexpr bool k_last = Setting::k_last;
  static constexpr int K = Setting::K, tile_v = Setting::tile_v, ilp = Setting::ilp, vec = Setting::vec;
  using F = Floats<vec>;
  using P = Pack<State, vec>;
  static constexpr int parts = P::parts, lot = P::size;
  static constexpr int chunk = k_last ? ilp : ilp * lot;  // rows of V in flight
  static constexpr int steps = k_last ? K / lot : K;
  static_assert(tile_v % chunk == 0 && tile_v % vec == 0 && K % lot == 0);

  // One token of one head: what `update` and `dots` multiply the state by. All along K in the order of a pack's lanes.
  struct alignas(64) Keys {
    float decay[K], kd[K], qd[K];
    const float* k;
    float beta, kq;
  };

  // A thread's working memory: what the tiles of one head share, and one tile, of which 32 rows of K=128 are 16 KiB.
  struct alignas(64) Scratch {
    float kept[tile_v * K];
    float v[tile_v], u[tile_v], o[tile_v];
    float q[MAX_TOKENS][K], k[MAX_TOKENS][K], kq[MAX_TOKENS];
    Keys keys[MAX_TOKENS];
  };

  // What the rows in flight have: u; S k and S q. v_last: a number a lane; k_last: u in all lanes, partial sums in
  // each.
  struct Flight {
    static constexpr int sum_parts = k_last ? 1 : parts;
    P u[ilp];
    F sk[ilp][sum_parts] = {}, sq[ilp][sum_parts] = {};
  };

  // Where the rows go: in fp32 for the next token, as the state after a token, as the final state. Null is nowhere.
  struct Targets {
    float* kept;
    State *passing, *final;
  };

  // The next tile, fetched into the cache meanwhile, a share of its lines in each of this tile's `passes`, so that the
  // memory never idles: 87 to 95% of the floor's bandwidth (fp32, T=1, AMD EPYC), 44 to 76% without.
  struct Ahead {
    const State* tile;
    int pass, passes;
  };
  static constexpr int line = 64 / (lot * sizeof(State)) > 1 ? 64 / (lot * sizeof(State)) : 1;  // lots in a cache line
  static constexpr int line_steps = k_last ? line : 1, line_groups = k_last ? 1 : line;

  // A step's factors: those of a lot of keys, or of one key.
  static P factor(const float* p, int step) {
    if constexpr (k_last) return load_pack<State, vec>(p + step * lot);
    P r;
    for (F& x : r.part) x = splat<vec>(p[step]);
    return r;
  }

  // The place of group i of the chunk at `row`, at a step; `pitch` is v_last's, the row of memory. k_last's offsets are
  // constants: strides of their own for each tile had GCC shuffle dozens of pointers (1.16 instead of 0.79 us a head,
  // fp32, ilp 2, in L1).
  template <class E>
  static E* place(E* tile, int64_t pitch, int row, int step, int i) {
    if constexpr (k_last) return tile + row * K + step * lot + i * K;
    return tile + step * pitch + row + i * lot;
  }

  // A pass over the chunk at `row` of a tile in memory or kept: applies the `last` token's decay and u, sums the `next`
  // one's dots.
  template <bool update, bool dots, class From>
  __attribute__((always_inline)) static void sweep(Flight& f, const Keys& last, const Keys& next, const From* from,
                                                   int64_t from_pitch, int64_t pitch, Targets to, Ahead ahead,
                                                   int row) {
    int due = ahead.pass * line_steps;
    for (int step = 0; step < steps; step++) {
      P decay, k, kd, qd, s[ilp];
      if constexpr (update) decay = factor(last.decay, step), k = factor(last.k, step);
      if constexpr (dots) kd = factor(next.kd, step), qd = factor(next.qd, step);
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) {
        s[i] = load_pack<State, vec>(place(from, from_pitch, row, step, i));
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++) {
          F& x = s[i].part[p];
          if constexpr (update) x = x * decay.part[p] + f.u[i].part[p] * k.part[p];
          if constexpr (dots) f.sk[i][p % f.sum_parts] += x * kd.part[p], f.sq[i][p % f.sum_parts] += x * qd.part[p];
        }
      }
      if (ahead.tile && step == due) {
        due += ahead.passes * line_steps;
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i += line_groups) __builtin_prefetch(place(ahead.tile, pitch, row, step, i));
      }
      if constexpr (dots) {
        if (to.kept) {
#pragma GCC unroll 8
          for (int i = 0; i < ilp; i++) store_pack<State, vec>(place(to.kept, tile_v, row, step, i), s[i]);
        }
      }
      if constexpr (update) {
        if (to.passing || to.final) {
          // rounded once, before the branches: mask registers would not last for both
          decltype(rounded(s[0])) raw[ilp];
#pragma GCC unroll 8
          for (int i = 0; i < ilp; i++) raw[i] = rounded(s[i]);
          if (to.passing) {
#pragma GCC unroll 8
            for (int i = 0; i < ilp; i++) store_raw<Setting::around>(place(to.passing, pitch, row, step, i), raw[i]);
          }
          if (to.final) {
#pragma GCC unroll 8
            for (int i = 0; i < ilp; i++) store_raw<false>(place(to.final, pitch, row, step, i), raw[i]);
          }
        }
      }
    }
  }

  // From a chunk's dots its u <- beta (v - S k) and output <- S q + u (k.q).
  __attribute__((always_inline)) static void finish(const Flight& f, const Keys& keys, int row, Scratch& w) {
    if constexpr (k_last) {
      constexpr int pair = ilp > 1 ? 2 : 1;
#pragma GCC unroll 4
      for (int i = 0; i < ilp; i += pair) {
        const int j = i + pair - 1;
        const Floats<4> s = sums<vec>(f.sk[i][0], f.sq[i][0], f.sk[j][0], f.sq[j][0]);
#pragma GCC unroll 2
        for (int l = 0; l < pair; l++) {
          const float u = keys.beta * (w.v[row + i + l] - s[l]);
          w.u[row + i + l] = u;
          w.o[row + i + l] = s[2 + l] + u * keys.kq;
        }
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) {
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++) {
          const int r = row + i * lot + p * vec;
          const F u = keys.beta * (load<vec>(w.v + r) - f.sk[i][p]);
          store<vec>(w.u + r, u);
          store<vec>(w.o + r, f.sq[i][p] + u * keys.kq);
        }
      }
    }
  }

  // A chunk's u as `finish` stored it.
  __attribute__((always_inline)) static void recall(Flight& f, int row, const Scratch& w) {
#pragma GCC unroll 8
    for (int i = 0; i < ilp; i++) {
#pragma GCC unroll 2
      for (int p = 0; p < parts; p++) {
        f.u[i].part[p] = plain(k_last ? splat<vec>(w.u[row + i]) : load<vec>(w.u + row + i * lot + p * vec));
      }
    }
  }

  // One token: nothing is kept, a chunk is read twice, from memory and from L1. The stores lag a chunk behind, so that
  // the next chunk's dots run while the sums over lanes, and u, are on their way (1.4 instead of 1.9 us a head, bf16,
  // ilp 2, in L1).
  __attribute__((noinline)) static void only_token(const Keys& keys, const State* from, State* passing, State* final,
                                                   const State* ahead, int64_t pitch, Scratch& w) {
    const bool stores = passing || final;
    for (int row = 0; row <= tile_v; row += chunk) {
      Flight f;
      if (row < tile_v) {
        sweep<false, true>(f, keys, keys, from, pitch, pitch, {}, {ahead, 0, stores ? 2 : 1}, row);
        finish(f, keys, row, w);
      }
      if (row > 0 && stores) {
        recall(f, row - chunk, w);
        const Targets to{nullptr, passing, final};
        sweep<true, false>(f, keys, keys, from, pitch, pitch, to, {ahead, 1, 2}, row - chunk);
      }
    }
  }

  // The first of several tokens: reads the state.
  __attribute__((noinline)) static void first_token(const Keys& keys, const State* from, Ahead ahead, int64_t pitch,
                                                    Scratch& w) {
    for (int row = 0; row < tile_v; row += chunk) {
      Flight f;
      sweep<false, true>(f, keys, keys, from, pitch, pitch, {w.kept, nullptr, nullptr}, ahead, row);
      finish(f, keys, row, w);
    }
  }

  // Each further token: `passing` is where the state after the last one goes.
  __attribute__((noinline)) static void next_token(const Keys& last, const Keys& next, State* passing, Ahead ahead,
                                                   int64_t pitch, Scratch& w) {
    for (int row = 0; row < tile_v; row += chunk) {
      Flight f;
      recall(f, row, w);
      sweep<true, true, float>(f, last, next, w.kept, tile_v, pitch, {w.kept, passing, nullptr}, ahead, row);
      finish(f, next, row, w);
    }
  }

  // After the last of several tokens: the stores.
  __attribute__((noinline)) static void after_tokens(const Keys& last, State* passing, State* final, Ahead ahead,
                                                     int64_t pitch, Scratch& w) {
    for (int row = 0; row < tile_v; row += chunk) {
      Flight f;
      recall(f, row, w);
      sweep<true, false, float>(f, last, last, w.kept, tile_v, pitch, {nullptr, passing, final}, ahead, row);
    }
  }

  // n floats from n elements of any dtype, `stride` elements apart.
  template <class E>
  static void read_as(const char* p, int64_t stride, int n, float* to) {
    const E* from = reinterpret_cast<const E*>(p);
    if (stride == 1 && n % vec == 0) {
      for (int i = 0; i < n; i += vec) store<vec>(to + i, load<vec>(from + i));
    } else {
      for (int i = 0; i < n; i++) to[i] = value(from + i * stride);
    }
  }
  static void read(const Tensor& t, const char* p, int64_t stride, int n, float* to) {
    if (t.type == fp32) read_as<float>(p, stride, n, to);
    else if (t.type == bf16) read_as<Bf16>(p, stride, n, to);
    else read_as<Half>(p, stride, n, to);
  }
  static float read_one(const Tensor& t, const char* p) {
    float x;
    read(t, p, 1, 1, &x);
    return x;
  }

  template <class E>
  static void write_as(char* p, const float* from, int n) {
    for (int i = 0; i < n; i += vec) store<vec>(reinterpret_cast<E*>(p) + i, load<vec>(from + i));
  }
  static void write(const Tensor& t, char* p, const float* from, int n) {
    if (t.type == fp32) write_as<float>(p, from, n);
    else if (t.type == bf16) write_as<Bf16>(p, from, n);
    else write_as<Half>(p, from, n);
  }

  // What reaches the state: rounding it to bf16 takes NaNs of one kind alone, which is 10% quicker than a look at each
  // element.
  static F plain(F x) {
    if constexpr (parts == 2) return canonical<vec>(x);
    return x;
  }

  // q and k of a request's head, normalised, q scaled; and k.q.
  static void prepare_head(const Call& c, const Request& r, int64_t h, Scratch& w) {
    for (int t = 0; t < r.tokens; t++) {
      read(c.q, c.q.at(r.batch, r.first + t, h), 1, K, w.q[t]);
      read(c.k, c.k.at(r.batch, r.first + t, h), 1, K, w.k[t]);
      if (k_last) arrange<State, vec>(w.q[t], K), arrange<State, vec>(w.k[t], K);
      F qq{}, kk{}, kq{};
      for (int i = 0; i < K; i += vec) {
        const F q = load<vec>(w.q[t] + i), k = load<vec>(w.k[t] + i);
        qq += q * q;
        kk += k * k;
        kq += k * q;
      }
      const Floats<4> s = sums<vec>(qq, kk, kq, kq);  // qq, kq, kk, kq
      const float q_factor = c.scale * (c.l2norm ? 1.0f / std::sqrt(s[0] + 1e-6f) : 1.0f);
      const float k_factor = c.l2norm ? 1.0f / std::sqrt(s[2] + 1e-6f) : 1.0f;
      for (int i = 0; i < K; i += vec) {
        store<vec>(w.q[t] + i, load<vec>(w.q[t] + i) * q_factor);
        store<vec>(w.k[t] + i, plain(load<vec>(w.k[t] + i) * k_factor));
      }
      w.kq[t] = s[1] * q_factor * k_factor;
    }
  }

  // A value head's A_log and exp(A_log), which is inf from 88.7 on; what it would multiply may be zero.
  struct Rate {
    F log{}, A{};
    bool large = false;
    static constexpr float largest = 88.0f;
  };

  static Rate rate_of(float A_log) {
    const F log = splat<vec>(A_log);
    return {log, exp_of<vec>(log), A_log > Rate::largest};
  }

  // exp(A_log) x where that is large: in two factors, which reach as far as any x above zero needs.
  static F times_large(const Rate& rate, F x) {
    const F half = splat<vec>(std::min(0.5f * rate.log[0], Rate::largest));
    const F factor = exp_of<vec>(half);
    return x * factor * factor;
  }

  // The decay of x, a or g. Without A_log x is the log decay.
  static F decay_of(const Call& c, F x, F bias, const Rate& rate) {
    if (c.A_log.given) {
      x += bias;
      if (Setting::lower_bound) {
        x = c.lower_bound * sigmoid_of<vec>(rate.large ? times_large(rate, x) : rate.A * x);
      } else {
        const F scaled = x * c.softplus_beta;
        F y = rate.A * (scaled > c.softplus_threshold ? x : softplus_of<vec>(scaled) / c.softplus_beta);
        // below -17 softplus is exp in fp32, and above it the decay vanishes
        if (rate.large) y = scaled < -17.0f ? exp_of<vec>(rate.log + scaled) / c.softplus_beta : y;
        x = -y;
      }
    }
    return plain(exp_of<vec>(x));
  }

  // The gates of a request's value head, folded into its keys.
  static void prepare_gates(const Call& c, const Request& r, int64_t h, int64_t hv, Scratch& w) {
    const int64_t a_head = c.A_log.size[0] == c.HV ? hv : h, bias_head = c.dt_bias.size[0] == c.HV ? hv : h;
    const Rate rate = c.A_log.given ? rate_of(read_one(c.A_log, c.A_log.at(a_head))) : Rate{};
    float biases[K] = {}, gates[K];
    F bias{}, decay{};
    if (c.dt_bias.given && c.by_key) read(c.dt_bias, c.dt_bias.at(bias_head), c.dt_bias.stride[1], K, biases);
    else if (c.dt_bias.given) bias = splat<vec>(read_one(c.dt_bias, c.dt_bias.at(bias_head)));
    for (int t = 0; t < r.tokens; t++) {
      Keys& keys = w.keys[t];
      const char* a = c.a.at(r.batch, r.first + t, hv);
      if (c.by_key) {
        read(c.a, a, c.a.stride[3], K, gates);
        for (int i = 0; i < K; i += vec) {
          store<vec>(gates + i, decay_of(c, load<vec>(gates + i), load<vec>(biases + i), rate));
        }
        if (k_last) arrange<State, vec>(gates, K);
      } else {
        decay = decay_of(c, splat<vec>(read_one(c.a, a)), bias, rate);
      }
      for (int i = 0; i < K; i += vec) {
        if (c.by_key) decay = load<vec>(gates + i);
        store<vec>(keys.decay + i, decay);
        store<vec>(keys.kd + i, load<vec>(w.k[t] + i) * decay);
        store<vec>(keys.qd + i, load<vec>(w.q[t] + i) * decay);
      }
      const float b = read_one(c.b, c.b.at(r.batch, r.first + t, hv));
      keys.beta = c.beta_scale * (Setting::beta_logit ? sigmoid_of<vec>(splat<vec>(b))[0] : b);
      keys.k = w.k[t];
      keys.kq = w.kq[t];
    }
  }

  // The tile at `row` of a head.
  static State* tile(char* head, int64_t row) { return reinterpret_cast<State*>(head) + (k_last ? row * K : row); }

  // Where the state after token t goes, beside the final one.
  static State* passing_tile(const Call& c, const Request& r, int64_t n, int64_t hv, int64_t row, int t) {
    if (c.slots) {
      const int64_t slot = t < c.slot.size[1] ? c.named(c.slot.index(n, t), c.state.size[0]) : -1;
      if (slot >= 0) return tile(c.state.at(slot, hv), row);
    } else if (r.row >= 0 && t < c.intermediate.size[1]) {
      return tile(c.intermediate.at(r.row, t, hv), row);
    }
    return nullptr;
  }

  // All tokens on one tile. It is read before any of it is stored, so a slot may be read and written.
  static void run_tile(const Call& c, const Request& r, int64_t n, int64_t hv, int64_t row, const State* ahead,
                       Scratch& w) {
    const int end = r.tokens - 1;
    const State* from = tile(c.state.at(r.read, hv), row);
    State* final = r.write < 0 ? nullptr : tile(c.state.at(r.write, hv), row);
    State* passing = passing_tile(c, r, n, hv, row, end);
    if (passing == final) passing = nullptr;
    const bool stores = passing || final;
    const int passes = r.tokens + stores;
    for (int t = 0; t <= end; t++) {
      read(c.v, c.v.at(r.batch, r.first + t, hv) + row * c.v.bytes(), 1, tile_v, w.v);
      if (!k_last) arrange<State, vec>(w.v, tile_v);
      if (end == 0) only_token(w.keys[0], from, passing, final, ahead, c.V, w);
      else if (t == 0) first_token(w.keys[0], from, {ahead, 0, passes}, c.V, w);
      else next_token(w.keys[t - 1], w.keys[t], passing_tile(c, r, n, hv, row, t - 1), {ahead, t, passes}, c.V, w);
      if (!k_last) arrange<State, vec>(w.o, tile_v, true);
      write(c.output, c.output.at(r.batch, r.first + t, hv) + row * c.output.bytes(), w.o, tile_v);
    }
    if (end > 0 && stores) after_tokens(w.keys[end], passing, final, {ahead, r.tokens, passes}, c.V, w);
  }

  // A ragged request of no tokens: its start state is its final one.
  static void carry_tile(const Call& c, const Request& r, int64_t hv, int64_t row) {
    if (r.write < 0 || r.write == r.read) return;
    const State* from = tile(c.state.at(r.read, hv), row);
    State* to = tile(c.state.at(r.write, hv), row);
    const int64_t rows = k_last ? tile_v : K, size = k_last ? K : tile_v, pitch = k_last ? K : c.V;
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * pitch, from + i * pitch, size * sizeof(State));
  }

  // Padding: its output rows are zero.
  static void pad_tile(const Call& c, const Request& r, int64_t hv, int64_t row, Scratch& w) {
    for (float& x : w.o) x = 0.0f;
    for (int t = 0; t < r.tokens; t++) {
      write(c.output, c.output.at(r.batch, r.first + t, hv) + row * c.output.bytes(), w.o, tile_v);
    }
  }

  // Fewer elements are one thread's: a fork takes as long as a few heads.
  static constexpr int64_t serial_elements = 4 * 128 * 128;

  static void run(const Call& c) {
    const int64_t tiles = c.V / tile_v, tasks = c.N * c.HV * tiles, shared = c.HV / c.H;
#pragma omp parallel if (tasks * tile_v * K > serial_elements)
    {
      Scratch w;
      Request r{}, after{};
      int64_t n = -1, after_n = -1, head = -1, value_head = -1;
      // Contiguous shares: neighbours share a request's q and k, which are prepared again only where they change.
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < tasks; i++) {
        const int64_t hv = i / tiles % c.HV, row = i % tiles * tile_v;
        if (n != i / tiles / c.HV) {
          n = i / tiles / c.HV;
          r = request_of(c, n, Setting::writes, Setting::tokens);
        }
        if (r.read < 0) {
          pad_tile(c, r, hv, row, w);
          continue;
        }
        if (r.tokens == 0) {
          carry_tile(c, r, hv, row);
          continue;
        }
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
            after = request_of(c, after_n, Setting::writes, Setting::tokens);
          }
          if (after.read >= 0) ahead = tile(c.state.at(after.read, next % c.HV), (i + 1) % tiles * tile_v);
        }
        run_tile(c, r, n, hv, row, ahead, w);
      }
      if (Setting::around) settle();
    }
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    return answer(result, [&] { run(checked<Setting>(values, count)); });
  }
};

}  // namespace
