#pragma once

// The masks' units, for the CPU as for the kernels.

#include "abi/key_bounds.h"
