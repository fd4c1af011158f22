/* In place of CuTe DSL's runtime library, for compiled objects on a machine without a GPU: what an
   object launches goes to a callback, so that its host code (checks of arguments, grid, parameters)
   runs as it is. The signatures are those of the CUDA runtime. */
#include <stddef.h>
#include <stdint.h>

struct config {
  uint32_t grid[3], block[3];
  size_t shared_bytes;
  void *stream, *attributes;
  uint32_t attribute_count;
};
typedef void (*Launched)(const struct config *, void **parameters);

static Launched launched;

void ptx_on_launch(Launched f) { launched = f; }

int _cudaLaunchKernelEx(const struct config *config, void *kernel, void **parameters) {
  (void)kernel;
  if (!launched) return 1;
  launched(config, parameters);
  return 0;
}

int _cudaLibraryLoadData(void **library) { *library = (void *)1; return 0; }
int _cudaLibraryGetKernel(void **kernel) { *kernel = (void *)1; return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { (void)device; return 0; }
int _cudaDeviceGetAttribute(int *value) { *value = 0; return 0; }
int _cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int cuda_dialect_init_library_once(void) { return 0; }
void cuda_dialect_unload_library_once(void) {}

void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*set)(const char *, const char **, int32_t), int32_t code) {
  const char *parts[1] = {"the launch was refused"};
  (void)code;
  set("RuntimeError", parts, 1);
}
