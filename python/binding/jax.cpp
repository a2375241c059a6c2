// The library as custom calls of XLA: one target for both passes, for the CPU and for CUDA.
//
// Operands are the tensors whose bit is set in the attribute `present`, in the order of Slot; backward adds out, lse,
// dout and dlse. Results are (out, lse), or (dq, dk, dv) and then dbias and dsink if they are wanted.
#include <xla/ffi/api/ffi.h>

#include <memory>

#include "call/call.h"
#include "xla_threads.h"

namespace flash_attention::python {
namespace {

namespace ffi = xla::ffi;

nb::dlpack::dtype dtype_of(ffi::DataType type) {
  using Code = nb::dlpack::dtype_code;
  switch (type) {
    case ffi::DataType::F32:
      return {static_cast<std::uint8_t>(Code::Float), 32, 1};
    case ffi::DataType::F16:
      return {static_cast<std::uint8_t>(Code::Float), 16, 1};
    case ffi::DataType::BF16:
      return {static_cast<std::uint8_t>(Code::Bfloat), 16, 1};
    case ffi::DataType::F64:
      return {static_cast<std::uint8_t>(Code::Float), 64, 1};
    case ffi::DataType::S32:
      return {static_cast<std::uint8_t>(Code::Int), 32, 1};
    case ffi::DataType::U8:
      return {static_cast<std::uint8_t>(Code::UInt), 8, 1};
    case ffi::DataType::PRED:
      return {static_cast<std::uint8_t>(Code::Bool), 8, 1};
    default:
      return {static_cast<std::uint8_t>(Code::Int), 0, 1};
  }
}

Tensor tensor_of(const ffi::AnyBuffer& buffer, const char* name, Device device, void* stream) {
  Tensor tensor;
  tensor.name = name;
  tensor.data = buffer.untyped_data();
  tensor.dtype = dtype_of(buffer.element_type());
  tensor.device = device;
  tensor.stream = stream;
  tensor.rank = static_cast<int>(buffer.dimensions().size());
  std::int64_t stride = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.sizes[axis] = buffer.dimensions()[axis];
    tensor.strides[axis] = stride;
    stride *= tensor.sizes[axis];
  }
  return tensor;
}

/// Returns the operands and results of a custom call one after the other.
struct Operands {
  ffi::RemainingArgs args;
  ffi::RemainingRets rets;
  Device device;
  void* stream;
  std::size_t next_arg = 0;
  std::size_t next_ret = 0;

  Tensor arg(const char* name) { return tensor_of(args.get<ffi::AnyBuffer>(next_arg++).value(), name, device, stream); }
  Tensor ret(const char* name) { return tensor_of(*rets.get<ffi::AnyBuffer>(next_ret++).value(), name, device, stream); }
};

template <typename T>
T attribute(const ffi::Dictionary& attributes, const char* name) {
  return attributes.get<T>(name).value();
}

template <typename T>
void read_attribute(const ffi::Dictionary& attributes, const char* name, T& out) {
  out = attribute<T>(attributes, name);
}

template <typename T>
void read_attribute(const ffi::Dictionary& attributes, const char* name, std::optional<T>& out) {
  out = attribute<T>(attributes, name);  // JAX's side fills in the default
}

void read_attribute(const ffi::Dictionary& attributes, const char* name, std::string& out) {
  out = attribute<std::string_view>(attributes, name);
}

CallOptions options_of(const ffi::Dictionary& attributes) {
  CallOptions options;
#define FLASH_ATTENTION_READ(kind, name, ...) read_attribute(attributes, #name, options.name);
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_READ)
#undef FLASH_ATTENTION_READ
  return options;
}

ffi::Error run(Operands operands, const ffi::Dictionary& attributes, ffi::ScratchAllocator* scratch) {
  try {
    const auto present = attribute<std::int64_t>(attributes, "present");
    const bool backward = attribute<bool>(attributes, "backward");
    Slots slots;
    for (int slot = 0; slot < num_slots; ++slot) {
      if (present >> slot & 1) {
        slots[slot] = operands.arg(slot_names[slot]);
      }
    }
    Call call(slots, options_of(attributes));
    const Tensor out = backward ? operands.arg("out") : operands.ret("out");
    const Tensor lse = backward ? operands.arg("lse") : operands.ret("lse");
    call.set_forward(out, lse, attribute<std::int64_t>(attributes, "seed"), attribute<std::int64_t>(attributes, "offset"));
    call.options.backward_follows = !backward && attribute<bool>(attributes, "backward_follows");
    if (backward) {
      Gradients gradients{.dout = operands.arg("dout"),
                          .dlse = operands.arg("dlse"),
                          .dq = operands.ret("dq"),
                          .dk = operands.ret("dk"),
                          .dv = operands.ret("dv"),
                          .dbias = {},
                          .dsink = {}};
      const bool lists = slots[Slot::key_indices].present() || slots[Slot::key_blocks].present();
      if (slots[Slot::bias].present() && !lists) {  // jax.py refuses a gradient of the bias of listed keys
        gradients.dbias = operands.ret("dbias");
      }
      if (slots[Slot::sink].present()) {
        gradients.dsink = operands.ret("dsink");
      }
      call.set_gradients(gradients);
    }
    std::unique_ptr<char[]> memory;  // of the CPU; a GPU's comes from XLA
    if (const std::size_t bytes = call.plan(backward)) {
      const std::size_t room = bytes + Call::workspace_alignment;
      if (scratch == nullptr) {
        memory = std::make_unique_for_overwrite<char[]>(room);
      }
      void* start = scratch == nullptr ? memory.get() : scratch->Allocate(room).value_or(nullptr);
      if (start == nullptr) {
        return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no " + std::to_string(room) + " bytes of workspace");
      }
      call.set_workspace(start, bytes);
    }
    call.run();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error run_cpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const XlaThreads threads(pool);
  return run({args, rets, {}, nullptr}, attributes, nullptr);
}

ffi::Error run_cuda(void* stream, std::int32_t ordinal, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, ffi::Dictionary attributes) {
  return run({args, rets, {.kind = DeviceKind::cuda, .index = ordinal}, stream}, attributes, &scratch);
}

XLA_FFI_DEFINE_HANDLER(cpu_target, run_cpu,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(cuda_target, run_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::ScratchAllocator>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

}  // namespace

/// Adds jax_targets: {platform: capsule} for jax.ffi.register_ffi_target.
void add_jax(nb::module_& module) {
  nb::dict targets;
  targets["cpu"] = nb::capsule(reinterpret_cast<void*>(cpu_target));
  targets["CUDA"] = nb::capsule(reinterpret_cast<void*>(cuda_target));
  module.attr("jax_targets") = targets;
}

}  // namespace flash_attention::python
