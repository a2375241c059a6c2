#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "jit/nvrtc/nvrtc_search.h"
#include "jit/sources.h"

namespace flash_attention::jit {

/// NVIDIA's run-time compiler, opened at run time.
class Nvrtc {
 public:
  /// Opens the first place that works. Throws Error(unavailable), which lists every failure.
  explicit Nvrtc(const std::vector<NvrtcPlace>& places);

  /// The compiler of this process. Throws the same error if there is none, and searches again at the next call.
  static const Nvrtc& instance();

  int major() const { return major_; }
  int minor() const { return minor_; }
  const std::filesystem::path& path() const { return path_; }
  const std::string& origin() const { return origin_; }
  /// "nvrtc 13.0, 110123456 bytes": the size distinguishes builds of one version.
  const std::string& identity() const { return identity_; }
  /// Compute capabilities it can compile for, ascending.
  const std::vector<int>& archs() const { return archs_; }

  struct Result {
    bool ok = false;
    std::string binary;  // a cubin; PTX if the architecture option names a virtual architecture
    std::string log;
  };
  /// `headers` are what the source may include. Safe from several threads.
  Result compile(const std::string& source, const std::string& name, const std::vector<SourceFile>& headers,
                 const std::vector<std::string>& options) const;

 private:
  // The library's functions; a status of 0 is success.
  struct Functions {
    int (*version)(int*, int*);
    int (*num_archs)(int*);
    int (*archs)(int*);
    int (*create)(void** program, const char* source, const char* name, int num_headers, const char* const* headers,
                  const char* const* include_names);
    int (*destroy)(void** program);
    int (*compile)(void* program, int num_options, const char* const* options);
    int (*log_size)(void* program, std::size_t*);
    int (*log)(void* program, char*);
    int (*cubin_size)(void* program, std::size_t*);
    int (*cubin)(void* program, char*);
    int (*ptx_size)(void* program, std::size_t*);
    int (*ptx)(void* program, char*);
    const char* (*error_string)(int);
  };

  std::string open(const NvrtcPlace& place);

  Functions call_{};
  int major_ = 0;
  int minor_ = 0;
  std::filesystem::path path_;
  std::string origin_;
  std::string identity_;
  std::vector<int> archs_;
};

}  // namespace flash_attention::jit
