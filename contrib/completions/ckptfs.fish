# SPDX-License-Identifier: Apache-2.0
# fish completion for ckptfs.
complete -c ckptfs -f -a '(__fish_complete_directories)'
complete -c ckptfs -s f -d 'Stay in the foreground'
complete -c ckptfs -s d -d 'Say what was negotiated'
complete -c ckptfs -s o -x -a 'base= dtype=auto dtype=stored dtype=bfloat16 dtype=float16 dtype=float32 view=hf view=raw view=memory view=dcp view=dcp_hf view=torchtitan view=nanotron view=megatron view=megatron_legacy tp= pp= vpp= ep= etp= ranks= names=hub names=memory max_shard_size= recipe= rope= model_type= dequantize lora=adapter lora=merge lora=base allow_partial allow_mixed allow_leftover follow_symlinks wait io=buffered io=direct readahead= threads= allow_other sandbox=no uid= gid= umask= auto_unmount noexec noatime' -d Option
complete -c ckptfs -s h -l help -d Help
complete -c ckptfs -s V -l version -d Version
