# Choices that were measured and committed (src/plan/tuned/*.json) become strings in the library.
set(flash_attention_tuned_source ${PROJECT_BINARY_DIR}/shipped_tuned.cpp)
file(GLOB tuned_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/plan/tuned/*.json)
set(tuned_texts "")
set(tuned_count 0)
foreach(tuned_file ${tuned_files})
  file(READ ${tuned_file} tuned_text)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${tuned_file})
  string(APPEND tuned_texts "    R\"tuned(${tuned_text})tuned\",\n")
  math(EXPR tuned_count "${tuned_count} + 1")
endforeach()
file(CONFIGURE OUTPUT ${flash_attention_tuned_source} @ONLY CONTENT "#include <array>

#include \"tuning/shipped.h\"

namespace flash_attention::tuning {

std::span<const std::string_view> shipped_files() {
  static constexpr std::array<std::string_view, @tuned_count@> files{
@tuned_texts@  };
  return files;
}

}  // namespace flash_attention::tuning
")
