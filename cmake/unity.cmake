# Most of a small file's compile time is the standard library's headers. In a united build the files of one room, or of one
# test program, are one unit, which halves the time from clean; a build of single files (the preset dev) compiles less after a
# change to one.
option(FLASH_ATTENTION_UNITY "Compile the files of a room as one unit" ON)

# One unit for each room with its folders. Files with flags of their own stay alone, and so do those of the folders of src/ named
# after the target.
function(unite_by_room target)
  if(NOT FLASH_ATTENTION_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE path)
    cmake_path(GET path PARENT_PATH folder)
    string(REGEX REPLACE "^src/" "" folder "${folder}")
    if(NOT options AND path MATCHES "^(src/)?([a-z]+)/" AND NOT folder IN_LIST ARGN)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${CMAKE_MATCH_2})
    endif()
  endforeach()
endfunction()

# One unit for all files but those with flags of their own.
function(unite target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${FLASH_ATTENTION_UNITY} UNITY_BUILD_BATCH_SIZE 0)
endfunction()

# The compiled header of the library's objects, for code that is compiled with optimisation, too: g++ accepts no other.
function(reuse_library_headers target)
  if(FLASH_ATTENTION_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT FLASH_ATTENTION_SANITIZE)
    target_compile_options(${target} PRIVATE -fPIC)  # as they are
    target_precompile_headers(${target} REUSE_FROM flash_attention_headers)
  endif()
endfunction()
