#include "jit/nvrtc/nvrtc_search.h"

#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "jit/nvrtc/nvrtc.h"
#include "support/child.h"
#include "support/folder.h"

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryFolder;
using testing::write_text;

const fs::path fakes = FLASH_ATTENTION_FAKES;

/// "origin" and the library below the folder, of the places that have one.
std::vector<std::string> found(const std::vector<NvrtcPlace>& places, const fs::path& root) {
  std::vector<std::string> all;
  for (const NvrtcPlace& place : places) {
    if (!place.missing.empty()) continue;
    all.push_back(place.origin + " " +
                  (place.library.is_absolute() ? fs::relative(place.library, root) : place.library).string());
  }
  return all;
}

std::string missed(const std::vector<NvrtcPlace>& places) {
  std::string all;
  for (const NvrtcPlace& place : places) {
    if (!place.missing.empty()) all += place.origin + ": " + place.missing + "\n";
  }
  return all;
}

TEST(NvrtcSearch, order) {
  const TemporaryFolder root;
  for (const char* file : {"venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                           "venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                           "conda/lib/libnvrtc.so.13", "cuda_home/lib64/libnvrtc.so.13", "cuda_home/lib64/libnvrtc.so.12",
                           "local/cuda-13.0/lib64/libnvrtc.so.13", "local/cuda-12.4/lib64/libnvrtc.so.12"}) {
    write_text(root / file, "");
  }
  support::Settings settings;
  settings.virtual_env = root / "venv";
  settings.conda_prefix = root / "conda";
  settings.cuda_home = root / "cuda_home";
  Surroundings around;
  around.loaded_libraries = {root / "lib/libtorch.so", root / "torch/lib/libnvrtc-builtins.so.13.0",
                             root / "torch/lib/libnvrtc.so.13"};
  around.usr_local = root / "local";
  EXPECT_EQ(found(nvrtc_places(settings, around), root.path()),
            (std::vector<std::string>{"loaded already torch/lib/libnvrtc.so.13",
                                      "Python wheel venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                                      "Python wheel venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                                      "conda conda/lib/libnvrtc.so.13", "CUDA_HOME cuda_home/lib64/libnvrtc.so.13",
                                      "CUDA_HOME cuda_home/lib64/libnvrtc.so.12", "loader libnvrtc.so.13",
                                      "loader libnvrtc.so.12", "toolkit local/cuda-13.0/lib64/libnvrtc.so.13",
                                      "toolkit local/cuda-12.4/lib64/libnvrtc.so.12"}));
}

TEST(NvrtcSearch, the_variable_shuts_out_all_others) {
  const TemporaryFolder root;
  write_text(root / "mine/libnvrtc.so.13", "");
  write_text(root / "conda/lib/libnvrtc.so.13", "");
  support::Settings settings;
  settings.conda_prefix = root / "conda";
  settings.nvrtc = root / "mine";
  EXPECT_EQ(found(nvrtc_places(settings, {}), root.path()),
            std::vector<std::string>{"FLASH_ATTENTION_NVRTC mine/libnvrtc.so.13"});
  settings.nvrtc = root / "mine/libnvrtc.so.13";
  EXPECT_EQ(found(nvrtc_places(settings, {}), root.path()),
            std::vector<std::string>{"FLASH_ATTENTION_NVRTC mine/libnvrtc.so.13"});
}

TEST(NvrtcSearch, python_packages_are_known_from_loaded_extensions) {
  const TemporaryFolder root;
  write_text(root / "py/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "");
  Surroundings around;
  around.loaded_libraries = {root / "py/site-packages/flash_attention/_core.abi3.so"};
  around.usr_local = root / "local";
  EXPECT_EQ(found(nvrtc_places({}, around), root.path()).front(),
            "Python wheel py/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
}

/// Everything that could name a folder is relative, and below the working folder there is a library for each of them.
TEST(NvrtcSearch, nothing_below_the_working_folder_is_found) {
  const TemporaryFolder root;
  for (const char* file : {".local/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                           "lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "lib/libnvrtc.so.13",
                           "lib64/libnvrtc.so.13", "cuda-13/lib64/libnvrtc.so.13", "libnvrtc.so.13"}) {
    write_text(root / file, "");
  }
  const fs::path before = fs::current_path();
  fs::current_path(root.path());
  std::vector<std::vector<NvrtcPlace>> searches;
  for (const fs::path& here : {fs::path(), fs::path("."), fs::path("lib/..")}) {
    support::Settings settings;
    settings.home = settings.virtual_env = settings.conda_prefix = settings.cuda_home = here;
    Surroundings around;
    around.executable = here / "bin" / "program";
    around.loaded_libraries = {"./libnvrtc.so.13", "lib/python3.11/site-packages/torch.so"};
    around.usr_local = root / "absent";
    searches.push_back(nvrtc_places(settings, around));
    settings.nvrtc = here / "lib";
    searches.push_back(nvrtc_places(settings, around));
    settings.nvrtc = here / "./libnvrtc.so.13";
    searches.push_back(nvrtc_places(settings, around));
  }
  fs::current_path(before);
  for (const auto& places : searches) {
    for (const NvrtcPlace& place : places) {
      EXPECT_TRUE(!place.missing.empty() || !place.library.has_parent_path()) << place.origin << " " << place.library;
    }
  }
}

TEST(Nvrtc, one_that_comes_later_is_found) {
  const TemporaryFolder root;
  const auto child = testing::run_in_child([&] {
    ::setenv("FLASH_ATTENTION_NVRTC", root.path().c_str(), 1);
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        Nvrtc::instance();
        return std::string("found where there is none");
      } catch (const Error& error) {
        if (error.code() != ErrorCode::unavailable) return std::string(error.what());
      }
    }
    fs::copy_file(fakes / "libfake_nvrtc_13.so", root / "libnvrtc.so.13");
    return Nvrtc::instance().identity();
  });
  EXPECT_TRUE(child.output.starts_with("nvrtc 13.7, ")) << child.output;
}

TEST(NvrtcSearch, every_miss_is_reported) {
  const TemporaryFolder root;
  support::Settings settings;
  settings.cuda_home = root / "cuda_home";
  Surroundings around;
  around.usr_local = root / "local";
  const std::string misses = missed(nvrtc_places(settings, around));
  for (const char* part : {"loaded already: this process has no NVRTC", "Python wheel: ", "conda: CONDA_PREFIX is not set",
                           "CUDA_HOME: no libnvrtc.so.13 or libnvrtc.so.12 in ", "toolkit: no "}) {
    EXPECT_NE(misses.find(part), std::string::npos) << misses;
  }
}

TEST(Nvrtc, the_first_that_works_is_taken) {
  const TemporaryFolder root;
  write_text(root / "broken.so", "not a library");
  const Nvrtc nvrtc({{"one", {}, "not there"},
                     {"two", root / "broken.so", ""},
                     {"three", fakes / "libfake_nvrtc_11.so", ""},
                     {"four", fakes / "libfake_cuda.so", ""},
                     {"five", fakes / "libfake_nvrtc_13.so", ""}});
  EXPECT_EQ(nvrtc.origin(), "five");
  EXPECT_EQ(nvrtc.major(), 13);
  EXPECT_EQ(nvrtc.minor(), 7);
  EXPECT_EQ(nvrtc.archs(), (std::vector<int>{75, 80, 90, 100}));
  EXPECT_TRUE(nvrtc.identity().starts_with("nvrtc 13.7, ")) << nvrtc.identity();
}

TEST(Nvrtc, where_there_is_none_the_error_lists_what_was_tried) {
  try {
    Nvrtc({{"one", {}, "nothing in /here"},
           {"two", "/nowhere/libnvrtc.so.13", ""},
           {"three", fakes / "libfake_nvrtc_11.so", ""}});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    for (const char* part : {"pip install nvidia-cuda-nvrtc", "FLASH_ATTENTION_NVRTC", "one: nothing in /here",
                             "two: /nowhere/libnvrtc.so.13: cannot open", "is NVRTC 11.2; 12.0 or later is needed"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace flash_attention::jit
