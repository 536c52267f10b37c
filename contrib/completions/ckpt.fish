# SPDX-License-Identifier: Apache-2.0
# fish completion for ckpt; ckptfs.fish is its twin.
set -l commands info ls explain export verify digest load plan

complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a info -d 'What the run and the model are'
complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a ls -d 'The tensors, or the files'
complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a explain -d 'Where a tensor comes from'
complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a export -d 'Write the model directory'
complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a verify -d 'Compare with a model directory'
complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a digest -d 'XXH3-128 of files or tensors'
complete -c ckpt -n "not __fish_seen_subcommand_from $commands" -f -a 'load plan' -d 'Run ckpt-load'
complete -c ckpt -l step -x -d 'Step by name or number'
complete -c ckpt -l json -d 'For programs'
complete -c ckpt -l jobs -x -d 'Threads'
complete -c ckpt -n '__fish_seen_subcommand_from ls' -l files -d 'Files, not tensors'
complete -c ckpt -n '__fish_seen_subcommand_from digest verify' -l tensors -d 'Tensors only'
complete -c ckpt -n '__fish_seen_subcommand_from export' -l weights-only -d 'Only the weights and their index'
complete -c ckpt -n '__fish_seen_subcommand_from export' -l no-weights -d 'All files but the weights'
complete -c ckpt -n '__fish_seen_subcommand_from info explain' -s v -l verbose -d 'All details'
complete -c ckpt -n '__fish_seen_subcommand_from load plan' -l layout -x -d 'Who needs what: tp=2,pp=2 or fsdp=4'
complete -c ckpt -n '__fish_seen_subcommand_from load plan' -l readers -x -a 'once node each auto' -d 'Which ranks read'
complete -c ckpt -n '__fish_seen_subcommand_from load plan' -l share -x -d 'So many consecutive ranks share what they read'
complete -c ckpt -n '__fish_seen_subcommand_from plan' -l ranks -x -d 'Ranks of the job'
complete -c ckpt -n '__fish_seen_subcommand_from plan' -l ranks-per-node -x -d 'Ranks on each node'
complete -c ckpt -n '__fish_seen_subcommand_from load' -l verify -d 'Compare with an independent read'
complete -c ckpt -s q -l quiet -d 'No progress bar'
complete -c ckpt -s o -x -a 'base= dtype=auto dtype=stored dtype=bfloat16 dtype=float16 dtype=float32 view=hf view=raw view=memory view=dcp view=dcp_hf view=torchtitan view=nanotron view=megatron view=megatron_legacy tp= pp= vpp= ep= etp= ranks= names=hub names=memory max_shard_size= recipe= rope= model_type= dequantize lora=adapter lora=merge lora=base allow_partial allow_mixed allow_leftover follow_symlinks' -d Option
complete -c ckpt -s h -l help -d Help
complete -c ckpt -s V -l version -d Version
