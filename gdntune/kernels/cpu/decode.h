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
  static constexpr int kept_stride = k_last ? K : tile_v;  // of the tile in fp32
  static_assert(tile_v % chunk == 0 && tile_v % vec == 0 && K % lot == 0);

  // One token of one head: what `update` and `dots` multiply the state by.
  struct alignas(64) Keys {
    float decay[K], k[K], kd[K], qd[K];
    float beta, kq;
  };

  // A thread's working memory: what tiles of one head share, and one tile; 16 KiB of it are `kept` at 32 rows of K=128.
  struct alignas(64) Scratch {
    float kept[tile_v * K];
    float v[tile_v], u[tile_v], sk[tile_v], sq[tile_v], o[tile_v];
    float q[MAX_TOKENS][K], k[MAX_TOKENS][K];
    Keys keys[MAX_TOKENS];
  };

  // A tile of the state in memory: its rows in flight lie `stride` apart (k_last: rows of V; v_last: keys). None where `first` is null.
  struct Tile {
    State* first = nullptr;
    int64_t stride = 0;
  };

  // A step's factors of the contraction index: those of a lot of keys, or of one key.
  static P factor(const float* p, int step) {
    if constexpr (k_last) return load_pack<State, vec>(p + step * lot);
    P r;
    for (F& x : r.part) x = splat<vec>(p[step]);
    return r;
  }

  // The place of group i of the chunk at `row`, at a step.
  template <class E>
  static E* place(E* tile, int64_t stride, int row, int step, int i) {
    if constexpr (k_last) return tile + (row + i) * stride + step * lot;
    return tile + step * stride + row + i * lot;
  }

  // A pass over one chunk of a tile `from` memory or kept: applies the `last` token's decay and u, sums the `next` token's dots, keeps the rows in
  // fp32, stores them to `one` and `two`, fetches the chunk of the tile `ahead` into the cache.
  template <bool update, bool dots, class From>
  __attribute__((noinline)) static void sweep(const Keys* last, const Keys* next, const From* from, int64_t stride, float* keep, Tile one, Tile two, Tile ahead,
                                              int row, Scratch& w) {
    P u[ilp], k_sum[ilp] = {}, q_sum[ilp] = {};
    if constexpr (update) {
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) {
        if constexpr (!k_last) u[i] = load_pack<State, vec>(w.u + row + i * lot);
        else for (F& x : u[i].part) x = splat<vec>(w.u[row + i]);
      }
    }
    for (int step = 0; step < steps; step++) {
      P decay, k, kd, qd, s[ilp];
      if constexpr (update) decay = factor(last->decay, step), k = factor(last->k, step);
      if constexpr (dots) kd = factor(next->kd, step), qd = factor(next->qd, step);
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) {
        s[i] = load_pack<State, vec>(place(from, stride, row, step, i));
        for (int p = 0; p < parts; p++) {
          if constexpr (update) s[i].part[p] = s[i].part[p] * decay.part[p] + u[i].part[p] * k.part[p];
          if constexpr (dots) k_sum[i].part[p] += s[i].part[p] * kd.part[p], q_sum[i].part[p] += s[i].part[p] * qd.part[p];
        }
      }
      if (ahead.first && step % steps_a_line == 0) {
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i += groups_a_line) __builtin_prefetch(place(ahead.first, ahead.stride, row, step, i));
      }
      if (dots && keep) {
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i++) store_pack<State, vec>(place(keep, kept_stride, row, step, i), s[i]);
      }
      if (update && one.first) {
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i++) store_pack<State, vec>(place(one.first, one.stride, row, step, i), s[i]);
      }
      if (update && two.first) {
#pragma GCC unroll 8
        for (int i = 0; i < ilp; i++) store_pack<State, vec>(place(two.first, two.stride, row, step, i), s[i]);
      }
    }
    if constexpr (dots && k_last) {
#pragma GCC unroll 4
      for (int i = 0; i < ilp; i += 2) {
        const int j = ilp > 1 ? i + 1 : i;
        Floats<4> s = sums<vec>(total(k_sum[i]), total(q_sum[i]), total(k_sum[j]), total(q_sum[j]));
        w.sk[row + i] = s[0], w.sk[row + j] = s[1], w.sq[row + i] = s[2], w.sq[row + j] = s[3];
      }
    } else if constexpr (dots) {
#pragma GCC unroll 8
      for (int i = 0; i < ilp; i++) store_pack(w.sk + row + i * lot, k_sum[i]), store_pack(w.sq + row + i * lot, q_sum[i]);
    }
  }
  static constexpr int bytes = lot * sizeof(State), steps_a_line = k_last && bytes < 64 ? 64 / bytes : 1, groups_a_line = !k_last && bytes < 64 ? 64 / bytes : 1;

  static F total(const P& x) {
    F r = x.part[0];
    if constexpr (parts == 2) r += x.part[1];
    return r;
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

  // q and k of a request's head: fp32, normalised, q scaled.
  static void prepare_head(const Call& c, const Request& r, int64_t h, Scratch& w) {
    for (int t = 0; t < r.tokens; t++) {
      read(c.q, c.q.at(r.batch, r.first + t, h), 1, K, w.q[t]);
      read(c.k, c.k.at(r.batch, r.first + t, h), 1, K, w.k[t]);
      if (k_last) arrange<State, vec>(w.q[t], K), arrange<State, vec>(w.k[t], K);
      F qq{}, kk{};
      for (int i = 0; i < K; i += vec) {
        F q = load<vec>(w.q[t] + i), k = load<vec>(w.k[t] + i);
        qq += q * q;
        kk += k * k;
      }
      const float qn = c.scale * (c.l2norm ? 1.0f / std::sqrt(sum<vec>(qq) + 1e-6f) : 1.0f);
      const float kn = c.l2norm ? 1.0f / std::sqrt(sum<vec>(kk) + 1e-6f) : 1.0f;
      for (int i = 0; i < K; i += vec) {
        store<vec>(w.q[t] + i, load<vec>(w.q[t] + i) * qn);
        store<vec>(w.k[t] + i, load<vec>(w.k[t] + i) * kn);
      }
    }
  }

  // exp of the log decay; x is a or g, `bias` and A = exp(A_log) are not used where the log decay is given.
  static F decay_of(const Call& c, F x, F bias, float A) {
    if (c.A_log.given) {
      x += bias;
      if (Setting::lower_bound) {
        x = c.lower_bound * sigmoid_of<vec>(A * x);
      } else {
        F scaled = x * c.softplus_beta;
        x = -A * (scaled > c.softplus_threshold ? x : softplus_of<vec>(scaled) / c.softplus_beta);
      }
    }
    return exp_of<vec>(x);
  }

  // The gates of a request's value head, folded into its keys.
  static void prepare_gates(const Call& c, const Request& r, int64_t h, int64_t hv, Scratch& w) {
    const int64_t a_head = c.A_log.size[0] == c.HV ? hv : h, bias_head = c.dt_bias.size[0] == c.HV ? hv : h;
    const float A = c.A_log.given ? std::exp(read_one(c.A_log, c.A_log.at(a_head))) : 0.0f;
    // GDN's one log decay a head fills a vector, KDA's one a key all of them.
    const int n = c.by_key ? K : vec;
    float bias[K], g[K];
    if (c.dt_bias.given) read(c.dt_bias, c.dt_bias.at(bias_head), c.by_key ? c.dt_bias.stride[1] : 0, n, bias);
    else for (float& x : bias) x = 0.0f;
    for (int t = 0; t < r.tokens; t++) {
      Keys& keys = w.keys[t];
      read(c.a, c.a.at(r.batch, r.first + t, hv), c.by_key ? c.a.stride[3] : 0, n, g);
      for (int i = 0; i < n; i += vec) store<vec>(g + i, decay_of(c, load<vec>(g + i), load<vec>(bias + i), A));
      if (k_last && c.by_key) arrange<State, vec>(g, K);
      F kq{};
      for (int i = 0; i < K; i += vec) {
        F q = load<vec>(w.q[t] + i), k = load<vec>(w.k[t] + i), decay = load<vec>(g + i % n);
        kq += k * q;
        store<vec>(keys.decay + i, decay);
        store<vec>(keys.k + i, k);
        store<vec>(keys.kd + i, k * decay);
        store<vec>(keys.qd + i, q * decay);
      }
      keys.kq = sum<vec>(kq);
      const float beta = read_one(c.b, c.b.at(r.batch, r.first + t, hv));
      keys.beta = c.beta_scale * (Setting::beta_logit ? sigmoid_of<vec>(splat<vec>(beta))[0] : beta);
    }
  }

  static bool names_slot(const Call& c, int64_t index, int64_t slots) { return index >= 0 && index < slots && index != c.null_index; }

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
      r.read = c.slot.index(n, start - 1);
    } else if (c.read.given) {
      r.read = c.read.index(n);
    }
    if (!names_slot(c, r.read, slots)) r.read = -1;
    if (Setting::writes == Writes::by_row) r.write = n;
    if (c.write.given) r.write = c.write.index(n);
    if (!names_slot(c, r.write, slots)) r.write = -1;
    if (c.intermediate.given) {
      r.row = c.slot.given ? c.slot.index(n) : n;
      if (!names_slot(c, r.row, c.intermediate.size[0])) r.row = -1;
    }
    return r;
  }

  static Tile tile(const Tensor& t, char* head, int64_t row) {
    const int64_t stride = t.stride[t.rank - 2];
    return {reinterpret_cast<State*>(head) + (k_last ? row * stride : row), stride};
  }

  // Where the state after token t goes, beside the final one.
  static Tile between(const Call& c, const Request& r, int64_t n, int64_t hv, int64_t row, int t) {
    if (c.slots) {
      const int64_t slot = t < c.slot.size[1] ? c.slot.index(n, t) : -1;
      if (names_slot(c, slot, c.state.size[0])) return tile(c.state, c.state.at(slot, hv), row);
    } else if (r.row >= 0 && t < c.intermediate.size[1]) {
      return tile(c.intermediate, c.intermediate.at(r.row, t, hv), row);
    }
    return {};
  }

  static void task(const Call& c, const Request& r, int64_t n, int64_t hv, int64_t row, Tile ahead, Scratch& w) {
    const int end = r.tokens - 1;
    const Tile nowhere, from = tile(c.state, c.state.at(r.read, hv), row);
    const Tile one = between(c, r, n, hv, row, end), two = r.write < 0 ? nowhere : tile(c.state, c.state.at(r.write, hv), row);
    const bool stores = one.first || two.first;
    for (int t = 0; t <= end; t++) {
      read(c.v, c.v.at(r.batch, r.first + t, hv) + row * c.v.bytes(), 1, tile_v, w.v);
      if (!k_last) arrange<State, vec>(w.v, tile_v);
      const Keys *last = w.keys + t - 1, *next = w.keys + t;
      const Tile kept = t == 0 ? nowhere : between(c, r, n, hv, row, t - 1), fetched = t == end && !stores ? ahead : nowhere;
      for (int i = 0; i < tile_v; i += chunk) {
        if (t == 0) sweep<false, true, State>(nullptr, next, from.first, from.stride, end ? w.kept : nullptr, nowhere, nowhere, fetched, i, w);
        else sweep<true, true, float>(last, next, w.kept, kept_stride, w.kept, kept, nowhere, fetched, i, w);
        finish(*next, i, w);
        // With one token the chunk is still in L1: nothing is kept.
        if (end == 0 && stores) sweep<true, false, State>(next, nullptr, from.first, from.stride, nullptr, one, two, ahead, i, w);
      }
      if (!k_last) arrange<State, vec>(w.o, tile_v, true);
      write(c.output, c.output.at(r.batch, r.first + t, hv) + row * c.output.bytes(), w.o, tile_v);
    }
    if (end > 0 && stores) {
      for (int i = 0; i < tile_v; i += chunk) sweep<true, false, float>(w.keys + end, nullptr, w.kept, kept_stride, nullptr, one, two, ahead, i, w);
    }
  }

  static void pad(const Call& c, const Request& r, int64_t hv, int64_t row, Scratch& w) {
    for (float& x : w.o) x = 0.0f;
    for (int t = 0; t < r.tokens; t++) write(c.output, c.output.at(r.batch, r.first + t, hv) + row * c.output.bytes(), w.o, tile_v);
  }

  // u and the output rows of a chunk, from its dots.
  static void finish(const Keys& keys, int row, Scratch& w) {
    constexpr int n = chunk % vec ? chunk : vec;
#pragma GCC unroll 8
    for (int i = row; i < row + chunk; i += n) {
      if constexpr (n == vec || n == 4) {
        Floats<n> u = keys.beta * (load<n>(w.v + i) - load<n>(w.sk + i));
        store<n>(w.u + i, u);
        store<n>(w.o + i, load<n>(w.sq + i) + u * keys.kq);
      } else {
        for (int j = i; j < i + n; j++) {
          w.u[j] = keys.beta * (w.v[j] - w.sk[j]);
          w.o[j] = w.sq[j] + w.u[j] * keys.kq;
        }
      }
    }
  }

  // The arguments, checked.
  static Call checked(const TVMFFIAny* values, int count) {
    const Arguments given(values, count, NAMES, ARGUMENTS);
    Call c{};
    int64_t keys = K, batch = -1, slots = -1, any = -1;
    c.T = c.H = c.HV = c.V = -1;
    c.state = given.tensor(STATE, type_in_memory<State>, k_last ? "[slots, HV, V, K]" : "[slots, HV, K, V]", {&slots, &c.HV, k_last ? &c.V : &keys, k_last ? &keys : &c.V}, true);
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
#pragma omp for schedule(static)
      for (int64_t i = 0; i < tasks; i++) {
        const int64_t hv = i / tiles % c.HV, row = i % tiles * tile_v;
        if (n != i / tiles / c.HV) {
          n = i / tiles / c.HV;
          r = request(c, n);
        }
        if (r.read < 0) {
          pad(c, r, hv, row, w);
        } else if (r.tokens) {
          if (head != n * c.H + hv / shared) {
            head = n * c.H + hv / shared;
            prepare_head(c, r, hv / shared, w);
          }
          if (value_head != n * c.HV + hv) {
            value_head = n * c.HV + hv;
            prepare_gates(c, r, hv / shared, hv, w);
          }
          Tile ahead;
          if (Setting::ahead && i + 1 < tasks) {
            const int64_t next = (i + 1) / tiles;
            if (after_n != next / c.HV) {
              after_n = next / c.HV;
              after = request(c, after_n);
            }
            if (after.read >= 0) ahead = tile(c.state, c.state.at(after.read, next % c.HV), (i + 1) % tiles * tile_v);
          }
          task(c, r, n, hv, row, ahead, w);
        }
      }
    }
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    return answer(result, [&] { run(checked(values, count)); });
  }
};

}  // namespace
