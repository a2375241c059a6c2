// flash_attention._core: turns Python's tensors into the library's calls. It decides nothing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "call/call.h"
#include "call/kept_masks.h"
#include "checks.h"
#include "diagnosis.h"
#include "eager.h"
#include "errors.h"
#include "flash_attention/runtime.h"
#include "flash_attention/version.h"
#include "gil.h"
#include "program.h"
#include "torch_functions.h"
#include "tune.h"

namespace flash_attention::python {

#ifdef FLASH_ATTENTION_JAX
void add_jax(nb::module_& module);
#endif

void add_append(nb::module_& module);

namespace {

Slots slots_of(const nb::tuple& tensors) {
  Slots slots;
  const int given = static_cast<int>(nb::len(tensors));
  for (int slot = 0; slot < given; ++slot) {
    const nb::handle tensor = tensors[slot];
    if (!tensor.is_none()) slots[slot] = tensor_of(tensor, slot_names[slot]);
  }
  read_current(tensors[0], slots[Slot::q]);
  return slots;
}

/// The object that keeps the masks of a call, and the tensors of the call: for KeptMasks::use.
struct Masks {
  nb::handle kept, tensors, captured;
};

/// Runs the call, on `stream` if q's library does not name a stream; `allocate(bytes)` gives a workspace if one is needed.
void run(Call& call, bool backward, std::uintptr_t stream, nb::handle allocate, const Masks& masks) {
  call.choose(backward);
  if (call.options.stream == nullptr) {
    call.options.stream = reinterpret_cast<void*>(stream);
  }
  const nb::object prepared = use_kept(masks.kept, call, backward, masks.tensors, masks.captured);
  nb::object workspace;
  Tensor memory;
  if (const std::size_t bytes = call.plan(backward)) {
    workspace = allocate(bytes + Call::workspace_alignment);
    memory = tensor_of(workspace, "workspace", true);
    call.set_workspace(memory.data, bytes);
  }
  GilRelease released;
  call.run();
}

/// (kind, rows, first, number) of BackwardPart; None: the whole pass.
std::optional<BackwardPart> part_of(nb::handle given) {
  if (given.is_none()) return std::nullopt;
  using Kind = BackwardPart::Kind;
  const auto [kind, rows, first, number] = nb::cast<std::tuple<std::string, int, int, int>>(given);
  for (const auto& [name, value] : {std::pair{"rows", Kind::rows}, {"block", Kind::block}, {"dq", Kind::dq}}) {
    if (kind == name) return BackwardPart{value, rows, first, number};
  }
  refuse_value("part", "got '" + kind + "', allowed: 'rows', 'block' and 'dq'");
}

/// The tensors of a program, in the form of ProgramArguments.
nb::object captured_of(nb::handle program) {
  return program.is_none() ? nb::none() : nb::borrow(nb::cast<nb::tuple>(program)[1]);
}

void run_forward(nb::tuple tensors, nb::tuple options, nb::handle out, nb::handle lse, std::uint64_t seed,
                 std::uint64_t offset, std::uintptr_t stream, nb::handle allocate, nb::handle program,
                 const std::string& codes, bool latent, nb::handle backward, nb::handle kept, nb::handle row_max,
                 nb::handle statistics) {
  const Slots slots = slots_of(tensors);
  Call call(slots, options_of(options), codes, latent);
  const ProgramArguments captured(program, call);
  if (!backward.is_none()) {  // a backward pass follows, with gradients of these captured tensors
    call.options.backward_follows = true;
    call.problem.program_gradients = nb::cast<std::uint32_t>(backward);
  }
  const Tensor result = tensor_of(out, "out", true), log_sums = optional_tensor(lse, "lse", true);
  call.set_forward(result, log_sums, seed, offset);
  const Tensor largest = optional_tensor(row_max, "row_max", true);  // float32, as lse
  call.buffers.row_max = static_cast<float*>(largest.data);
  if (!statistics.is_none()) {  // (max_logit, key_mass, entropy)
    const auto given = nb::cast<nb::tuple>(statistics);
    call.set_statistics({.max_logit = optional_tensor(given[0], "max_logit", true),
                         .key_mass = optional_tensor(given[1], "key_mass", true),
                         .entropy = optional_tensor(given[2], "entropy", true)});
  }
  run(call, false, stream, allocate, {kept, tensors, captured_of(program)});
}

/// (dout, dlse, dq, dk, dv, dbias, dsink).
Gradients gradients_of(const nb::tuple& given) {
  return {.dout = tensor_of(given[0], "dout"),
          .dlse = optional_tensor(given[1], "dlse"),
          .dq = tensor_of(given[2], "dq", true),
          .dk = tensor_of(given[3], "dk", true),
          .dv = tensor_of(given[4], "dv", true),
          .dbias = optional_tensor(given[5], "dbias", true),
          .dsink = optional_tensor(given[6], "dsink", true)};
}

void run_backward(nb::tuple tensors, nb::tuple options, nb::tuple results, nb::tuple gradients, std::uint64_t seed,
                  std::uint64_t offset, std::uintptr_t stream, nb::handle allocate, nb::handle program, nb::handle kept,
                  nb::handle part, nb::handle statistics) {
  const Slots slots = slots_of(tensors);
  Call call(slots, options_of(options));
  call.options.part = part_of(part);
  const ProgramArguments captured(program, call);
  const Tensor result = tensor_of(results[0], "out"), log_sums = tensor_of(results[1], "lse");
  call.set_forward(result, log_sums, seed, offset);
  call.set_gradients(gradients_of(gradients));
  if (!statistics.is_none()) {  // (entropy, dkey_mass, dentropy)
    const auto given = nb::cast<nb::tuple>(statistics);
    call.set_statistics({.entropy = optional_tensor(given[0], "entropy"),
                         .dkey_mass = optional_tensor(given[1], "dkey_mass"),
                         .dentropy = optional_tensor(given[2], "dentropy")});
  }
  run(call, true, stream, allocate, {kept, tensors, captured_of(program)});
}

/// (q, k, v, bias, sink, out, lse); all but the last two are read.
Tangents tangents_of(const nb::tuple& given) {
  return {.q = optional_tensor(given[0], "q_tangent"),
          .k = optional_tensor(given[1], "k_tangent"),
          .v = optional_tensor(given[2], "v_tangent"),
          .bias = optional_tensor(given[3], "bias_tangent"),
          .sink = optional_tensor(given[4], "sink_tangent"),
          .out = optional_tensor(given[5], "out_tangent", true),
          .lse = optional_tensor(given[6], "lse_tangent", true)};
}

void run_tangent(nb::tuple tensors, nb::tuple options, nb::handle out, nb::handle lse, nb::tuple tangents,
                 std::uint64_t seed, std::uint64_t offset, std::uintptr_t stream, nb::handle allocate) {
  const Slots slots = slots_of(tensors);
  Call call(slots, options_of(options));
  const Tensor result = tensor_of(out, "out", true), log_sums = optional_tensor(lse, "lse", true);
  call.set_forward(result, log_sums, seed, offset);
  call.set_tangents(Pass::tangent, slots, result, tangents_of(tangents));
  run(call, false, stream, allocate, {nb::none(), tensors, nb::none()});
}

/// `gradients` as in run_backward; the last five are written.
void run_second(nb::tuple tensors, nb::tuple options, nb::tuple results, nb::tuple gradients, nb::tuple tangents,
                std::uint64_t seed, std::uint64_t offset, std::uintptr_t stream, nb::handle allocate) {
  const Slots slots = slots_of(tensors);
  Call call(slots, options_of(options));
  const Tensor result = tensor_of(results[0], "out"), log_sums = tensor_of(results[1], "lse");
  call.set_forward(result, log_sums, seed, offset);
  call.set_gradients(gradients_of(gradients));
  call.set_tangents(Pass::second, slots, result, tangents_of(tangents));
  run(call, true, stream, allocate, {nb::none(), tensors, nb::none()});
}

std::string explain_call(nb::tuple tensors, nb::tuple options, bool backward, nb::handle program, nb::handle part) {
  Call call(slots_of(tensors), options_of(options));
  call.options.part = part_of(part);
  const ProgramArguments captured(program, call);
  call.choose(backward);
  return explain(call.problem, call.pass(backward), call.options);
}

void prewarm_call(nb::tuple tensors, nb::tuple options, bool backward) {
  Call call(slots_of(tensors), options_of(options));
  call.choose(backward);
  GilRelease released;
  prewarm(call.problem, call.pass(backward), call.options);
}

/// Writes which scores dropout keeps into `out`, bool [batch, heads_q, seq_q, seq_kv], dense.
void fill_dropout_mask(nb::handle out, std::uint64_t seed, std::uint64_t offset, float dropout_p) {
  const Tensor mask = tensor_of(out, "out", true);
  auto* element = static_cast<std::uint8_t*>(mask.data);
  GilRelease released;
  for (std::int64_t b = 0; b < mask.sizes[0]; ++b) {
    for (std::int64_t h = 0; h < mask.sizes[1]; ++h) {
      for (std::int64_t i = 0; i < mask.sizes[2]; ++i) {
        for (std::int64_t j = 0; j < mask.sizes[3]; ++j) {
          *element++ = dropout_keeps(seed, offset, dropout_p, b, h, mask.sizes[1], i, j);
        }
      }
    }
  }
}

}  // namespace

NB_MODULE(_core, module) {
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // users should read no warning about a mask that a program holds until it ends
  nb::register_exception_translator(translate_error);
  module.attr("version") = FLASH_ATTENTION_VERSION;
  module.def("forward", run_forward, "tensors"_a, "options"_a, "out"_a, "lse"_a.none(), "seed"_a, "offset"_a, "stream"_a,
             "allocate"_a, "program"_a = nb::none(), "codes"_a = "", "latent"_a = false, "backward"_a = nb::none(),
             "kept"_a = nb::none(), "row_max"_a = nb::none(), "statistics"_a = nb::none());
  module.def("backward", run_backward, "tensors"_a, "options"_a, "results"_a, "gradients"_a, "seed"_a, "offset"_a,
             "stream"_a, "allocate"_a, "program"_a = nb::none(), "kept"_a = nb::none(), "part"_a = nb::none(),
             "statistics"_a = nb::none());
  module.def("tangent", run_tangent, "tensors"_a, "options"_a, "out"_a, "lse"_a.none(), "tangents"_a, "seed"_a, "offset"_a,
             "stream"_a, "allocate"_a);
  module.def("second", run_second, "tensors"_a, "options"_a, "results"_a, "gradients"_a, "tangents"_a, "seed"_a, "offset"_a,
             "stream"_a, "allocate"_a);
  module.def("explain", explain_call, "tensors"_a, "options"_a, "backward"_a, "program"_a = nb::none(),
             "part"_a = nb::none());
  module.def("prewarm", prewarm_call, "tensors"_a, "options"_a, "backward"_a);
  module.def("fill_dropout_mask", fill_dropout_mask, "out"_a, "seed"_a, "offset"_a, "dropout_p"_a);
  add_options(module);
  add_append(module);
  add_eager(module);
  add_kept_masks(module);
  add_diagnosis(module);
  add_tune(module);
#ifdef FLASH_ATTENTION_JAX
  add_jax(module);
#endif
}

}  // namespace flash_attention::python
