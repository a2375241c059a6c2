#include "torch_functions.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>

#include "gil.h"

namespace flash_attention::python {

Torch torch;

void read_current(nb::handle object, Tensor& q) {
  q.stream = current_stream(object, q.device);
  const bool of_torch = torch.tensor != nullptr && PyObject_TypeCheck(object.ptr(), torch.tensor);
  if (!of_torch || known_dtype(q) != Dtype::float32) return;
  PyObject* const word = PyObject_CallNoArgs(torch.matmul_precision);
  if (word == nullptr) return PyErr_Clear();  // it was set in two ways that disagree: ignore both
  const nb::object owned = nb::steal(word);
  if (PyUnicode_CompareWithASCIIString(word, "highest") != 0) q.precision = Precision::tf32;
}

namespace {

/// torch's C++ functions about this thread; the Python ones take 30 to 70 ns more. Null: not in this torch.
struct States {
  bool (*grad_enabled)() = nullptr;            // c10::GradMode::is_enabled()
  std::int64_t (*dispatch_modes)() = nullptr;  // c10::impl::TorchDispatchModeTLS::stack_len()
};

const States& states() {
  static const States found = [] {
    States all;
    void* const library = ::dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return all;
    const auto bind = [&](auto*& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    };
    bind(all.grad_enabled, "_ZN3c108GradMode10is_enabledEv");
    bind(all.dispatch_modes, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
    return all;
  }();
  return found;
}

bool is_grad_enabled() {
  const auto native = states().grad_enabled;
  return native != nullptr ? native() : answer(torch.grad_enabled).ptr() == Py_True;
}

}  // namespace

namespace {

/// Whether autocast is on for this kind of device and would change the type of one of q, k, v. Linear layers have given
/// them its type already in most models, so their calls stay here.
bool would_cast(PyObject* const* qkv, Device device) {
  const bool on_host = device_traits(device).host_memory;
  if (answer(on_host ? torch.autocast : torch.autocast_of_cuda).ptr() != Py_True) return false;
  const nb::object wanted = result_of(torch.autocast_type, {on_host ? torch.cpu : torch.cuda});
  return !std::all_of(
      qkv, qkv + 3, [&](PyObject* tensor) { return checked(PyObject_GetAttr(tensor, torch.dtype)).ptr() == wanted.ptr(); });
}

}  // namespace

bool is_intercepted(PyObject* const* qkv, Device device) {
  const auto is_on = [](PyObject* mode) {
    const nb::object found = answer(mode);
    return found.ptr() != Py_False && PyObject_IsTrue(found.ptr()) != 0;
  };
  const auto modes = states().dispatch_modes;
  if (modes != nullptr ? modes() != 0 : is_on(torch.dispatch_modes)) return true;
  if (would_cast(qkv, device)) return true;
  if (std::ranges::any_of(torch.interceptors, is_on)) return true;
  PyObject* const profiled = PyDict_GetItem(torch.profiler, torch.is_profiler_enabled);  // it needs dispatched calls
  if (profiled == Py_True) return true;
  PyObject* const level = PyDict_GetItem(torch.forward_ad, torch.current_level);  // of forward-mode derivatives, or -1
  return level != nullptr && PyLong_AsLong(level) >= 0;
}

bool wants_gradient(PyObject* const* tensors, int count) {
  if (!is_grad_enabled()) return false;
  for (int i = 0; i < count; ++i) {
    if (checked(PyObject_GetAttr(tensors[i], torch.requires_grad)).ptr() != Py_False) return true;
  }
  return false;
}

bool are_tensors(PyObject* const* objects, int count) {
  for (int i = 0; i < count; ++i) {
    if (Py_TYPE(objects[i]) != torch.tensor) return false;
  }
  return true;
}

namespace {

/// torch's C functions for models compiled ahead of time ("AOTInductor"), whose binary interface is stable, and the
/// function with which every extension of torch passes a tensor to Python. A handle is a tensor's address.
struct CFunctions {
  int (*empty_strided)(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides, std::int32_t dtype,
                       std::int32_t device_type, std::int32_t device_index, void** handle) = nullptr;
  int (*data_of)(void* handle, void** data) = nullptr;
  int (*remove)(void* handle) = nullptr;
  PyObject* (*wrap)(const void* handle) = nullptr;
  std::int32_t float32 = 0, float16 = 0, bfloat16 = 0, uint8 = 0, cpu = 0, cuda = 0;
  bool complete = false;
};

CFunctions find_functions() {
  CFunctions found;
  // Torch is loaded, or there would be no tensor: this only looks up its libraries.
  void* const core = ::dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  void* const binding = ::dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD);
  if (core == nullptr || binding == nullptr) return found;
  bool complete = true;
  const auto bind = [&](void* library, auto*& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    complete = complete && function != nullptr;
  };
  const auto ask = [&](std::int32_t& number, const char* name) {
    std::int32_t (*function)() = nullptr;
    bind(core, function, name);
    if (function != nullptr) number = function();
  };
  bind(core, found.empty_strided, "aoti_torch_empty_strided");
  bind(core, found.data_of, "aoti_torch_get_data_ptr");
  bind(core, found.remove, "aoti_torch_delete_tensor_object");
  bind(binding, found.wrap, "_Z16THPVariable_WrapRKN2at10TensorBaseE");  // THPVariable_Wrap(const at::TensorBase&)
  ask(found.float32, "aoti_torch_dtype_float32");
  ask(found.float16, "aoti_torch_dtype_float16");
  ask(found.bfloat16, "aoti_torch_dtype_bfloat16");
  ask(found.uint8, "aoti_torch_dtype_uint8");
  ask(found.cpu, "aoti_torch_device_type_cpu");
  ask(found.cuda, "aoti_torch_device_type_cuda");
  found.complete = complete;
  return found;
}

const CFunctions& functions() {
  static const CFunctions found = find_functions();
  return found;
}

/// A handle, or null if torch refuses: its Python function then says why.
void* new_handle(const Tensor& shape, std::int32_t dtype) {
  const CFunctions& c = functions();
  void* handle = nullptr;
  const std::int32_t type = device_traits(shape.device).host_memory ? c.cpu : c.cuda;
  const int status = c.empty_strided(shape.rank, shape.sizes, shape.strides, dtype, type, shape.device.index, &handle);
  return status == 0 ? handle : nullptr;
}

void* new_bytes(std::size_t bytes, Device device) {
  Tensor shape;
  shape.rank = 1;
  shape.sizes[0] = static_cast<std::int64_t>(bytes);
  shape.strides[0] = 1;
  shape.device = device;
  return new_handle(shape, functions().uint8);
}

/// Whether the axes, in some order, have no gaps and no overlap: then torch.empty_like keeps the strides.
bool is_dense(const Tensor& tensor) {
  std::int64_t stride = 1, elements = 1;
  for (int axis = 0; axis < tensor.rank; ++axis) elements *= tensor.sizes[axis];
  while (stride < elements) {
    int next = 0;
    while (next < tensor.rank && (tensor.sizes[next] == 1 || tensor.strides[next] != stride)) ++next;
    if (next == tensor.rank) return false;
    stride *= tensor.sizes[next];
  }
  return true;
}

std::int32_t dtype_number(const Tensor& tensor) {
  const CFunctions& c = functions();
  const Dtype dtype = dtype_of(tensor);
  return dtype == Dtype::float32 ? c.float32 : dtype == Dtype::float16 ? c.float16 : c.bfloat16;
}

/// Through Python: torch.empty_strided(sizes, strides, dtype, device), which is faster than with sizes alone.
nb::object by_python(PyObject* like, const nb::tuple& sizes, const nb::tuple& strides, PyObject* dtype) {
  static PyObject* const names = nb::make_tuple("dtype", "device").release().ptr();
  const nb::object place = checked(PyObject_GetAttr(like, torch.device));
  PyObject* const args[] = {sizes.ptr(), strides.ptr(), dtype, place.ptr()};
  return checked(PyObject_Vectorcall(torch.empty_strided, args, 2, names));
}

}  // namespace

NewTensor::NewTensor(PyObject* like, bool is_lse, const Tensor& shape) : tensor(shape), like_(like), is_lse_(is_lse) {
  tensor.data = nullptr;
  if (!is_lse && (!functions().complete || !is_dense(shape))) make_by_python();  // which finds the strides
}

NewTensor NewTensor::like(PyObject* object, const Tensor& tensor) { return {object, false, tensor}; }

NewTensor NewTensor::given(PyObject* object, const Tensor& tensor) { return {nb::borrow(object), tensor}; }

NewTensor NewTensor::lse_of(PyObject* like, const Problem& problem, Device device) {
  Tensor shape;
  shape.name = "lse";
  shape.rank = 3;
  shape.sizes[0] = problem.batch, shape.sizes[1] = problem.heads_q, shape.sizes[2] = problem.seq_q;
  shape.strides[0] = problem.heads_q * problem.seq_q, shape.strides[1] = problem.seq_q, shape.strides[2] = 1;
  shape.device = device;
  return {like, true, shape};
}

NewTensor::~NewTensor() {
  if (handle_ != nullptr) functions().remove(handle_);
}

bool NewTensor::make() {
  if (like_ == nullptr || tensor.data != nullptr) return true;
  const CFunctions& c = functions();
  if (!c.complete) return false;
  handle_ = new_handle(tensor, is_lse_ ? c.float32 : dtype_number(tensor));
  return handle_ != nullptr && c.data_of(handle_, &tensor.data) == 0;
}

void NewTensor::make_by_python() {
  if (like_ == nullptr || tensor.data != nullptr) return;
  const auto& [sizes, strides] = std::tie(tensor.sizes, tensor.strides);
  object_ = is_lse_ ? by_python(like_, nb::make_tuple(sizes[0], sizes[1], sizes[2]),
                                nb::make_tuple(strides[0], strides[1], strides[2]), torch.float32)
                    : result_of(torch.empty_like, {like_});
  tensor = tensor_of(object_, "a new tensor");
}

nb::object NewTensor::to_python() {
  if (like_ == nullptr) return nb::none();
  return object_.is_valid() ? object_ : checked(functions().wrap(handle_));
}

/// The last workspace of a GPU's default stream, which the next call reuses instead of asking torch. Launches on that
/// stream run one after another, from any thread, and are never captured; a second call that is being launched at the same
/// time finds it taken.
struct Scratch::Kept {
  static constexpr std::size_t max_bytes = std::size_t{2} << 20;  // decoding's; larger ones go back to torch
  static constexpr int max_devices = 16;

  void* handle = nullptr;
  void* data = nullptr;
  std::size_t bytes = 0;
  bool taken = false;
};

Scratch::Kept* Scratch::take_kept(std::size_t bytes, Device device, void* stream) {
  static std::array<Kept, Kept::max_devices> all;  // never freed: torch may be gone before static objects are
  const bool has_default_stream = device_traits(device).streams && stream == nullptr;
  if (!has_default_stream || bytes > Kept::max_bytes || device.index >= Kept::max_devices) return nullptr;
  Kept& kept = all[static_cast<std::size_t>(device.index)];
  if (kept.taken) return nullptr;
  kept.taken = true;  // already here, because making a larger one releases the GIL
  if (kept.bytes >= bytes) return &kept;
  const CFunctions& c = functions();
  if (kept.handle != nullptr) c.remove(kept.handle);
  kept.bytes = 0;
  {
    const GilRelease released;
    kept.handle = new_bytes(std::bit_ceil(bytes), device);
  }
  if (kept.handle != nullptr && c.data_of(kept.handle, &kept.data) == 0) {
    kept.bytes = std::bit_ceil(bytes);
    return &kept;
  }
  kept.taken = false;
  return nullptr;
}

Scratch::Scratch(std::size_t bytes, Device device, void* stream)
    : bytes_(bytes), device_(device), kept_(functions().complete ? take_kept(bytes, device, stream) : nullptr) {
  if (kept_ != nullptr) data_ = kept_->data;
}

bool Scratch::make() {
  if (data_ != nullptr) return true;
  if (!functions().complete) return false;
  handle_ = new_bytes(bytes_, device_);
  return handle_ != nullptr && functions().data_of(handle_, &data_) == 0;
}

void Scratch::make_by_python(PyObject* like) {
  if (data_ != nullptr) return;
  object_ = by_python(like, nb::make_tuple(bytes_), nb::make_tuple(1), torch.uint8);
  data_ = tensor_of(object_, "workspace").data;
}

Scratch::~Scratch() {
  if (kept_ != nullptr) kept_->taken = false;
  if (handle_ != nullptr) functions().remove(handle_);
}

namespace {

void set_eager(nb::handle tensor, nb::handle empty_like, nb::handle empty_strided, nb::handle float32, nb::handle uint8,
               nb::handle grad_enabled, nb::handle deterministic, nb::handle matmul_precision, nb::handle differentiate,
               nb::handle general_backward, nb::handle autocast, nb::handle autocast_of_cuda, nb::handle autocast_type,
               nb::handle dispatch_modes, nb::tuple interceptors, nb::dict forward_ad, nb::dict profiler,
               nb::handle options) {
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
  torch.empty_like = empty_like.inc_ref().ptr();
  torch.empty_strided = empty_strided.inc_ref().ptr();
  torch.float32 = float32.inc_ref().ptr();
  torch.uint8 = uint8.inc_ref().ptr();
  torch.grad_enabled = grad_enabled.inc_ref().ptr();
  torch.deterministic = deterministic.inc_ref().ptr();
  torch.matmul_precision = matmul_precision.inc_ref().ptr();
  torch.differentiate = differentiate.inc_ref().ptr();
  torch.general_backward = general_backward.inc_ref().ptr();
  torch.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.device = PyUnicode_InternFromString("device");
  torch.dtype = PyUnicode_InternFromString("dtype");
  torch.cpu = PyUnicode_InternFromString("cpu");
  torch.cuda = PyUnicode_InternFromString("cuda");
  torch.to_save = PyUnicode_InternFromString("to_save");
  torch.current_level = PyUnicode_InternFromString("_current_level");
  torch.forward_ad = forward_ad.inc_ref().ptr();
  torch.is_profiler_enabled = PyUnicode_InternFromString("_is_profiler_enabled");
  torch.profiler = profiler.inc_ref().ptr();
  torch.options = PyUnicode_InternFromString("options");
  torch.named_options = options.inc_ref().ptr();
  torch.autocast = autocast.inc_ref().ptr();
  torch.autocast_of_cuda = autocast_of_cuda.inc_ref().ptr();
  torch.autocast_type = autocast_type.inc_ref().ptr();
  torch.dispatch_modes = dispatch_modes.inc_ref().ptr();
  torch.interceptors.clear();
  for (nb::handle interceptor : interceptors) torch.interceptors.push_back(interceptor.inc_ref().ptr());
}

}  // namespace

void add_torch(nb::module_& module) {
  using namespace nb::literals;
  module.def("set_eager", set_eager, "tensor"_a, "empty_like"_a, "empty_strided"_a, "float32"_a, "uint8"_a,
             "grad_enabled"_a, "deterministic"_a, "matmul_precision"_a, "differentiate"_a, "general_backward"_a,
             "autocast"_a, "autocast_of_cuda"_a, "autocast_type"_a, "dispatch_modes"_a, "interceptors"_a, "forward_ad"_a,
             "profiler"_a, "options"_a);
}

}  // namespace flash_attention::python
