// The floor: moves the bytes of the state that a decode kernel moves and computes next to nothing.
//
//     read            the `slots` [B] of state [*, n] are read; their sum goes to sink
//     read, write     they are multiplied by `factor` in place
//     read, T writes  multiplied by `factor` they go to intermediate [B, T, n], and back where the state is written
//
// A task is `block` KiB of one slot; `ilp` vectors of `vec` elements are in flight.
#pragma once

#include "arguments.h"
#include "vectors.h"

namespace {

template <class Setting>
class Stream {
  using State = typename Setting::State;
  static constexpr int vec = Setting::vec, ilp = Setting::ilp;
  using P = Pack<State, vec>;
  static constexpr int64_t block = Setting::block * 1024 / int64_t(sizeof(State)), line = 64 / sizeof(State);

  // body(place, n) for each run of n packs, n = ilp as long as they last.
  template <class Body>
  static void walk(int64_t count, const Body& body) {
    int64_t i = 0;
    for (; i + ilp * P::size <= count; i += ilp * P::size) body(i, std::integral_constant<int, ilp>{});
    for (; i < count; i += P::size) body(i, std::integral_constant<int, 1>{});
  }

  static void fetch(const State* ahead, int64_t i, int64_t size) {
    if (Setting::ahead && ahead) {
      for (int64_t j = 0; j < size; j += line) __builtin_prefetch(ahead + i + j);
    }
  }

  template <bool around>
  static void copy(const State* from, State* to, int64_t count, float factor, const State* ahead) {
    walk(count, [=](int64_t i, auto n) {
      P s[n.value];
#pragma GCC unroll 8
      for (int j = 0; j < n.value; j++) s[j] = load_pack<State, vec>(from + i + j * P::size);
      fetch(ahead, i, n.value * P::size);
#pragma GCC unroll 8
      for (int j = 0; j < n.value; j++) {
        for (auto& x : s[j].part) x *= factor;
        store_raw<around>(to + i + j * P::size, rounded(s[j]));
      }
    });
  }

  static float total(const State* from, int64_t count, const State* ahead) {
    Floats<vec> sums[ilp] = {};
    walk(count, [&](int64_t i, auto n) {
      fetch(ahead, i, n.value * P::size);
#pragma GCC unroll 8
      for (int j = 0; j < n.value; j++) {
        for (const auto& x : load_pack<State, vec>(from + i + j * P::size).part) sums[j] += x;
      }
    });
    float result = 0;
    for (const auto& x : sums) result += sum<vec>(x);
    return result;
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    static constexpr const char* names[] = {"state", "slots", "intermediate", "factor", "sink"};
    return answer(result, [&] {
      const Arguments given(values, count, names, 5);
      int64_t held = -1, n = -1, B = -1, one = 1;
      const Tensor state = given.tensor(0, type_in_memory<State>, "[slots, n]", {&held, &n}, true);
      const Tensor slots = given.tensor(1, int32, "[B]", {&B});
      Tensor buffer;
      if (given.has(2)) {
        buffer = given.tensor(2, type_in_memory<State>, "[B, steps, n]", {&B, nullptr, &n}, true);
      }
      const float factor = float(given.number(3));
      const Tensor sink = given.tensor(4, fp32, "[1]", {&one});
      if (n % 32) refuse("ValueError", "state: n=%lld was given, expected a multiple of 32", (long long)n);
      for (int64_t i = 0; i < B; i++) {
        const int64_t slot = slots.index(i);
        if (slot < 0 || slot >= held) refuse("ValueError", "slots: %lld was given, expected 0 to %lld", (long long)slot, (long long)held - 1);
      }
      const int64_t steps = buffer.given ? buffer.size[1] : 0, blocks = (n + block - 1) / block, tasks = B * blocks;
      float sum = 0;
      // A fork takes as long as a few heads: where the decode kernel is one thread's (decode.h), so is its floor.
#pragma omp parallel reduction(+ : sum) if (B * n > 4 * 128 * 128)
      {
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < tasks; i++) {
          const int64_t row = i / blocks, first = i % blocks * block, size = n - first < block ? n - first : block;
          State* s = reinterpret_cast<State*>(state.at(slots.index(row))) + first;
          const State* ahead = nullptr;
          if (i + 1 < tasks) ahead = reinterpret_cast<State*>(state.at(slots.index((i + 1) / blocks))) + (i + 1) % blocks * block;
          for (int64_t t = 0; t < steps; t++) {
            State* to = reinterpret_cast<State*>(buffer.at(row, t)) + first;
            copy<Setting::around>(s, to, size, factor, t ? nullptr : ahead);
          }
          if (Setting::write) copy<false>(s, s, size, factor, steps ? nullptr : ahead);
          if (!Setting::write && !steps) sum += total(s, size, ahead);
        }
        if (Setting::around) settle();
      }
      if (!Setting::write && !steps) *reinterpret_cast<float*>(sink.data) = sum;
    });
  }
};

}  // namespace
