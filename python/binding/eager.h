#pragma once

#include <nanobind/nanobind.h>

namespace flash_attention::python {

/// Adds attention(), a call of eager torch code, and the functions that it needs for a gradient.
void add_eager(nanobind::module_& module);

/// Adds program_forward() and program_backward(), the passes of a call with a program.
void add_eager_program(nanobind::module_& module);

}  // namespace flash_attention::python
