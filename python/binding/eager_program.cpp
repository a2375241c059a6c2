// The fast path of a plain call with a program: torch tensors, nothing that traces, q, k, v and what the program captures.
// As attention.cpp, but torch's autograd function is Python's (flash_attention/flex/passes.py), which comes here for both
// passes.
#include "call/kept_masks.h"
#include "eager.h"
#include "plain_call.h"
#include "program.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

/// q, k and v, and the stream of the call; false where it is not plain.
bool read_with_stream(PyObject* const* qkv, Slots& slots) {
  const bool plain = read_tensors(qkv, slots) && slots[Slot::k].sizes[0] == slots[Slot::q].sizes[0];
  if (!plain || is_intercepted(slots[Slot::q].device)) return false;
  read_current(qkv[0], slots[Slot::q]);
  return true;
}

/// attend_program(q, k, v, options, program, with_lse, backward, kept) -> (out, lse or None), or None where the call is not
/// plain. `program` is as ProgramArguments takes it; `backward` is None or, where a backward pass follows, of which
/// captured tensors it gives gradients, as bits; `kept` is None or KeptMasks.
nb::object attend_program(PyObject* const* args, Py_ssize_t count) {
  if (count != 8) throw nb::type_error("attend_program: expected 8 arguments");
  Slots slots;
  if (!read_with_stream(args, slots)) return nb::none();
  Call call(slots, options_of(nb::borrow<nb::tuple>(args[3])));
  const ProgramArguments captured(args[4], call);
  if (args[6] != Py_None) {
    call.options.backward_follows = true;
    call.problem.program_gradients = nb::cast<std::uint32_t>(nb::handle(args[6]));
  }
  NewTensor results[] = {
      NewTensor::like(args[0], slots[Slot::q]),
      args[5] == Py_True ? NewTensor::lse_of(args[0], call.problem, slots[Slot::q].device) : NewTensor()};
  call.set_forward(results[0].tensor, results[1].tensor, 0, 0);
  call.choose(false);
  const nb::object prepared = use_kept(args[7], call, false, nb::none(), nb::cast<nb::tuple>(nb::handle(args[4]))[1]);
  run_call(call, false, args[0], results);
  return nb::make_tuple(results[0].to_python(), results[1].to_python());
}

/// attend_program_backward(q, k, v, out, lse, dout, dlse, options, program, kept) -> (dq, dk, dv), or None where the call
/// is not plain. `program` has the tensors for gradients of what is captured; dlse may be None.
nb::object attend_program_backward(PyObject* const* args, Py_ssize_t count) {
  if (count != 10) throw nb::type_error("attend_program_backward: expected 10 arguments");
  Slots slots;
  if (!are_tensors(args + 3, 3) || !read_with_stream(args, slots)) return nb::none();
  Gradients gradients;
  try {
    gradients.dout = tensor_of(args[5], "dout");
    gradients.dlse = optional_tensor(args[6], "dlse");
  } catch (const Error&) {  // no memory of its own: torch.autograd.grad(is_grads_batched=True)
    return nb::none();
  }
  if (!is_plain(gradients.dout, slots[Slot::q])) return nb::none();
  Call call(slots, options_of(nb::borrow<nb::tuple>(args[7])));
  const ProgramArguments captured(args[8], call);
  call.set_forward(tensor_of(args[3], "out"), tensor_of(args[4], "lse"), 0, 0);
  NewTensor results[] = {NewTensor::like(args[0], slots[Slot::q]), NewTensor::like(args[1], slots[Slot::k]),
                         NewTensor::like(args[2], slots[Slot::v])};
  gradients.dq = results[0].tensor, gradients.dk = results[1].tensor, gradients.dv = results[2].tensor;
  call.set_gradients(gradients);
  call.choose(true);
  const nb::object prepared = use_kept(args[9], call, true, nb::none(), nb::cast<nb::tuple>(nb::handle(args[8]))[1]);
  run_call(call, true, args[0], results);
  return nb::make_tuple(results[0].to_python(), results[1].to_python(), results[2].to_python());
}

}  // namespace

void add_eager_program(nb::module_& module) {
  add_fast<attend_program>(module, "attend_program");
  add_fast<attend_program_backward>(module, "attend_program_backward");
}

}  // namespace flash_attention::python
