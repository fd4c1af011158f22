// Reads and checks the arguments of a call: tvm_ffi's packed convention, by its C header alone. Its C++ headers take
// seconds to compile, this and a kernel half a second.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <type_traits>

#include "vectors.h"

namespace {

// What a caller gets as a Python TypeError or ValueError.
struct Fault {
  const char* kind;
  char text[512];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(const char* kind, const char* format, ...) {
  Fault fault{kind, {}};
  va_list values;
  va_start(values, format);
  vsnprintf(fault.text, sizeof(fault.text), format, values);
  va_end(values);
  throw fault;
}

enum Type : unsigned { fp32 = 1, bf16 = 2, fp16 = 4, int32 = 8, floating = fp32 | bf16 | fp16 };

template <class T>
constexpr Type type_in_memory = sizeof(T) == 4 ? fp32 : std::is_same_v<T, Bf16> ? bf16 : fp16;

// A tensor's view; strides in elements. All offsets are 64-bit: pools pass 2^31 elements.
struct Tensor {
  char* data = nullptr;
  Type type = fp32;
  bool given = false;
  int rank = 0;
  int64_t size[5] = {}, stride[5] = {};

  int64_t bytes() const { return type == fp32 || type == int32 ? 4 : 2; }
  char* at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return data + (i * stride[0] + j * stride[1] + k * stride[2]) * bytes();
  }
  int64_t index(int64_t i, int64_t j = 0) const { return *reinterpret_cast<const int32_t*>(at(i, j)); }
};

// `[2, any, 128]` of sizes; -1 is any.
struct ShapeText {
  char text[160];

  ShapeText(const int64_t* sizes, int rank) {
    int end = snprintf(text, sizeof(text), "[");
    for (int i = 0; i < rank && end < 120; i++) {
      const char* comma = i ? ", " : "";
      if (sizes[i] < 0) end += snprintf(text + end, sizeof(text) - end, "%sany", comma);
      else end += snprintf(text + end, sizeof(text) - end, "%s%lld", comma, (long long)sizes[i]);
    }
    snprintf(text + end, sizeof(text) - end, "]");
  }
};

class Arguments {
 public:
  Arguments(const TVMFFIAny* values, int count, const char* const* names, int expected)
      : values_(values), names_(names) {
    if (count == expected) return;
    refuse("TypeError", "%d arguments were given, expected %d: %s to %s", count, expected, names[0],
           names[expected - 1]);
  }

  // Whether argument i is anything but None.
  bool has(int i) const { return values_[i].type_index != kTVMFFINone; }

  int rank(int i) const {
    const DLTensor* t = view(i);
    return t ? t->ndim : 0;
  }

  // Argument i, of one of `types`, of the shape that `letters` names: a size that is -1 is set by the first tensor that
  // has it, a null one may be anything. `contiguous`: the elements of the last dimension lie side by side.
  Tensor tensor(int i, unsigned types, const char* letters, std::initializer_list<int64_t*> sizes,
                bool contiguous = false) const {
    const char* name = names_[i];
    const DLTensor* t = view(i);
    if (!t) {
      refuse("TypeError", "%s: %s was given, expected a tensor %s", name, has(i) ? "no tensor" : "None", letters);
    }
    if (t->device.device_type != kDLCPU) {
      refuse("ValueError", "%s: a tensor on device type %d was given, expected a CPU tensor", name,
             int(t->device.device_type));
    }
    Tensor r;
    r.given = true;
    r.type = type_of(t->dtype);
    r.rank = t->ndim;
    if (!(r.type & types)) {
      refuse("TypeError", "%s: dtype code %d of %d bits was given, expected %s%s%s%s", name, t->dtype.code,
             t->dtype.bits, types & fp32 ? "float32 " : "", types & bf16 ? "bfloat16 " : "",
             types & fp16 ? "float16 " : "",
             types & int32 ? "int32 (pass int64 as its low words)" : "");
    }
    int64_t accepted[5] = {};
    bool fits = t->ndim == int(sizes.size());
    int d = 0;
    for (const int64_t* size : sizes) {
      accepted[d] = size ? *size : -1;
      fits = fits && (accepted[d] < 0 || accepted[d] == t->shape[d]);
      d++;
    }
    if (!fits) {
      refuse("ValueError", "%s: shape %s was given, expected %s = %s", name, ShapeText(t->shape, t->ndim).text,
             letters, ShapeText(accepted, d).text);
    }
    d = 0;
    for (int64_t* size : sizes) {
      r.size[d] = t->shape[d];
      r.stride[d] = t->strides[d];
      if (size) *size = t->shape[d];
      d++;
    }
    if (contiguous && r.stride[d - 1] != 1 && r.size[d - 1] > 1) {
      refuse("ValueError", "%s: a last stride of %lld was given, expected 1", name, (long long)r.stride[d - 1]);
    }
    r.data = static_cast<char*>(t->data) + t->byte_offset;
    int64_t count = 1;
    for (d = 0; d < t->ndim; d++) count *= t->shape[d];
    if (!t->data && count) refuse("ValueError", "%s: a tensor without memory was given", name);
    // as CUDA kernels, which load 16 bytes at once
    if (contiguous && count && reinterpret_cast<uintptr_t>(r.data) % 16) {
      refuse("ValueError", "%s: address %p was given, expected a multiple of 16 bytes", name, (void*)r.data);
    }
    for (d = 0; contiguous && d < t->ndim; d++) {
      if (r.size[d] > 1 && r.stride[d] != 1 && r.stride[d] * r.bytes() % 16) {
        refuse("ValueError", "%s: stride %lld at dimension %d was given, expected a multiple of 16 bytes", name,
               (long long)r.stride[d], d);
      }
    }
    return r;
  }

  double number(int i) const {
    if (values_[i].type_index == kTVMFFIFloat) return values_[i].v_float64;
    if (values_[i].type_index == kTVMFFIInt) return double(values_[i].v_int64);
    if (values_[i].type_index == kTVMFFIBool) return double(values_[i].v_int64);
    refuse("TypeError", "%s: no number was given, expected a float or an int", names_[i]);
  }

 private:
  static Type type_of(DLDataType d) {
    if (d.lanes == 1 && d.code == kDLFloat && d.bits == 32) return fp32;
    if (d.lanes == 1 && d.code == kDLFloat && d.bits == 16) return fp16;
    if (d.lanes == 1 && d.code == kDLBfloat && d.bits == 16) return bf16;
    if (d.lanes == 1 && d.code == kDLInt && d.bits == 32) return int32;
    return Type(0);
  }

  const DLTensor* view(int i) const {
    if (values_[i].type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(values_[i].v_ptr);
    if (values_[i].type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(values_[i].v_obj);
    return nullptr;
  }

  const TVMFFIAny* values_;
  const char* const* names_;
};

// Runs a call; a Fault becomes the error that tvm_ffi raises. A body that makes another call gives what that gave: where
// it is not 0, its error is raised already.
template <class Body>
int answer(TVMFFIAny* result, Body body) {
  try {
    if constexpr (std::is_void_v<decltype(body())>) body();
    else if (const int failed = body()) return failed;
  } catch (const Fault& fault) {
    TVMFFIErrorSetRaisedFromCStr(fault.kind, fault.text);
    return -1;
  }
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}

}  // namespace
