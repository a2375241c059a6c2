#pragma once

// The host's side of the three programs of the primer: every CUDA call is checked.

#ifdef __NVCC__

#include <cstdio>
#include <cstdlib>

// Every call into CUDA can fail, and an error of a kernel shows up in a later call: so check each of them.
inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

#endif
