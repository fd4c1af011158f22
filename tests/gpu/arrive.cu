// What compute-sanitizer's racecheck takes for a race: an exchange through shared memory behind __syncthreads(), with a barrier
// ahead of it at which some warps only arrive. `layer` with `window_first` has such a one.
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -o arrive tests/gpu/arrive.cu
//     compute-sanitizer --tool racecheck ./arrive          # 0 hazards
//     compute-sanitizer --tool racecheck ./arrive named    # an error (2025.3.1)

template <bool named> __global__ void exchange(float *out) {
  __shared__ float s[128];
  int t = threadIdx.x;
  if (named) {
    if (t < 96)
      asm volatile("bar.arrive 1, 512;" ::: "memory");
    else
      asm volatile("bar.sync 1, 512;" ::: "memory");
  }
  if (t >= 384) s[t - 384] = t;
  __syncthreads();
  out[blockIdx.x * 512 + t] = s[(t * 5) % 128];
}

int main(int arguments, char **) {
  float *out;
  if (cudaMalloc(&out, 64 * 512 * sizeof(float)) != cudaSuccess) return 1;
  if (arguments > 1)
    exchange<true><<<64, 512>>>(out);
  else
    exchange<false><<<64, 512>>>(out);
  return cudaDeviceSynchronize() != cudaSuccess;
}
