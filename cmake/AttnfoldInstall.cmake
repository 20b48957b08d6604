# Installs headers, library, CMake package and attnfold.pc; and the command, if it is built.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/attnfold")

install(TARGETS attnfold EXPORT attnfold_targets)
install(DIRECTORY include/attnfold DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(FILES LICENSE NOTICE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
if(ATTNFOLD_TOOLS)
  install(TARGETS attnfold_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

install(EXPORT attnfold_targets NAMESPACE attnfold:: DESTINATION "${package_dir}")
configure_package_config_file(cmake/attnfold-config.cmake.in "${PROJECT_BINARY_DIR}/attnfold-config.cmake"
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/attnfold-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/attnfold-config.cmake" "${PROJECT_BINARY_DIR}/attnfold-config-version.cmake"
        DESTINATION "${package_dir}")

# An archive does not carry its own dependencies: with it, `pkg-config --libs` has to name them, --static or not.
set(pc_private "-lstdc++ -lpthread -lm")
if(ATTNFOLD_CUDA)
  string(PREPEND pc_private "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
endif()
set(pc_libs "-L\${libdir} -lattnfold")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND pc_libs " ${pc_private}")
  set(pc_private "")
endif()
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(pc_libdir "${CMAKE_INSTALL_LIBDIR}")
else()
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
endif()
if(IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(pc_includedir "${CMAKE_INSTALL_INCLUDEDIR}")
else()
  set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
# The prefix is taken from where the file lies, so that an installed tree can be moved and `cmake --install --prefix` holds.
file(RELATIVE_PATH pc_to_prefix "/p/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/p")
configure_file(cmake/attnfold.pc.in "${PROJECT_BINARY_DIR}/attnfold.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/attnfold.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
