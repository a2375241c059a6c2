#pragma once

// The units of masks, for the CPU as for the GPU kernels.

#include "abi/key_bounds.h"
