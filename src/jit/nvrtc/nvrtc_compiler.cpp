#include "jit/nvrtc/nvrtc_compiler.h"

#include <algorithm>
#include <sstream>

#include "jit/cached.h"
#include "jit/file_names.h"
#include "jit/nvrtc/nvrtc.h"
#include "support/files.h"

namespace flash_attention::jit {
namespace {

/// The architecture option: the GPU's own, or the newest virtual architecture that both support.
std::string arch_option(int arch, const Nvrtc* compiler) {
  if (compiler == nullptr || std::ranges::binary_search(compiler->archs(), arch)) {
    return "--gpu-architecture=" + arch_name(arch);
  }
  const auto& archs = compiler->archs();
  const auto newer = std::ranges::upper_bound(archs, arch);
  if (newer == archs.begin()) {
    throw Error(ErrorCode::unavailable, compiler->path().string() + " (" + compiler->identity() + ") compiles for sm_" +
                                            std::to_string(archs.front()) + " and later, not for sm_" +
                                            std::to_string(arch) +
                                            "; install an older one: pip install nvidia-cuda-nvrtc-cu12");
  }
  return "--gpu-architecture=compute_" + std::to_string(*std::prev(newer));
}

/// NVRTC, or null if there is none: kernels in a cache need none.
const Nvrtc* nvrtc_if_any() {
  try {
    return support::settings().jit ? &Nvrtc::instance() : nullptr;
  } catch (const Error&) {
    return nullptr;
  }
}

/// Writes a source that does not compile to a readable place. Returns the path, or a note that it could not be written.
std::string keep_failed_source(const Job& job) {
  const Store& store = product_cache().store();
  const auto path = store.folder() / failed_source_name(job.recipe.stem);
  if (!store.problem().empty() || support::write_file_atomically(path, job.unit.text)) return "(not kept)";
  return path.string();
}

class NvrtcCompiler final : public Compiler {
 public:
  Job prepare(const Unit& unit, Maker maker) const override {
    const support::Settings& settings = support::settings();
    const Nvrtc* nvrtc = maker == Maker::anyone ? nullptr : nvrtc_if_any();
    Job job;
    job.unit = unit;
    job.sources = sources_of_text(unit.text, settings.kernel_dir);
    job.options = {arch_option(unit.arch, nvrtc), "-std=c++20", "-default-device", "--ptxas-options=-v"};
    std::istringstream more(settings.nvrtc_options);
    for (std::string option; more >> option;) job.options.push_back(option);
    const bool is_virtual = job.options.front().find("=compute_") != std::string::npos;
    job.make_recipe(is_virtual ? "ptx" : "cubin", nvrtc == nullptr ? "" : nvrtc->identity());
    return job;
  }

  Product compile(const Job& job) const override {
    const Nvrtc& nvrtc = Nvrtc::instance();
    Nvrtc::Result result = nvrtc.compile(job.unit.text, job.unit.stem + ".cu", job.sources, job.options);
    if (!result.ok)
      throw compile_error("NVRTC (" + nvrtc.identity() + ")", job.unit.name, keep_failed_source(job), result.log);
    return {std::move(result.binary), job.unit.text, std::move(result.log)};
  }
};

}  // namespace

const Compiler& nvrtc_compiler() {
  static const NvrtcCompiler& compiler = *new NvrtcCompiler;  // never destroyed: a background thread may still compile
  return compiler;
}

}  // namespace flash_attention::jit
