# SPDX-License-Identifier: Apache-2.0
# fish completion for ckptfs: of what its --help lists.
source (status dirname)/ckpt.fish
complete -c ckptfs -f -a '(__fish_complete_directories)'
complete -c ckptfs -n 'string match -q -- "-*" (commandline -ct)' -f -a '(__ckpt_options)'
