#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace flash_attention::python {

/// Other threads may run Python while it lives. If the interpreter ends meanwhile (the call is in a daemon thread), CPython
/// unwinds the stack of a thread that acquires the GIL again; in this destructor, that would abort the process. So such a
/// thread sleeps until the process ends, as in CPython from 3.14 on.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flash_attention::python
