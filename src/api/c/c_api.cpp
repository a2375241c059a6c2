#include "flash_attention/c_api.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "api/c/structs.h"
#include "api/checks/refuse.h"
#include "api/guard.h"
#include "flash_attention/version.h"

namespace fa = flash_attention;

namespace {

thread_local std::string last_error;

/// Runs a call and turns its exceptions into a status. No exception crosses the C boundary.
template <class Call>
flash_attention_status status_of(Call&& call) noexcept {
  try {
    fa::api::guarded(call);
    return FLASH_ATTENTION_OK;
  } catch (const fa::Error& error) {
    last_error = error.what();
    return static_cast<flash_attention_status>(error.code());
  }
}

using Entry = void (*)(const fa::Problem&, const fa::Buffers&, const fa::Options&);

flash_attention_status run(Entry entry, const flash_attention_problem* problem, const flash_attention_buffers* buffers,
                           const flash_attention_options* options) noexcept {
  return status_of(
      [&] { entry(fa::api::problem_of(problem), fa::api::buffers_of(buffers), fa::api::options_of(options)); });
}

}  // namespace

void flash_attention_problem_init_sized(flash_attention_problem* problem, size_t size) {
  fa::api::init_sized(problem, size);
}
void flash_attention_buffers_init_sized(flash_attention_buffers* buffers, size_t size) {
  fa::api::init_sized(buffers, size);
}
void flash_attention_options_init_sized(flash_attention_options* options, size_t size) {
  fa::api::init_sized(options, size);
}
void flash_attention_append_problem_init_sized(flash_attention_append_problem* problem, size_t size) {
  fa::api::init_sized(problem, size);
}
void flash_attention_append_buffers_init_sized(flash_attention_append_buffers* buffers, size_t size) {
  fa::api::init_sized(buffers, size);
}
void flash_attention_append_gradients_init_sized(flash_attention_append_gradients* gradients, size_t size) {
  fa::api::init_sized(gradients, size);
}

flash_attention_status flash_attention_append(const flash_attention_append_problem* problem,
                                              const flash_attention_append_buffers* buffers,
                                              const flash_attention_options* options) {
  return status_of([&] {
    fa::append(fa::api::append_problem_of(problem), fa::api::append_buffers_of(buffers), fa::api::options_of(options));
  });
}

flash_attention_status flash_attention_append_backward(const flash_attention_append_problem* problem,
                                                       const flash_attention_append_buffers* buffers,
                                                       const flash_attention_append_gradients* gradients,
                                                       const flash_attention_options* options) {
  return status_of([&] {
    fa::append_backward(fa::api::append_problem_of(problem), fa::api::append_buffers_of(buffers),
                        fa::api::append_gradients_of(gradients), fa::api::options_of(options));
  });
}

flash_attention_status flash_attention_append_backward_workspace(const flash_attention_append_problem* problem,
                                                                 size_t* bytes) {
  return status_of([&] {
    if (bytes == nullptr) fa::api::refuse("bytes", "null", "a place for the answer");
    *bytes = fa::append_backward_workspace(fa::api::append_problem_of(problem));
  });
}

flash_attention_status flash_attention_forward(const flash_attention_problem* problem,
                                               const flash_attention_buffers* buffers,
                                               const flash_attention_options* options) {
  return run(fa::forward, problem, buffers, options);
}

flash_attention_status flash_attention_backward(const flash_attention_problem* problem,
                                                const flash_attention_buffers* buffers,
                                                const flash_attention_options* options) {
  return run(fa::backward, problem, buffers, options);
}

flash_attention_status flash_attention_standard_forward(const flash_attention_problem* problem,
                                                        const flash_attention_buffers* buffers,
                                                        const flash_attention_options* options) {
  return run(fa::standard_forward, problem, buffers, options);
}

flash_attention_status flash_attention_standard_backward(const flash_attention_problem* problem,
                                                         const flash_attention_buffers* buffers,
                                                         const flash_attention_options* options) {
  return run(fa::standard_backward, problem, buffers, options);
}

flash_attention_status flash_attention_tangent(const flash_attention_problem* problem,
                                               const flash_attention_buffers* buffers,
                                               const flash_attention_options* options) {
  return run(fa::tangent, problem, buffers, options);
}

flash_attention_status flash_attention_second(const flash_attention_problem* problem,
                                              const flash_attention_buffers* buffers,
                                              const flash_attention_options* options) {
  return run(fa::second, problem, buffers, options);
}

flash_attention_status flash_attention_workspace_bytes(const flash_attention_problem* problem, int32_t pass,
                                                       const flash_attention_options* options, size_t* bytes) {
  return status_of([&] {
    if (bytes == nullptr) fa::api::refuse("bytes", "null", "a place for the answer");
    *bytes = fa::workspace_bytes(fa::api::problem_of(problem), fa::api::pass_of(pass), fa::api::options_of(options));
  });
}

flash_attention_status flash_attention_mask_preparation(const flash_attention_problem* problem, int32_t pass,
                                                        const flash_attention_buffers* buffers,
                                                        const flash_attention_options* options, size_t* bytes,
                                                        uint64_t* stamp) {
  return status_of([&] {
    if (bytes == nullptr || stamp == nullptr) fa::api::refuse("bytes, stamp", "null", "places for the answers");
    const fa::MaskPreparation needed = fa::mask_preparation(fa::api::problem_of(problem), fa::api::pass_of(pass),
                                                            fa::api::buffers_of(buffers), fa::api::options_of(options));
    *bytes = needed.bytes, *stamp = needed.stamp;
  });
}

flash_attention_status flash_attention_prepare_mask(const flash_attention_problem* problem, int32_t pass,
                                                    const flash_attention_buffers* buffers, void* memory, size_t bytes,
                                                    const flash_attention_options* options, uint64_t* stamp) {
  return status_of([&] {
    if (stamp == nullptr) fa::api::refuse("stamp", "null", "a place for the answer");
    *stamp = fa::prepare_mask(fa::api::problem_of(problem), fa::api::pass_of(pass), fa::api::buffers_of(buffers), memory,
                              bytes, fa::api::options_of(options))
                 .stamp;
  });
}

flash_attention_status flash_attention_explain(const flash_attention_problem* problem, int32_t pass,
                                               const flash_attention_options* options, char* text, size_t capacity,
                                               size_t* needed) {
  return status_of([&] {
    if (text == nullptr && capacity > 0) fa::api::refuse("text", "null", "a buffer of `capacity` bytes");
    const std::string answer =
        fa::explain(fa::api::problem_of(problem), fa::api::pass_of(pass), fa::api::options_of(options));
    if (needed != nullptr) *needed = answer.size() + 1;
    if (capacity == 0) return;
    const size_t length = std::min(answer.size(), capacity - 1);
    std::memcpy(text, answer.data(), length);
    text[length] = '\0';
  });
}

const char* flash_attention_last_error(void) { return last_error.c_str(); }

const char* flash_attention_version(void) { return FLASH_ATTENTION_VERSION; }
