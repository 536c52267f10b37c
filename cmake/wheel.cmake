# SPDX-License-Identifier: Apache-2.0
# What a Python wheel holds beside its modules: ckptfs/bin and ckptfs/lib, which find each other wherever the wheel is installed.
foreach(program ckptfs ckpt ckpt-load)
  set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
endforeach()
install(TARGETS ckptfs ckpt ckpt-load RUNTIME DESTINATION bin COMPONENT wheel)
foreach(library ckptfs-load-shared ${CKPTFS_TRANSPORTS})
  set_target_properties(${library} PROPERTIES INSTALL_RPATH "$ORIGIN" VERSION 0) # one file each: wheels have no links
  install(TARGETS ${library} LIBRARY DESTINATION lib COMPONENT wheel NAMELINK_SKIP)
endforeach()
