#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_attention/export.h"

/// GPU memory, streams, graphs and timing for the command, the benchmarks and the tests. The library itself allocates
/// nothing. Handles are those of the CUDA driver, the same as Options::stream.
namespace flash_attention::cuda {

class FLASH_ATTENTION_API DeviceMemory {
 public:
  /// Throws Error(out_of_memory), which says how much memory there is.
  DeviceMemory(int device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  void* data() const { return reinterpret_cast<void*>(address_); }
  std::size_t size() const { return bytes_; }

  // Each of these waits until it is done.
  void upload(const void* from, std::size_t bytes, std::size_t offset = 0);
  void download(void* to, std::size_t bytes, std::size_t offset = 0) const;
  // These do not wait: they are ordered with the other work of the stream.
  void fill(std::uint8_t value, void* stream = nullptr);
  void copy_from(const DeviceMemory& other, void* stream = nullptr);  // as many bytes as this one holds

 private:
  int device_ = 0;
  std::uint64_t address_ = 0;
  std::size_t bytes_ = 0;
};

class FLASH_ATTENTION_API OwnedStream {
 public:
  explicit OwnedStream(int device);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  void* handle() const { return stream_; }
  void synchronize() const;

 private:
  int device_;
  void* stream_ = nullptr;
};

/// Time between two points of a stream, as the GPU sees it.
class FLASH_ATTENTION_API Stopwatch {
 public:
  explicit Stopwatch(int device);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void start(void* stream);
  void stop(void* stream);
  float milliseconds() const;  // waits for the second point

 private:
  int device_;
  void* start_ = nullptr;
  void* stop_ = nullptr;
};

/// The launches on a stream between begin and end, to be launched again as one.
class FLASH_ATTENTION_API CapturedGraph {
 public:
  CapturedGraph(int device, void* stream);  // begins the capture
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void end();
  void launch(void* stream) const;

 private:
  int device_;
  void* stream_;  // null once the capture has ended
  void* graph_ = nullptr;
  void* executable_ = nullptr;
};

/// Copies bytes from the host; waits until they have arrived.
FLASH_ATTENTION_API void upload(int device, void* to, const void* from, std::size_t bytes);

/// Copies bytes of a GPU's memory to the host, after all earlier work of the stream; waits until they have arrived.
FLASH_ATTENTION_API void download(int device, void* to, const void* from, std::size_t bytes, void* stream);

/// Whether the stream is being recorded into a graph.
FLASH_ATTENTION_API bool is_captured(void* stream);

/// Waits for all work of the stream. Reports errors of the GPU.
FLASH_ATTENTION_API void synchronize(int device, void* stream = nullptr);

}  // namespace flash_attention::cuda
