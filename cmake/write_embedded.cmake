# Writes OUTPUT, a C++ file that defines the table declared in src/jit/embedded.h from kernels/,
# src/emulator/runtime/ and src/cpu/ladder/ below ROOT. A file's text never becomes part of a CMake list, which would drop its semicolons.
function(embed folder prefix)
  file(GLOB_RECURSE names RELATIVE "${ROOT}/${folder}"
       "${ROOT}/${folder}/*.h" "${ROOT}/${folder}/*.cuh" "${ROOT}/${folder}/*.cu" "${ROOT}/${folder}/*.cpp")
  list(SORT names)
  foreach(name IN LISTS names)
    file(READ "${ROOT}/${folder}/${name}" content)
    file(APPEND "${OUTPUT}" "{\"${prefix}${name}\", R\"kernel_source(${content})kernel_source\"sv},\n")
  endforeach()
endfunction()

file(WRITE "${OUTPUT}" "#include \"jit/embedded.h\"\n\nnamespace flash_attention::jit {\nnamespace {\n"
                       "using namespace std::string_view_literals;  // the length is known: clang does not count so far\n"
                       "constexpr EmbeddedFile files[] = {\n")
embed(kernels "")
embed(src/emulator/runtime "emulator/")
embed(src/cpu/ladder "ladder/")  # for those who read it in the command, not to be compiled
file(APPEND "${OUTPUT}" "};\n}  // namespace\n"
                        "std::span<const EmbeddedFile> embedded_files() { return files; }\n"
                        "}  // namespace flash_attention::jit\n")
