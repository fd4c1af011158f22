// A layer around the gated delta rule, each end where it is compiled in:
//
//     q, k, v <- act(conv(mixed_qkv)), rounded to the inputs' dtype;   y <- o rsqrt(mean(o^2) + eps) weight gate(z)
//
// `Decode` reads and writes memory of this call's own, in fp32: the convolved channels of all requests, and the outputs
// [V] of all heads, which are normalised and rounded once. Both are rows in a cache beside the K V elements of a state.
#pragma once

#include <memory>

#include "decode.h"

namespace {

enum class Norm { none, silu, sigmoid };
enum class Conv { none, identity, silu };

// clang-format off
enum LayerArgument {
  OUTPUT_GATE = ARGUMENTS, NORM_WEIGHT, NORM_EPS, MIXED, CONV_STATE, CONV_WEIGHT, CONV_BIAS, CONV_POSITION,
  LAYER_ARGUMENTS,
};
constexpr auto LAYER_NAMES = names_with({
  "output_gate", "norm_weight", "norm_eps", "mixed_qkv", "conv_state", "conv_weight", "conv_bias", "conv_position",
});
// clang-format on

// Floats of a call's own, at a multiple of 64 bytes.
class Memory {
 public:
  explicit Memory(int64_t count) : owned_(new float[count + line]) {
    const int64_t ahead = reinterpret_cast<uintptr_t>(owned_.get()) % 64 / sizeof(float);
    floats = owned_.get() + (ahead ? line - ahead : 0);
  }
  float* floats;

 private:
  static constexpr int64_t line = 16;
  std::unique_ptr<float[]> owned_;
};

// fp32 [B, T, heads, size] as an argument of a call, its rows [heads, size] `row` floats apart.
struct Floats4 {
  int64_t shape[4], strides[4];
  DLTensor tensor;

  Floats4(float* data, int64_t B, int64_t T, int64_t heads, int64_t size, int64_t row)
      : shape{B, T, heads, size}, strides{T * row, row, size, 1} {
    tensor = {data, {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape, strides, 0};
  }
  Floats4(const Floats4&) = delete;

  // dimensions: 3 leaves `size` out, which is 1
  TVMFFIAny argument(int dimensions = 4) {
    tensor.ndim = dimensions;
    TVMFFIAny x{};
    x.type_index = kTVMFFIDLTensorPtr;
    x.v_ptr = &tensor;
    return x;
  }
  float* at(int64_t b, int64_t t, int64_t head) const {
    return static_cast<float*>(tensor.data) + b * strides[0] + t * strides[1] + head * strides[2];
  }
};

// interleaved: a token's rows of mixed_qkv, gate, a and b are those of q/k heads side by side (kernels/spec.py).
template <class Setting, Norm norm, Conv conv, bool interleaved>
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

  // A value head's output gate of a token.
  static const char* gate_at(const Call& c, const Tensor& gate, int64_t b, int64_t t, int64_t hv) {
    if constexpr (!interleaved) return gate.at(b, t, hv);
    const int64_t ratio = c.HV / c.H;
    return gate.at(b, t) + (hv * c.V + hv / ratio * (2 * Setting::K + ratio * c.V)) * gate.bytes();
  }

  // A request's head: all its tokens' rows. Padding's are zeros as they come.
  static void finish(const Call& c, const Tensor& gate, const float* weight, float eps, const Floats4& outputs,
                     const Request& r, int64_t hv) {
    float z[widest];
    for (int64_t t = r.first; t < r.first + r.tokens; t++) {
      float* o = outputs.at(r.batch, t, hv);
      if (r.read >= 0) {
        read(gate, gate_at(c, gate, r.batch, t, hv), c.V, z);
        normalise(o, z, weight, eps, c.V);
      }
      write(c.output, c.output.at(r.batch, t, hv), o, c.V);
    }
  }

  // A call's convolution. Taps are fp32 [width, D], the newest last, then the bias [D] or zeros.
  struct Window {
    Tensor mixed, state, bias, position;
    int64_t D, width, rows, keys, values;
    bool ring;
    const float* taps;

    // Where a token's row has channel i: of a q/k head `values` of its value heads' behind its q and k, then gates.
    int64_t input(int64_t i) const {
      if constexpr (!interleaved) return i;
      constexpr int64_t K = Setting::K;
      const int64_t v = i - 2 * keys, group = 2 * (K + values);
      if (v >= 0) return v / values * group + 2 * K + v % values;
      return i % keys / K * group + (i < keys ? 0 : K) + i % K;
    }

    // A slot's row: of a ring that of the j-th token before or behind the call's first, else the j-th behind `place`.
    char* row(int64_t slot, int64_t place, int64_t j) const {
      return state.at(slot, ring ? ((place + j) % rows + rows) % rows : place + j);
    }
    // `vec` channels of a row, from the i-th on.
    template <class E>
    F load_row(int64_t slot, int64_t place, int64_t j, int64_t i) const {
      const E* from = reinterpret_cast<const E*>(row(slot, place, j));
      if (state.stride[2] == 1) return load<vec>(from + i);
      E channels[vec];
      for (int n = 0; n < vec; n++) channels[n] = from[(i + n) * state.stride[2]];
      return load<vec>(channels);
    }
    template <class E>
    void store_row(int64_t slot, int64_t place, int64_t j, int64_t i, F x) const {
      E* to = reinterpret_cast<E*>(row(slot, place, j));
      if (state.stride[2] == 1) return store<vec>(to + i, x);
      E channels[vec];
      store<vec>(channels, x);
      for (int n = 0; n < vec; n++) to[(i + n) * state.stride[2]] = channels[n];
    }
    // Where a request's window begins: a ring behind it, a shifted one at its oldest row.
    int64_t place_of(const Call& c, int64_t n) const {
      if (ring) return std::min(std::max<int64_t>(position.index(n), 0), rows - 1);
      const int64_t ahead = c.slots && c.accepted.given ? c.accepted.index(n) - 1 : 0;
      return std::min(std::max<int64_t>(ahead, 0), rows - (width - 1));
    }
  };

  static Window window_of(const Arguments& given, Call& c) {
    Window w{};
    int64_t batch = c.q.size[0], slots = c.state.size[0];
    w.keys = c.H * Setting::K, w.values = c.HV / c.H * c.V;
    w.D = 2 * w.keys + c.HV * c.V;
    w.width = -1;
    int64_t row = interleaved ? w.D + c.HV * c.V : w.D;
    w.mixed = given.tensor(MIXED, floating, interleaved ? "[B, T, D + HV*V]" : "[B, T, D]", {&batch, &c.T, &row}, true);
    // rows of a ring are contiguous; a shifted window may have a channel's rows side by side
    w.ring = given.has(CONV_POSITION);
    w.state = given.tensor(CONV_STATE, w.mixed.type, "[slots, rows, D]", {&slots, nullptr, &w.D}, w.ring);
    const Tensor weight = given.tensor(CONV_WEIGHT, w.mixed.type, "[D, width]", {&w.D, &w.width});
    if (given.has(CONV_BIAS)) w.bias = given.tensor(CONV_BIAS, w.mixed.type, "[D]", {&w.D}, true);
    if (w.ring) w.position = given.tensor(CONV_POSITION, int32, "[B]", {&c.N});
    w.rows = w.state.size[1];
    const int64_t tokens = c.ragged ? Setting::tokens : c.T;
    const int64_t least = w.width - 1 + (w.ring ? tokens : c.slots ? tokens - 1 : 0);
    if (w.rows < least) {
      refuse("ValueError", "conv_state: %lld rows were given, expected %lld or more", (long long)w.rows,
             (long long)least);
    }
    if (w.width < 2 || w.width > 4 || w.D % vec) {
      refuse("ValueError", "conv_weight: [%lld, %lld] was given, expected 2 to 4 taps of a multiple of %d channels",
             (long long)w.D, (long long)w.width, vec);
    }
    return w;
  }

  template <class E>
  static void copy_values(const Tensor& t, float* to, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) to[i] = value(reinterpret_cast<const E*>(t.data) + i * stride);
  }
  static void copy_values(const Tensor& t, int64_t from, float* to, int64_t n, int64_t stride) {
    Tensor at = t;
    at.data += from * t.bytes();
    if (t.type == fp32) copy_values<float>(at, to, n, stride);
    else if (t.type == bf16) copy_values<Bf16>(at, to, n, stride);
    else copy_values<Half>(at, to, n, stride);
  }

  // Where a request's window is, and where its new rows go; -1 is nowhere.
  struct Slots {
    int64_t read, write;
  };
  static Slots slots_of(const Call& c, const Request& r, int64_t n) {
    if (c.slots) {
      const int64_t own = c.named(c.slot.index(n, 0), c.state.size[0]);
      return {own, own};
    }
    return {r.read, Setting::writes == Writes::never ? -1 : r.write};
  }

  // One request's channels, convolved and rounded as E; its window moves on: a shifted one of drafts by one row, since
  // nobody knows yet how many stay, another one by all tokens. `to`: rows [D] by token.
  template <class E>
  static void convolve(const Window& w, const Request& r, Slots slots, bool drafts, int64_t place, float* to) {
    const int64_t old = w.width - 1;
    const bool keeps = slots.write >= 0 && r.tokens > 0;
    for (int64_t i = 0; i < w.D; i += vec) {
      F x[4];
      for (int64_t j = 0; j < old; j++) {
        const int64_t row = w.ring ? j - old : j;
        x[j] = slots.read < 0 ? F{} : w.template load_row<E>(slots.read, place, row, i);
      }
      // read before it is written: in one slot or in two
      for (int64_t j = 1; !w.ring && drafts && keeps && j < old; j++) {
        w.template store_row<E>(slots.write, 0, j - 1, i, x[j]);
      }
      for (int64_t t = 0; t < r.tokens; t++) {
        F y = load<vec>(w.taps + w.width * w.D + i);
        x[old] = load<vec>(reinterpret_cast<const E*>(w.mixed.at(r.batch, r.first + t)) + w.input(i));
        for (int64_t j = 0; j <= old; j++) y += x[j] * load<vec>(w.taps + j * w.D + i);
        if constexpr (conv == Conv::silu) y *= sigmoid_of<vec>(y);
        E rounded[vec];
        store<vec>(rounded, y);
        store<vec>(to + t * w.D + i, load<vec>(rounded));
        if (keeps && w.ring) w.template store_row<E>(slots.write, place, t, i, x[old]);
        if (keeps && !w.ring && drafts) w.template store_row<E>(slots.write, 0, old - 1 + t, i, x[old]);
        for (int64_t j = 0; j < old; j++) x[j] = x[j + 1];
      }
      for (int64_t j = 0; !w.ring && !drafts && keeps && j < old; j++) {
        w.template store_row<E>(slots.write, 0, j, i, x[j]);
      }
    }
  }

  static void convolve_all(const Call& c, const Window& w, float* to) {
#pragma omp parallel for schedule(static) if (c.N * w.D > 1 << 14)
    for (int64_t n = 0; n < c.N; n++) {
      const Request r = request_of(c, n, Setting::writes, Setting::tokens);
      if (r.read < 0) continue;
      const Slots slots = slots_of(c, r, n);
      float* rows = to + (r.batch * c.T + r.first) * w.D;
      const int64_t place = w.place_of(c, n);
      if (w.mixed.type == fp32) convolve<float>(w, r, slots, c.slots, place, rows);
      else if (w.mixed.type == bf16) convolve<Bf16>(w, r, slots, c.slots, place, rows);
      else convolve<Half>(w, r, slots, c.slots, place, rows);
    }
  }

  // The weights as `Window` has them.
  static void lay_taps(const Arguments& given, const Window& w, float* to) {
    int64_t D = w.D, width = w.width;
    const Tensor weight = given.tensor(CONV_WEIGHT, w.mixed.type, "[D, width]", {&D, &width});
    for (int64_t j = 0; j < width; j++) copy_values(weight, j * weight.stride[1], to + j * D, D, weight.stride[0]);
    std::fill(to + width * D, to + (width + 1) * D, 0.0f);
    if (w.bias.given) copy_values(w.bias, 0, to + width * D, D, 1);
  }

  // a or b of q/k heads side by side, [b | a] of each, as [B, T, HV] in fp32.
  static void lay_gates(const Call& c, const Tensor& x, const Floats4& to) {
    const int64_t ratio = c.HV / c.H;
    for (int64_t n = 0; n < to.shape[0] * to.shape[1]; n++) {
      const int64_t b = n / to.shape[1], t = n % to.shape[1], row = b * x.stride[0] + t * x.stride[1];
      for (int64_t h = 0; h < c.H; h++) copy_values(x, row + 2 * h * ratio, to.at(b, t, h * ratio), ratio, 1);
    }
  }

 protected:
  struct Weights {
    Tensor gate;
    float weight[widest], eps;
  };

  // The outputs of all heads, normalised, to the call's own.
  static void finish_all(const Call& c, const Weights& weights, const Floats4& outputs) {
    const int64_t heads = c.N * c.HV;
#pragma omp parallel for schedule(static) if (heads * c.V > 1 << 16)
    for (int64_t i = 0; i < heads; i++) {
      const Request r = request_of(c, i / c.HV, Setting::writes, Setting::tokens);
      finish(c, weights.gate, weights.weight, weights.eps, outputs, r, i % c.HV);
    }
  }

  static void read_weights(const Arguments& given, Call& c, Weights& w) {
    int64_t batch = c.output.size[0];
    if (c.V > widest || c.V % vec) {
      refuse("ValueError", "v: V=%lld was given, expected multiples of %d to %lld", (long long)c.V, vec,
             (long long)widest);
    }
    w.gate = given.tensor(OUTPUT_GATE, floating, "[B, T, HV, V]", {&batch, &c.T, &c.HV, &c.V}, true);
    const Tensor weight = given.tensor(NORM_WEIGHT, floating, "[V]", {&c.V}, true);
    w.eps = float(given.number(NORM_EPS));
    read(weight, weight.data, c.V, w.weight);
  }

 private:
  static int run(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    const Arguments given(values, count, LAYER_NAMES.data(), LAYER_ARGUMENTS);
    Call c = checked<Setting>(values, ARGUMENTS);
    const int64_t batch = c.output.size[0];
    constexpr bool normed = norm != Norm::none, convolves = conv != Conv::none;
    // all is looked at before anything is written
    Weights weights;
    Window w{};
    if constexpr (normed) read_weights(given, c, weights);
    if constexpr (convolves) w = window_of(given, c);

    const int64_t row = c.HV * c.V, keys = c.H * Setting::K;
    Memory rows(normed ? batch * c.T * row : 0), mixed(convolves ? batch * c.T * w.D : 0);
    Floats4 outputs(rows.floats, batch, c.T, c.HV, c.V, row), q(mixed.floats, batch, c.T, c.H, Setting::K, w.D),
        k(mixed.floats + keys, batch, c.T, c.H, Setting::K, w.D), v(mixed.floats + 2 * keys, batch, c.T, c.HV, c.V, w.D);
    TVMFFIAny inner[ARGUMENTS];
    std::copy(values, values + ARGUMENTS, inner);
    if constexpr (convolves) {
      Memory taps((w.width + 1) * w.D);
      lay_taps(given, w, taps.floats);
      w.taps = taps.floats;
      convolve_all(c, w, mixed.floats);
      inner[Q] = q.argument(), inner[KEY] = k.argument(), inner[VALUE] = v.argument();
    }
    Memory gates(interleaved ? 2 * batch * c.T * c.HV : 0);
    Floats4 a(gates.floats, batch, c.T, c.HV, 1, c.HV), b(gates.floats + batch * c.T * c.HV, batch, c.T, c.HV, 1, c.HV);
    if constexpr (interleaved) {
      lay_gates(c, c.a, a), lay_gates(c, c.b, b);
      inner[A] = a.argument(3), inner[B] = b.argument(3);
    }
    if constexpr (normed) inner[OUTPUT] = outputs.argument();
    if (const int failed = Decode<Setting>::call(inner, ARGUMENTS, result)) return failed;
    if constexpr (normed) finish_all(c, weights, outputs);
    return 0;
  }

 public:
  static int call(const TVMFFIAny* values, int count, TVMFFIAny* result) {
    return answer(result, [&] { return run(values, count, result); });
  }
};

}  // namespace
