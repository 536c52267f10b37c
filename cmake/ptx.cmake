# SPDX-License-Identifier: Apache-2.0
# Writes OUT: the PTX of IN, as nvcc wrote it, for the driver of CUDA 12.0 (PTX 8.0) and any later one, and for GPUs of compute capability
# 5.2 and later. That IN needs no more than that is what NVCC's own assembler says: it refuses whatever is newer than the version or the
# target that a file names. cmake -DIN=... -DOUT=... -DNVCC=... -P ptx.cmake
file(READ ${IN} text)
string(REGEX REPLACE "\n\\.version [0-9.]+" "\n.version 8.0" text "${text}")
string(REGEX REPLACE "\n\\.target sm_[0-9a-z]+" "\n.target sm_52" text "${text}")
if(NOT text MATCHES "\n\\.version 8\\.0\n\\.target sm_52\n")
  message(FATAL_ERROR "${IN}: no .version and .target that can be replaced")
endif()
file(WRITE ${OUT}.try.ptx "${text}")
foreach(gpu sm_75 sm_90) # that every nvcc since 12.0 knows
  execute_process(COMMAND ${NVCC} -cubin -arch=${gpu} -o ${OUT}.cubin ${OUT}.try.ptx RESULT_VARIABLE rc ERROR_VARIABLE error)
  if(rc)
    message(FATAL_ERROR "the copy kernel needs more than PTX 8.0 for sm_52: ${error}")
  endif()
endforeach()
file(RENAME ${OUT}.try.ptx ${OUT})
