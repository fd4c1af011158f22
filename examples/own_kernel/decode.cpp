// One token of GDN per request: fp32 states [slots, HV, V, K], bf16 inputs, raw gates. The calling convention is that of
// gdntune/kernels/spec.py; call.h reads and checks the arguments.
#include <cmath>

#include "call.h"

namespace {

struct Setting {
  using State = float;
  static constexpr bool k_last = true;
  static constexpr int K = K_SIZE, tile_v = ROWS;
  static constexpr Writes writes = Writes::by_index;
};

constexpr int K = K_SIZE, lanes = 8;
using Lanes = Floats<lanes>;

float number(const Tensor& t, const char* p) {
  if (t.type == fp32) return value(reinterpret_cast<const float*>(p));
  if (t.type == bf16) return value(reinterpret_cast<const Bf16*>(p));
  return value(reinterpret_cast<const Half*>(p));
}

float total(Lanes x) {
  float s = 0;
  for (int i = 0; i < lanes; i++) s += x[i];
  return s;
}

// A row of q or k in fp32, normalised where the call asks for it.
void read_keys(const Call& c, const Tensor& t, const char* p, float factor, Lanes* to) {
  float square = 0;
  for (int i = 0; i < K; i++) {
    const float x = number(t, p + i * t.bytes());
    to[i / lanes][i % lanes] = x;
    square += x * x;
  }
  if (c.l2norm) factor /= std::sqrt(square + 1e-6f);
  for (int i = 0; i < K / lanes; i++) to[i] *= splat<lanes>(factor);
}

void head(const Call& c, int64_t n, int64_t h) {
  const int64_t slots = c.state.size[0], group = c.HV / c.H;
  const int64_t from = c.named(c.read.index(n), slots), to = c.named(c.write.index(n), slots);
  Bf16* out = reinterpret_cast<Bf16*>(c.output.at(n, 0, h));
  if (from < 0) {  // padding: no slot is touched, the output is zero
    for (int64_t row = 0; row < c.V; row += 4) store<4>(out + row, splat<4>(0));
    return;
  }
  Lanes q[K / lanes], k[K / lanes];
  read_keys(c, c.q, c.q.at(n, 0, h / group), c.scale, q);
  read_keys(c, c.k, c.k.at(n, 0, h / group), 1, k);
  const float x = c.softplus_beta * (number(c.a, c.a.at(n, 0, h)) + number(c.dt_bias, c.dt_bias.at(h)));
  const float softplus = (x > c.softplus_threshold ? x : std::log1p(std::exp(x))) / c.softplus_beta;
  const float decay = std::exp(-std::exp(number(c.A_log, c.A_log.at(h))) * softplus);
  const float beta = c.beta_scale / (1 + std::exp(-number(c.b, c.b.at(n, 0, h))));

  const float* state = reinterpret_cast<const float*>(c.state.at(from, h));
  float* target = to < 0 ? nullptr : reinterpret_cast<float*>(c.state.at(to, h));
  const char* v = c.v.at(n, 0, h);
  for (int64_t row = 0; row < c.V; row += ROWS) {
    Lanes dots[ROWS] = {}, sums[ROWS] = {};
    for (int i = 0; i < K / lanes; i++) {
      for (int r = 0; r < ROWS; r++) dots[r] += load<lanes>(state + (row + r) * K + i * lanes) * k[i];
    }
    float u[ROWS], o[ROWS];
    for (int r = 0; r < ROWS; r++) u[r] = beta * (number(c.v, v + (row + r) * c.v.bytes()) - decay * total(dots[r]));
    for (int i = 0; i < K / lanes; i++) {
      for (int r = 0; r < ROWS; r++) {
        const Lanes s = load<lanes>(state + (row + r) * K + i * lanes) * splat<lanes>(decay) + k[i] * splat<lanes>(u[r]);
        sums[r] += s * q[i];
        if (target) store<lanes>(target + (row + r) * K + i * lanes, s);
      }
    }
    for (int r = 0; r < ROWS; r++) o[r] = total(sums[r]);
    for (int r = 0; r < ROWS; r += 4) store<4>(out + row + r, load<4>(o + r));
  }
}

}  // namespace

extern "C" TVM_FFI_DLL_EXPORT int NAME(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {
  return answer(result, [&] {
    const Call c = checked<Setting>(values, count);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < c.N * c.HV; i++) head(c, i / c.HV, i % c.HV);
  });
}
