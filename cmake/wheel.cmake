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
if(TARGET ckptfs-http)
  add_dependencies(ckptfs ckptfs-http) # pyproject.toml names what is built everywhere
  install(TARGETS ckptfs-http RUNTIME DESTINATION libexec/ckptfs COMPONENT wheel)
endif()
# Manual pages and completions go where man and bash look for those of a prefix.
set(SHARE ${SKBUILD_DATA_DIR}/share)
install(FILES fs/mount/ckptfs.1 fs/tool/ckpt.1 fs/load/ckpt-load.1 DESTINATION ${SHARE}/man/man1 COMPONENT wheel)
foreach(program ckpt ckptfs)
  install(FILES contrib/completions/ckpt.bash DESTINATION ${SHARE}/bash-completion/completions RENAME ${program} COMPONENT wheel)
  install(FILES contrib/completions/${program}.fish DESTINATION ${SHARE}/fish/vendor_completions.d COMPONENT wheel)
endforeach()
install(FILES contrib/completions/_ckpt DESTINATION ${SHARE}/zsh/site-functions COMPONENT wheel)
