// The gated RMSNorm behind the gated delta rule: y <- o rsqrt(mean(o^2) + eps) weight gate(z), o [V] a head's output.
//
// `Decode` writes its outputs in fp32 to memory of this call's own; then each head's row is normalised and rounded once.
// The rows are in a cache when they are read again: a row of V floats beside the K V elements of a state.
#pragma once

#include <memory>

#include "decode.h"

namespace {

enum class Norm { silu, sigmoid };

// clang-format off
enum LayerArgument { OUTPUT_GATE = ARGUMENTS, NORM_WEIGHT, NORM_EPS, LAYER_ARGUMENTS };
constexpr const char* LAYER_NAMES[LAYER_ARGUMENTS] = {
  "state", "q", "k", "v", "a", "b", "A_log", "dt_bias", "read_index", "write_index", "slot_index", "accepted",
  "cu_seqlens", "intermediate", "output", "scale", "softplus_beta", "softplus_threshold", "lower_bound", "beta_scale",
  "null_index", "use_qk_l2norm", "output_gate", "norm_weight", "norm_eps",
};
// clang-format on

// A contiguous tensor [B, T, heads, size] of fp32 in memory of its own.
class Floats4 {
 public:
  Floats4(int64_t B, int64_t T, int64_t heads, int64_t size)
      : shape_{B, T, heads, size}, strides_{T * heads * size, heads * size, size, 1} {
    constexpr int64_t line = 16;
    memory_.reset(new float[B * T * heads * size + line]);
    const int64_t ahead = reinterpret_cast<uintptr_t>(memory_.get()) % 64 / sizeof(float);
    tensor_ = {memory_.get() + (ahead ? line - ahead : 0), {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape_, strides_, 0};
  }

  // As an argument of a call.
  TVMFFIAny argument() {
    TVMFFIAny x{};
    x.type_index = kTVMFFIDLTensorPtr;
    x.v_ptr = &tensor_;
    return x;
  }

  float* at(int64_t b, int64_t t, int64_t head) const {
    return static_cast<float*>(tensor_.data) + b * strides_[0] + t * strides_[1] + head * strides_[2];
  }

 private:
  int64_t shape_[4], strides_[4];
  std::unique_ptr<float[]> memory_;
  DLTensor tensor_;
};

template <class Setting, Norm norm>
class Layer {
  static constexpr int vec = Setting::vec;
  using F = Floats<vec>;
  // of V, at most
  static constexpr int64_t widest = 512;

  template <class E>
  static void read_as(const char* p, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += vec) store<vec>(to + i, load<vec>(reinterpret_cast<const E*>(p) + i));
  }
  static void read(const Tensor& t, const char* p, int64_t n, float* to) {
    if (t.type == fp32) read_as<float>(p, n, to);
    else if (t.type == bf16) read_as<Bf16>(p, n, to);
    else read_as<Half>(p, n, to);
  }

  template <class E>
  static void write_as(char* p, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i += vec) store<vec>(reinterpret_cast<E*>(p) + i, load<vec>(from + i));
  }
  static void write(const Tensor& t, char* p, const float* from, int64_t n) {
    if (t.type == fp32) write_as<float>(p, from, n);
    else if (t.type == bf16) write_as<Bf16>(p, from, n);
    else write_as<Half>(p, from, n);
  }

  // A head's row, in place.
  static void normalise(float* o, const float* z, const float* weight, float eps, int64_t V) {
    F squares{};
    for (int64_t i = 0; i < V; i += vec) squares += load<vec>(o + i) * load<vec>(o + i);
    const float rstd = 1.0f / std::sqrt(sum<vec>(squares) / float(V) + eps);
    for (int64_t i = 0; i < V; i += vec) {
      const F x = load<vec>(z + i);
      F gate = sigmoid_of<vec>(x);
      if constexpr (norm == Norm::silu) gate *= x;
      store<vec>(o + i, load<vec>(o + i) * rstd * load<vec>(weight + i) * gate);
    }
  }

  // A request's head: all its tokens' rows. Padding's are zeros as they come.
  static void finish(const Call& c, const Tensor& gate, const float* weight, float eps, const Floats4& outputs,
                     const Request& r, int64_t hv) {
    float z[widest];
    for (int64_t t = r.first; t < r.first + r.tokens; t++) {
      float* o = outputs.at(r.batch, t, hv);
      if (r.read >= 0) {
        read(gate, gate.at(r.batch, t, hv), c.V, z);
        normalise(o, z, weight, eps, c.V);
      }
      write(c.output, c.output.at(r.batch, t, hv), o, c.V);
    }
  }

  static int run(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    const Arguments given(values, count, LAYER_NAMES, LAYER_ARGUMENTS);
    Call c = checked<Setting>(values, ARGUMENTS);
    int64_t batch = c.output.size[0];
    const Tensor gate = given.tensor(OUTPUT_GATE, floating, "[B, T, HV, V]", {&batch, &c.T, &c.HV, &c.V}, true);
    const Tensor given_weight = given.tensor(NORM_WEIGHT, floating, "[V]", {&c.V}, true);
    const float eps = float(given.number(NORM_EPS));
    if (c.V > widest || c.V % vec) {
      refuse("ValueError", "v: V=%lld was given, expected multiples of %d to %lld", (long long)c.V, vec,
             (long long)widest);
    }
    float weight[widest];
    read(given_weight, given_weight.data, c.V, weight);

    Floats4 outputs(batch, c.T, c.HV, c.V);
    TVMFFIAny inner[ARGUMENTS];
    std::copy(values, values + ARGUMENTS, inner);
    inner[OUTPUT] = outputs.argument();
    if (const int failed = Decode<Setting>::call(inner, ARGUMENTS, result)) return failed;

    const int64_t heads = c.N * c.HV;
#pragma omp parallel for schedule(static) if (heads * c.V > 1 << 16)
    for (int64_t i = 0; i < heads; i++) {
      const Request r = request_of(c, i / c.HV, Setting::writes, Setting::tokens);
      finish(c, gate, weight, eps, outputs, r, i % c.HV);
    }
    return 0;
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    int failed = 0;
    const int refused = answer(result, [&] { failed = run(values, count, result); });
    return refused ? refused : failed;
  }
};

}  // namespace
