// The arguments of a decode call, as gdntune/kernels/spec.py lists them: read, checked and named.
#pragma once

#include <array>
#include <utility>

#include "arguments.h"
#include "vectors.h"

namespace {

constexpr int MAX_TOKENS = 16;

// clang-format off
enum Argument {
  STATE, Q, KEY, VALUE, A, B, A_LOG, DT_BIAS, READ, WRITE, SLOT, ACCEPTED, CU_SEQLENS, INTERMEDIATE, OUTPUT,
  SCALE, SOFTPLUS_BETA, SOFTPLUS_THRESHOLD, LOWER_BOUND, BETA_SCALE, NULL_INDEX, L2NORM, ARGUMENTS,
};
constexpr const char* NAMES[ARGUMENTS] = {
  "state", "q", "k", "v", "a", "b", "A_log", "dt_bias", "read_index", "write_index", "slot_index", "accepted",
  "cu_seqlens", "intermediate", "output", "scale", "softplus_beta", "softplus_threshold", "lower_bound", "beta_scale",
  "null_index", "use_qk_l2norm",
};
// clang-format on

// The names of a call's arguments where `more` stand behind those of a decode call.
template <size_t N>
constexpr std::array<const char*, ARGUMENTS + N> names_with(const char* const (&more)[N]) {
  std::array<const char*, ARGUMENTS + N> names{};
  for (size_t i = 0; i < names.size(); i++) names[i] = i < ARGUMENTS ? NAMES[i] : more[i - ARGUMENTS];
  return names;
}

// Where the final state goes: to the slot of write_index, to row n, nowhere.
enum class Writes { by_index, by_row, never };

struct Call {
  Tensor state, q, k, v, a, b, A_log, dt_bias, read, write, slot, accepted, cu_seqlens, intermediate, output;
  float scale, softplus_beta, softplus_threshold, lower_bound, beta_scale;
  int64_t null_index;
  bool l2norm;
  bool by_key;  // a decay a key (KDA)
  bool slots;   // slot_index [B, 1+S] names the slots to start from and to write after each token
  bool ragged;
  int64_t N, T, H, HV, V;

  // A slot or row that an index names; -1 where it is padding, or outside.
  int64_t named(int64_t index, int64_t size) const {
    return index >= 0 && index < size && index != null_index ? index : -1;
  }
};

// Rows of a head must lie `pitch` apart: inner loops know no other distance. Heads must lie side by side, as CUDA
// kernels ask of a pool.
inline void require_whole_heads(const Tensor& t, Argument i, int64_t pitch) {
  if (t.stride[t.rank - 2] != pitch && t.size[t.rank - 2] > 1) {
    refuse("ValueError", "%s: rows %lld elements apart were given, expected %lld: each head contiguous", NAMES[i],
           (long long)t.stride[t.rank - 2], (long long)pitch);
  }
  const int64_t head = pitch * t.size[t.rank - 2];
  if (t.stride[t.rank - 3] != head && t.size[t.rank - 3] > 1) {
    refuse("ValueError", "%s: heads %lld elements apart were given, expected %lld: each slot contiguous", NAMES[i],
           (long long)t.stride[t.rank - 3], (long long)head);
  }
}

inline void require_at_least(Argument i, const char* what, int64_t given, const char* letter, int64_t least) {
  if (given < least) {
    refuse("ValueError", "%s: %lld %s were given, expected %s=%lld or more", NAMES[i], (long long)given, what,
           letter, (long long)least);
  }
}

template <class Setting>
Call checked(const TVMFFIAny* values, int count) {
  constexpr bool k_last = Setting::k_last;
  constexpr Type kept = type_in_memory<typename Setting::State>;
  const Arguments given(values, count, NAMES, ARGUMENTS);
  Call c{};
  int64_t K = Setting::K, batch = -1, slots = -1, columns = -1;
  c.T = c.H = c.HV = c.V = -1;
  int64_t *row = k_last ? &c.V : &K, *column = k_last ? &K : &c.V;

  const char* pool = k_last ? "[slots, HV, V, K]" : "[slots, HV, K, V]";
  const char* buffer = k_last ? "[rows, steps, HV, V, K]" : "[rows, steps, HV, K, V]";

  c.state = given.tensor(STATE, kept, pool, {&slots, &c.HV, row, column}, true);
  require_whole_heads(c.state, STATE, *column);
  c.q = given.tensor(Q, floating, "[B, T, H, K]", {&batch, &c.T, &c.H, &K}, true);
  c.k = given.tensor(KEY, floating, "[B, T, H, K]", {&batch, &c.T, &c.H, &K}, true);
  c.v = given.tensor(VALUE, floating, "[B, T, HV, V]", {&batch, &c.T, &c.HV, &c.V}, true);
  c.output = given.tensor(OUTPUT, floating, "[B, T, HV, V]", {&batch, &c.T, &c.HV, &c.V}, true);
  c.by_key = given.rank(A) == 4;
  if (c.by_key) c.a = given.tensor(A, floating, "[B, T, HV, K]", {&batch, &c.T, &c.HV, &K}, true);
  else c.a = given.tensor(A, floating, "[B, T, HV]", {&batch, &c.T, &c.HV});
  c.b = given.tensor(B, floating, "[B, T, HV]", {&batch, &c.T, &c.HV});

  if (given.has(A_LOG)) c.A_log = given.tensor(A_LOG, floating, "[HV] or [H]", {nullptr});
  if (given.has(DT_BIAS)) {
    if (c.by_key) c.dt_bias = given.tensor(DT_BIAS, floating, "[HV, K] or [H, K]", {nullptr, &K}, true);
    else c.dt_bias = given.tensor(DT_BIAS, floating, "[HV] or [H]", {nullptr});
  }
  for (const auto& [t, i] : {std::pair(&c.A_log, A_LOG), std::pair(&c.dt_bias, DT_BIAS)}) {
    if (t->given && t->size[0] != c.HV && t->size[0] != c.H) {
      refuse("ValueError", "%s: %lld heads were given, expected HV=%lld or H=%lld", NAMES[i],
             (long long)t->size[0], (long long)c.HV, (long long)c.H);
    }
  }
  if (c.H < 1 || c.HV % c.H) {
    refuse("ValueError", "v: HV=%lld heads were given with H=%lld of q, expected a multiple", (long long)c.HV,
           (long long)c.H);
  }
  if (c.V % Setting::tile_v) {
    refuse("ValueError", "v: V=%lld was given, expected a multiple of tile_v=%d", (long long)c.V, Setting::tile_v);
  }

  c.ragged = given.has(CU_SEQLENS);
  c.N = batch;
  if (c.ragged) {
    c.cu_seqlens = given.tensor(CU_SEQLENS, int32, "[B+1]", {nullptr});
    c.N = c.cu_seqlens.size[0] - 1;
    if (batch != 1) {
      refuse("ValueError", "q: %lld rows were given with cu_seqlens, expected [1, total, H, K]", (long long)batch);
    }
  } else if (c.T > MAX_TOKENS) {
    refuse("ValueError", "q: T=%lld was given, expected 1 to %d", (long long)c.T, MAX_TOKENS);
  }
  // A ragged call's T is its packed rows: its columns and steps are clamped, token by token.
  const int64_t steps = c.ragged ? 1 : c.T;

  if (given.has(INTERMEDIATE)) {
    c.intermediate = given.tensor(INTERMEDIATE, kept, buffer, {nullptr, nullptr, &c.HV, row, column}, true);
    require_whole_heads(c.intermediate, INTERMEDIATE, *column);
    require_at_least(INTERMEDIATE, "steps", c.intermediate.size[1], "T", steps);
    if (given.has(SLOT)) c.slot = given.tensor(SLOT, int32, "[B]", {&c.N});
    else require_at_least(INTERMEDIATE, "rows", c.intermediate.size[0], "B", c.N);
  } else if (given.has(SLOT)) {
    c.slots = true;
    c.slot = given.tensor(SLOT, int32, "[B, 1+S]", {&c.N, &columns});
    require_at_least(SLOT, "columns", columns, "T", steps);
  }
  if (given.has(ACCEPTED)) {
    if (!c.slots) refuse("TypeError", "accepted: a tensor was given, expected None without a slot_index [B, 1+S]");
    c.accepted = given.tensor(ACCEPTED, int32, "[B]", {&c.N});
  }
  if (given.has(READ)) {
    if (c.slots) refuse("TypeError", "read_index: a tensor was given, expected None with a slot_index [B, 1+S]");
    c.read = given.tensor(READ, int32, "[B]", {&c.N});
  } else if (!c.slots) {
    require_at_least(STATE, "rows", slots, "B", c.N);
  }
  if (Setting::writes == Writes::by_index) {
    c.write = given.tensor(WRITE, int32, "[B]", {&c.N});
  } else if (given.has(WRITE)) {
    refuse("TypeError", "write_index: a tensor was given, expected None: this function was compiled %s",
           Setting::writes == Writes::never ? "for a frozen state" : "for a state without a pool");
  }

  c.scale = float(given.number(SCALE));
  c.softplus_beta = float(given.number(SOFTPLUS_BETA));
  c.softplus_threshold = float(given.number(SOFTPLUS_THRESHOLD));
  c.lower_bound = float(given.number(LOWER_BOUND));
  c.beta_scale = float(given.number(BETA_SCALE));
  c.null_index = int64_t(given.number(NULL_INDEX));
  c.l2norm = given.number(L2NORM) != 0;
  return c;
}

}  // namespace
