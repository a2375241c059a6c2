# Most of a small file's compile time is the standard library's headers. In a united build the files of one folder, or of one
# test program, are one unit, which halves the time from clean; a build of single files (the preset dev) compiles less after a
# change to one.
option(FLASH_ATTENTION_UNITY "Compile the files of a folder as one unit" ON)

# One unit for each folder. Files with flags of their own stay alone, and so do those of the folders named after the target.
function(unite_by_folder target)
  if(NOT FLASH_ATTENTION_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME folder)
    if(NOT options AND NOT folder IN_LIST ARGN)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder})
    endif()
  endforeach()
endfunction()

# One unit for all files but those with flags of their own.
function(unite target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${FLASH_ATTENTION_UNITY} UNITY_BUILD_BATCH_SIZE 0)
endfunction()
