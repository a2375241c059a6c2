#include "tensor.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <vector>

#include "errors.h"

namespace flash_attention::python {
namespace {

// The table a library publishes as type.__dlpack_c_exchange_api__ (DLPack 1.3). Only the last two entries are called.
struct ExchangeTable {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  void* previous;
  void (*allocate)();
  void (*export_owned)();
  void (*import_owned)();
  int (*export_borrowed)(void* object, nb::dlpack::dltensor* out);
  int (*current_stream)(int device_type, std::int32_t device_id, void** out);
};

// DLPack's numbers for devices. Host memory that a GPU can read, too, counts as the host's.
constexpr int dlpack_cpu = 1;
constexpr int dlpack_cuda = 2;
constexpr int dlpack_cuda_host = 3;
constexpr int dlpack_rocm_host = 11;
constexpr int dlpack_cuda_managed = 13;

std::string name_of_device(int device_type) {
  static constexpr const char* names[] = {nullptr,
                                          nullptr,
                                          nullptr,
                                          nullptr,
                                          "OpenCL",
                                          nullptr,
                                          nullptr,
                                          "Vulkan",
                                          "Metal",
                                          "VPI",
                                          "ROCm",
                                          nullptr,
                                          "an extension device",
                                          nullptr,
                                          "oneAPI",
                                          "WebGPU",
                                          "Hexagon",
                                          "MAIA"};
  const bool named = device_type >= 0 && device_type < static_cast<int>(std::size(names)) && names[device_type] != nullptr;
  return named ? names[device_type] : "a device that DLPack numbers " + std::to_string(device_type);
}

/// The table of a type, or null. Types live as long as the process in practice, and few of them are tensors.
const ExchangeTable* exchange_table(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const ExchangeTable* table;
  };
  static std::vector<Entry> known;  // guarded by the GIL
  for (const Entry& entry : known) {
    if (entry.type == type) {
      return entry.table;
    }
  }
  nb::object capsule = nb::getattr(nb::handle((PyObject*)type), "__dlpack_c_exchange_api__", nb::none());
  const ExchangeTable* table = nullptr;
  if (PyCapsule_CheckExact(capsule.ptr())) {
    table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) {
      PyErr_Clear();
    } else if (table->major_version != 1) {
      table = nullptr;
    }
  }
  Py_INCREF((PyObject*)type);
  known.push_back({type, table});
  return table;
}

Device device_of(const char* name, int device_type, int index) {
  switch (device_type) {
    case dlpack_cuda:
    case dlpack_cuda_managed:
      return {.kind = DeviceKind::cuda, .index = index};
    case dlpack_cpu:
    case dlpack_cuda_host:
    case dlpack_rocm_host:
      return {};
    default:
      refuse_value(name,
                   "is on " + name_of_device(device_type) + "; only the memory of a CPU or of an NVIDIA GPU can be read");
  }
}

/// The pending Python error, with the argument's name put in front.
[[noreturn]] void refuse_unreadable(const char* name) {
  std::string reason;
  {
    const nb::python_error error;
    reason = nb::cast<std::string>(nb::str(error.value()));
  }
  reason.resize(std::min(reason.size(), reason.find('\n')));  // torch adds a stack of C++ calls
  refuse_type(name, "has no memory of strided elements (" + reason + ")");
}

/// NumPy exports bfloat16 (of ml_dtypes) by no protocol: returns its bits as uint16, or nothing for other objects.
nb::object bits_of_bfloat16(nb::handle object) {
  const nb::object name = nb::getattr(nb::getattr(object, "dtype", nb::none()), "name", nb::none());
  if (!nb::isinstance<nb::str>(name) || nb::cast<std::string>(name) != "bfloat16" || !nb::hasattr(object, "view"))
    return {};
  try {
    return object.attr("view")("uint16");
  } catch (const nb::python_error&) {  // another library's view
    return {};
  }
}

void fill(Tensor& tensor, void* data, std::uint64_t byte_offset, int rank, const std::int64_t* sizes,
          const std::int64_t* strides) {
  if (rank > Tensor::max_rank) {
    refuse_value(tensor.name, "has " + std::to_string(rank) + " axes; at most 4 are allowed");
  }
  tensor.data = static_cast<char*>(data) + byte_offset;
  tensor.rank = rank;
  std::int64_t dense = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    tensor.sizes[axis] = sizes[axis];
    tensor.strides[axis] = strides ? strides[axis] : dense;
    dense *= sizes[axis];
  }
}

}  // namespace

bool Tensor::is_dtype(nb::dlpack::dtype_code code, int bits) const {
  return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
}

std::string Tensor::describe() const {
  static constexpr std::array kinds{"int", "uint", "float", "opaque", "bfloat", "complex"};
  static constexpr std::array names{// from 6 on, as DLPack counts them: their bits are in their names
                                    "bool",           "float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz",
                                    "float8_e4m3fn",  "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",
                                    "float8_e8m0fnu", "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
  const std::size_t code = dtype.code;
  std::string text = code < kinds.size()                  ? kinds[code] + std::to_string(dtype.bits)
                     : code < kinds.size() + names.size() ? names[code - kinds.size()]
                                                          : "dtype" + std::to_string(dtype.bits);
  text += "[";
  for (int axis = 0; axis < rank; ++axis) {
    text += (axis ? ", " : "") + std::to_string(sizes[axis]);
  }
  return text + "]";
}

Tensor tensor_of(nb::handle object, const char* name, bool writable) {
  Tensor tensor;
  tensor.name = name;
  if (const ExchangeTable* table = exchange_table(Py_TYPE(object.ptr()))) {
    nb::dlpack::dltensor view{};
    if (table->export_borrowed(object.ptr(), &view) != 0) {
      refuse_unreadable(name);
    }
    tensor.dtype = view.dtype;
    tensor.device = device_of(name, view.device.device_type, view.device.device_id);
    fill(tensor, view.data, view.byte_offset, view.ndim, view.shape, view.strides);
    return tensor;
  }
  const auto take = [&](nb::handle source) {
    if (writable) return nb::try_cast(source, tensor.keep_alive, false);
    nb::ndarray<nb::ro> read_only;
    if (!nb::try_cast(source, read_only, false)) return false;
    tensor.keep_alive = nb::ndarray<>(read_only);
    return true;
  };
  const bool taken = take(object);
  const nb::object bits = taken ? nb::object() : bits_of_bfloat16(object);
  if (!taken && !(bits.is_valid() && take(bits))) {
    std::string type = nb::cast<std::string>(nb::str(object.type()));
    if (nb::hasattr(object, "dtype"))
      type += " of dtype " + nb::cast<std::string>(nb::str(nb::object(object.attr("dtype"))));
    refuse_type(name,
                std::string("expected a ") + (writable ? "writable " : "") + "tensor (torch, NumPy, CuPy), got " + type);
  }
  const nb::ndarray<>& array = tensor.keep_alive;
  tensor.dtype = array.dtype();
  if (bits.is_valid()) tensor.dtype.code = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
  tensor.device = device_of(name, array.device_type(), array.device_id());
  fill(tensor, array.data(), 0, static_cast<int>(array.ndim()), array.shape_ptr(), array.stride_ptr());
  return tensor;
}

void* current_stream(nb::handle object, Device device) {
  const ExchangeTable* table = device_traits(device).streams ? exchange_table(Py_TYPE(object.ptr())) : nullptr;
  void* stream = nullptr;
  if (table != nullptr && table->current_stream(dlpack_cuda, device.index, &stream) != 0) {
    throw nb::python_error();
  }
  return stream;
}

Tensor optional_tensor(nb::handle object, const char* name, bool writable) {
  if (object.is_none()) {
    Tensor tensor;
    tensor.name = name;
    return tensor;
  }
  return tensor_of(object, name, writable);
}

std::optional<Dtype> known_dtype(const Tensor& tensor) {
  using Code = nb::dlpack::dtype_code;
  if (tensor.is_dtype(Code::Float, 32)) {
    return Dtype::float32;
  }
  if (tensor.is_dtype(Code::Float, 16)) {
    return Dtype::float16;
  }
  if (tensor.is_dtype(Code::Bfloat, 16)) {
    return Dtype::bfloat16;
  }
  return std::nullopt;
}

Dtype dtype_of(const Tensor& tensor) {
  if (const std::optional<Dtype> dtype = known_dtype(tensor)) {
    return *dtype;
  }
  refuse_type(tensor.name, "got " + tensor.describe() + "; allowed dtypes are float32, float16 and bfloat16");
}

}  // namespace flash_attention::python
