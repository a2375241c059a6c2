#include "cuda/memory.h"

#include <string>
#include <utility>

#include "cuda/context.h"
#include "cuda/status.h"
#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

constexpr unsigned non_blocking = 1;        // CU_STREAM_NON_BLOCKING
constexpr int this_thread_only = 1;         // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr Status out_of_memory_status = 2;  // CUDA_ERROR_OUT_OF_MEMORY

Stream as_stream(void* handle) { return static_cast<Stream>(handle); }

}  // namespace

DeviceMemory::DeviceMemory(int device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const Driver& cu = driver();
  const ContextScope scope(cu, device, nullptr);
  const CaptureUndisturbed undisturbed(cu);
  const Status status = cu.MemAlloc(&address_, bytes);
  if (status == out_of_memory_status) {
    std::size_t free = 0;
    std::size_t total = 0;
    cu.MemGetInfo(&free, &total);
    throw Error(ErrorCode::out_of_memory, "cuda:" + std::to_string(device) + " has no room for " + std::to_string(bytes) +
                                              " bytes: " + std::to_string(free) + " of " + std::to_string(total) +
                                              " are free");
  }
  check(cu, status, "cuMemAlloc");
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  try {
    const ContextScope scope(driver(), device_, nullptr);
    const CaptureUndisturbed undisturbed(driver());
    driver().MemFree(address_);
  } catch (const Error&) {  // the driver no longer exists, so the memory does not either
  }
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), address_(std::exchange(other.address_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceMemory::upload(const void* from, std::size_t bytes, std::size_t offset) {
  if (bytes == 0) return;
  const Driver& cu = driver();
  const ContextScope scope(cu, device_, nullptr);
  check(cu, cu.MemcpyHtoDAsync(address_ + offset, from, bytes, nullptr), "cuMemcpyHtoDAsync");
  check(cu, cu.StreamSynchronize(nullptr), "cuStreamSynchronize");
}

void DeviceMemory::download(void* to, std::size_t bytes, std::size_t offset) const {
  if (bytes == 0) return;
  const Driver& cu = driver();
  const ContextScope scope(cu, device_, nullptr);
  check(cu, cu.MemcpyDtoHAsync(to, address_ + offset, bytes, nullptr), "cuMemcpyDtoHAsync");
  check(cu, cu.StreamSynchronize(nullptr), "cuStreamSynchronize");
}

void DeviceMemory::fill(std::uint8_t value, void* stream) {
  if (bytes_ == 0) return;
  const Driver& cu = driver();
  const ContextScope scope(cu, device_, as_stream(stream));
  check(cu, cu.MemsetD8Async(address_, value, bytes_, as_stream(stream)), "cuMemsetD8Async");
}

void DeviceMemory::copy_from(const DeviceMemory& other, void* stream) {
  if (bytes_ == 0) return;
  const Driver& cu = driver();
  const ContextScope scope(cu, device_, as_stream(stream));
  check(cu, cu.MemcpyDtoDAsync(address_, other.address_, bytes_, as_stream(stream)), "cuMemcpyDtoDAsync");
}

OwnedStream::OwnedStream(int device) : device_(device) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device, nullptr);
  Stream stream = nullptr;
  check(cu, cu.StreamCreate(&stream, non_blocking), "cuStreamCreate");
  stream_ = stream;
}

OwnedStream::~OwnedStream() { driver().StreamDestroy(as_stream(stream_)); }

void OwnedStream::synchronize() const { cuda::synchronize(device_, stream_); }

Stopwatch::Stopwatch(int device) : device_(device) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device, nullptr);
  for (void** event : {&start_, &stop_}) {
    Event made = nullptr;
    check(cu, cu.EventCreate(&made, 0), "cuEventCreate");
    *event = made;
  }
}

Stopwatch::~Stopwatch() {
  for (void* event : {start_, stop_}) driver().EventDestroy(static_cast<Event>(event));
}

void Stopwatch::start(void* stream) {
  const ContextScope scope(driver(), device_, as_stream(stream));
  check(driver(), driver().EventRecord(static_cast<Event>(start_), as_stream(stream)), "cuEventRecord");
}

void Stopwatch::stop(void* stream) {
  const ContextScope scope(driver(), device_, as_stream(stream));
  check(driver(), driver().EventRecord(static_cast<Event>(stop_), as_stream(stream)), "cuEventRecord");
}

float Stopwatch::milliseconds() const {
  const Driver& cu = driver();
  const ContextScope scope(cu, device_, nullptr);
  check(cu, cu.EventSynchronize(static_cast<Event>(stop_)), "cuEventSynchronize");
  float elapsed = 0;
  check(cu, cu.EventElapsedTime(&elapsed, static_cast<Event>(start_), static_cast<Event>(stop_)), "cuEventElapsedTime");
  return elapsed;
}

CapturedGraph::CapturedGraph(int device, void* stream) : device_(device), stream_(stream) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device, as_stream(stream));
  check(cu, cu.StreamBeginCapture(as_stream(stream), this_thread_only), "cuStreamBeginCapture");
}

CapturedGraph::~CapturedGraph() {
  const Driver& cu = driver();
  Graph abandoned = nullptr;
  if (stream_ != nullptr && cu.StreamEndCapture(as_stream(stream_), &abandoned) == 0) graph_ = abandoned;
  if (executable_ != nullptr) cu.GraphExecDestroy(static_cast<GraphExec>(executable_));
  if (graph_ != nullptr) cu.GraphDestroy(static_cast<Graph>(graph_));
}

void CapturedGraph::end() {
  const Driver& cu = driver();
  const ContextScope scope(cu, device_, as_stream(stream_));
  Graph graph = nullptr;
  check(cu, cu.StreamEndCapture(as_stream(std::exchange(stream_, nullptr)), &graph), "cuStreamEndCapture");
  graph_ = graph;
  GraphExec executable = nullptr;
  check(cu, cu.GraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  executable_ = executable;
}

void CapturedGraph::launch(void* stream) const {
  const ContextScope scope(driver(), device_, as_stream(stream));
  check(driver(), driver().GraphLaunch(static_cast<GraphExec>(executable_), as_stream(stream)), "cuGraphLaunch");
}

void upload(int device, void* to, const void* from, std::size_t bytes) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device, nullptr);
  check(cu, cu.MemcpyHtoDAsync(reinterpret_cast<DevicePointer>(to), from, bytes, nullptr), "cuMemcpyHtoDAsync");
  check(cu, cu.StreamSynchronize(nullptr), "cuStreamSynchronize");
}

void download(int device, void* to, const void* from, std::size_t bytes, void* stream) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device, as_stream(stream));
  const auto address = reinterpret_cast<DevicePointer>(from);
  check(cu, cu.MemcpyDtoHAsync(to, address, bytes, as_stream(stream)), "cuMemcpyDtoHAsync");
  check(cu, cu.StreamSynchronize(as_stream(stream)), "cuStreamSynchronize");
}

bool is_captured(void* stream) { return is_capturing(driver(), as_stream(stream)); }

void synchronize(int device, void* stream) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device, as_stream(stream));
  check(cu, cu.StreamSynchronize(as_stream(stream)), "cuStreamSynchronize");
}

}  // namespace flash_attention::cuda
