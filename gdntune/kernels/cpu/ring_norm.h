// A layer's gated norm behind a ring: ring.h's tokens with their outputs in fp32, which layer.h's norm rounds once.
#pragma once

#include "layer.h"
#include "ring.h"

namespace {

// Behind a ring's arguments: those of a layer's norm.
constexpr int RING_NORM_ARGUMENTS = RING_ARGUMENTS + 3;

template <class Setting, Norm norm, int capacity, bool at_random>
class RingNorm : Layer<Setting, norm, Conv::none, false> {
  using Base = Layer<Setting, norm, Conv::none, false>;

  static int run(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    const char* names[RING_NORM_ARGUMENTS];
    std::copy(RING_NAMES.begin(), RING_NAMES.end(), names);
    std::copy(LAYER_NAMES.begin() + OUTPUT_GATE, LAYER_NAMES.begin() + NORM_EPS + 1, names + RING_ARGUMENTS);
    const Arguments all(values, count, names, RING_NORM_ARGUMENTS);

    // the same call as a layer's, without a convolution, and as a ring's
    TVMFFIAny layer[LAYER_ARGUMENTS] = {}, inner[RING_ARGUMENTS];
    std::copy(values, values + ARGUMENTS, layer);
    std::copy(values + RING_ARGUMENTS, values + RING_NORM_ARGUMENTS, layer + ARGUMENTS);
    std::copy(values, values + RING_ARGUMENTS, inner);
    const Arguments given(layer, LAYER_ARGUMENTS, LAYER_NAMES.data(), LAYER_ARGUMENTS);
    Call c = checked<Setting>(values, ARGUMENTS);
    typename Base::Weights weights;
    Base::read_weights(given, c, weights);

    const int64_t batch = c.output.size[0], row = c.HV * c.V;
    Memory rows(batch * c.T * row);
    Floats4 outputs(rows.floats, batch, c.T, c.HV, c.V, row);
    inner[OUTPUT] = outputs.argument();
    if (const int failed = Ring<Setting, capacity, at_random>::call(inner, RING_ARGUMENTS, result)) return failed;
    Base::finish_all(c, weights, outputs);
    return 0;
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    return answer(result, [&] { return run(values, count, result); });
  }
};

}  // namespace
