#pragma once

#include <nanobind/nanobind.h>

namespace flash_attention::python {

/// Adds attention(), a call of eager torch code, and what it needs for a gradient.
void add_eager(nanobind::module_& module);

/// Adds attend_program() and attend_program_backward(), the same with a program.
void add_eager_program(nanobind::module_& module);

}  // namespace flash_attention::python
