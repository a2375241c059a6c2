# cmake --install: library, headers, CMake package and pkg-config file.
include(CMakePackageConfigHelpers)
install(TARGETS flash_attention EXPORT flash_attention_targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flash_attention ${PROJECT_BINARY_DIR}/include/flash_attention
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flash_attention)
install(EXPORT flash_attention_targets NAMESPACE flash_attention:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/config.cmake.in
  ${PROJECT_BINARY_DIR}/flash_attentionConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flash_attentionConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flash_attentionConfig.cmake ${PROJECT_BINARY_DIR}/flash_attentionConfigVersion.cmake
        DESTINATION ${package_dir})
# Relative to the file itself, so that an install tree can be moved, and `cmake --install --prefix` needs no new configure.
file(RELATIVE_PATH prefix_from_pkgconfig /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/flash_attention.pc.in ${PROJECT_BINARY_DIR}/flash_attention.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flash_attention.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
