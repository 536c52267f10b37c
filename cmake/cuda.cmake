# SPDX-License-Identifier: Apache-2.0
# Finds what libckptfs_load_nccl is built with: nvcc and the headers of CUDA (12.0 or later, of a toolkit or of NVIDIA's Python wheels) and
# NCCL. It runs with the driver and the NCCL that it meets: no CUDA runtime is linked. Hints: CUDAToolkit_ROOT and NCCL_ROOT, as variables
# of CMake or of the environment; an installed wheel's folder will do.
# Sets CKPTFS_NCCL_MISSING (what is not there; empty: all is), CUDA_NVCC, CUDA_INCLUDE_DIR and the target ckptfs-nccl.
find_program(CUDA_NVCC nvcc
  HINTS ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} PATHS /usr/local/cuda PATH_SUFFIXES bin nvidia/cu13/bin)
set(CUDA_VERSION "0")
if(CUDA_NVCC)
  execute_process(COMMAND ${CUDA_NVCC} --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(version MATCHES "release ([0-9]+)\\.([0-9]+)")
    set(CUDA_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
  endif()
  execute_process(COMMAND ${CUDA_NVCC} --dryrun nothing.cu OUTPUT_QUIET ERROR_VARIABLE dryrun) # it may be a wrapper, or a link
  if(dryrun MATCHES "TOP=([^\n]+)")
    get_filename_component(CUDA_ROOT ${CMAKE_MATCH_1} REALPATH) # the headers beside this nvcc, and no others
  endif()
endif()
find_path(CUDA_INCLUDE_DIR cudaTypedefs.h HINTS ${CUDA_ROOT} PATH_SUFFIXES include targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include)

set(hints ${NCCL_ROOT} $ENV{NCCL_ROOT})
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${hints} PATH_SUFFIXES include nvidia/nccl/include)
find_file(NCCL_LIBRARY NAMES libnccl.so libnccl.so.2
  HINTS ${hints} PATHS /usr/lib /usr/lib64 /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} /usr/local/lib PATH_SUFFIXES lib64 lib nvidia/nccl/lib)

set(CKPTFS_NCCL_MISSING "")
if(NOT CUDA_NVCC)
  list(APPEND CKPTFS_NCCL_MISSING "nvcc")
elseif(CUDA_VERSION VERSION_LESS 12.0)
  list(APPEND CKPTFS_NCCL_MISSING "CUDA 12.0 (${CUDA_NVCC} is ${CUDA_VERSION})")
elseif(NOT CUDA_INCLUDE_DIR)
  list(APPEND CKPTFS_NCCL_MISSING "the headers of CUDA")
endif()
if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  list(APPEND CKPTFS_NCCL_MISSING "NCCL")
endif()
if(NOT CKPTFS_NCCL_MISSING)
  add_library(ckptfs-nccl SHARED IMPORTED GLOBAL)
  set_target_properties(ckptfs-nccl PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY} IMPORTED_SONAME libnccl.so.2
                        INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR};${CUDA_INCLUDE_DIR}")
endif()
